"""Table of tasks. Auto classes are named by strings, so that looking a task up imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace

from hypha_ray.errors import ConfigError
from hypha_ray.model.task import Task

_TEXT = (("input_ids", "input_ids"), ("attention_mask", "attention_mask"))
_IMAGE = (("images", "pixel_values"),)
_VIDEO = (("videos", "pixel_values"),)
_AUDIO = (("audio", "input_values"), ("attention_mask", "attention_mask"))
_SPEECH = (("audio", "input_features"), ("attention_mask", "attention_mask"))
_LABELS = (("labels", "labels"),)
_OBJECTS = (("mask_labels", "mask_labels"), ("class_labels", "class_labels"))
_TRANSDUCED = (("decoder_input_ids", "decoder_input_ids"), ("labels", "labels"))
_PATCHES = (("masks", "bool_masked_pos"),)
_SPANS = (("start_positions", "start_positions"), ("end_positions", "end_positions"))
_SERIES = (("past_values", "past_values"), ("future_values", "future_values"))

_TABLE = (
    Task("causal-lm", "AutoModelForCausalLM", "text", _TEXT, "shifted", perplexity=True),
    Task("masked-lm", "AutoModelForMaskedLM", "text", _TEXT, "masked", perplexity=True),
    Task("seq2seq-lm", "AutoModelForSeq2SeqLM", "text", _TEXT + _LABELS, "positions", perplexity=True),
    Task("sequence-classification", "AutoModelForSequenceClassification", "text", _TEXT + _LABELS, classifies=True),
    Task("token-classification", "AutoModelForTokenClassification", "text", _TEXT + _LABELS, "positions", True),
    Task("multiple-choice", "AutoModelForMultipleChoice", "text", _TEXT + _LABELS, classifies=True),
    Task("next-sentence-prediction", "AutoModelForNextSentencePrediction", "text", _TEXT + _LABELS, classifies=True),
    Task("question-answering", "AutoModelForQuestionAnswering", "text", _TEXT + _SPANS, "spans"),
    Task("table-question-answering", "AutoModelForTableQuestionAnswering", "text", _TEXT + _LABELS),
    Task("text-encoding", "AutoModelForTextEncoding", "text", _TEXT),
    Task("image-classification", "AutoModelForImageClassification", "image", _IMAGE + _LABELS, classifies=True),
    Task("masked-image-modeling", "AutoModelForMaskedImageModeling", "image", _IMAGE + _PATCHES, "patches"),
    Task("zero-shot-image-classification", "AutoModelForZeroShotImageClassification", "image", _TEXT + _IMAGE),
    Task("semantic-segmentation", "AutoModelForSemanticSegmentation", "image", _IMAGE + _LABELS, "pixels"),
    Task("image-segmentation", "AutoModelForImageSegmentation", "image", _IMAGE + _LABELS, "pixels"),
    Task("instance-segmentation", "AutoModelForInstanceSegmentation", "image", _IMAGE + _OBJECTS),
    Task("universal-segmentation", "AutoModelForUniversalSegmentation", "image", _IMAGE + _OBJECTS),
    Task("object-detection", "AutoModelForObjectDetection", "image", _IMAGE + _LABELS),
    Task("zero-shot-object-detection", "AutoModelForZeroShotObjectDetection", "image", _TEXT + _IMAGE + _LABELS),
    Task("depth-estimation", "AutoModelForDepthEstimation", "image", _IMAGE + _LABELS),
    Task("normal-estimation", "AutoModelForNormalEstimation", "image", _IMAGE + _LABELS),
    Task("pointmap-estimation", "AutoModelForPointmapEstimation", "image", _IMAGE + _LABELS),
    Task("pose-estimation", "AutoModelForPoseEstimation", "image", _IMAGE + _LABELS),
    Task("keypoint-detection", "AutoModelForKeypointDetection", "image", _IMAGE + _LABELS),
    Task("keypoint-matching", "AutoModelForKeypointMatching", "image", _IMAGE + _LABELS),
    Task("image-matting", "AutoModelForImageMatting", "image", _IMAGE + _LABELS),
    Task("image-to-image", "AutoModelForImageToImage", "image", _IMAGE + _LABELS),
    Task("mask-generation", "AutoModelForMaskGeneration", "image", _IMAGE),
    Task("text-recognition", "AutoModelForTextRecognition", "image", _IMAGE + _LABELS, "positions"),
    Task("table-recognition", "AutoModelForTableRecognition", "image", _IMAGE + _LABELS, "positions"),
    Task("video-classification", "AutoModelForVideoClassification", "video", _VIDEO + _LABELS, classifies=True),
    Task("image-text-to-text", "AutoModelForImageTextToText", "image", _TEXT + _IMAGE, "shifted", perplexity=True),
    Task("multimodal-lm", "AutoModelForMultimodalLM", "image", _TEXT + _IMAGE, "shifted", perplexity=True),
    Task("visual-question-answering", "AutoModelForVisualQuestionAnswering", "image", _TEXT + _IMAGE + _LABELS),
    Task(
        "document-question-answering",
        "AutoModelForDocumentQuestionAnswering",
        "image",
        _TEXT + _IMAGE + _SPANS,
        "spans",
    ),
    Task("audio-classification", "AutoModelForAudioClassification", "audio", _AUDIO + _LABELS, classifies=True),
    Task("audio-frame-classification", "AutoModelForAudioFrameClassification", "audio", _AUDIO + _LABELS),
    Task("audio-x-vector", "AutoModelForAudioXVector", "audio", _AUDIO + _LABELS),
    Task("audio-tokenization", "AutoModelForAudioTokenization", "audio", _AUDIO),
    Task("ctc", "AutoModelForCTC", "audio", _AUDIO + _LABELS),
    Task("rnnt", "AutoModelForRNNT", "audio", _SPEECH + _TRANSDUCED, "positions", optional=frozenset()),
    Task("tdt", "AutoModelForTDT", "audio", _SPEECH + _TRANSDUCED, optional=frozenset()),
    Task("speech-seq2seq", "AutoModelForSpeechSeq2Seq", "audio", _SPEECH + _LABELS, "positions", perplexity=True),
    Task("text-to-spectrogram", "AutoModelForTextToSpectrogram", "text", _TEXT + _LABELS, "frames"),
    Task("text-to-waveform", "AutoModelForTextToWaveform", "text", _TEXT + _LABELS, "positions"),
    Task("time-series-prediction", "AutoModelForTimeSeriesPrediction", "series", _SERIES),
    Task("decision", "AutoModelForDecision", "series", (("states", "states"), ("actions", "actions"))),
    Task("pretraining", "AutoModelForPreTraining", "text", _TEXT + _LABELS, "positions"),
    Task("auto", "AutoModel", "text", _TEXT + _LABELS),
)

UNTRAINABLE = dict.fromkeys(
    (
        "decision",
        "image-matting",
        "image-to-image",
        "keypoint-detection",
        "keypoint-matching",
        "mask-generation",
        "normal-estimation",
        "pointmap-estimation",
        "table-recognition",
        "text-encoding",
        "text-recognition",
    ),
    "they have no loss in transformers",
)
"""Reasons why workers can't train any model of a task."""
UNTRAINABLE |= dict.fromkeys(
    ("image-segmentation", "object-detection", "zero-shot-object-detection"),
    "their labels are a list of objects for each image, and slices hold tensors of one shape",
)
UNTRAINABLE |= {
    "depth-estimation": "their one loss in transformers, GLPN's, is no mean over samples",
    "zero-shot-image-classification": "their loss compares the samples of a batch with each other",
}

_ALIASES = {
    "text-generation": "causal-lm",
    "language-modeling": "causal-lm",
    "fill-mask": "masked-lm",
    "seq2-seq-lm": "seq2seq-lm",
    "seq-2-seq-lm": "seq2seq-lm",
    "text-classification": "sequence-classification",
    "vision-classification": "image-classification",
    "vision2seq": "image-text-to-text",
    "vision2-seq": "image-text-to-text",
    "vision-2-seq": "image-text-to-text",
    "vison2-seq": "image-text-to-text",
    "speech-seq2-seq": "speech-seq2seq",
    "speech-seq-2-seq": "speech-seq2seq",
    "automatic-speech-recognition": "speech-seq2seq",
    "pre-training": "pretraining",
}

TASKS: dict[str, Task] = {task.name: task for task in _TABLE}
"""Tasks by name and by alias."""
TASKS |= {alias: TASKS[name] for alias, name in _ALIASES.items()}


def find_task(name: str, input_names: Sequence[str] | None = None) -> Task:
    """Look a task up; `_`, spaces and `-` are equal in its name.

    Args:
        name: name or alias of a task.
        input_names: slice tensors to pass to the model under their own names, instead of the task's tensors. If
            `labels` is among them, the task makes none.

    Raises:
        ConfigError: there is no such task; the error names a similar one, if any.

    """
    key = re.sub("[_ ]", "-", name.strip().lower())
    if key not in TASKS:
        similar = difflib.get_close_matches(key, TASKS, n=1, cutoff=0.72)
        raise ConfigError(
            "MODEL001",
            "model.type is unknown",
            repr(name),
            f"{len(_TABLE)} tasks, see docs/configuration.md",
            fix=f"did you mean {similar[0]!r}?" if similar else "name one of them, such as causal-lm",
        )
    task = TASKS[key]
    if input_names is None:
        return task
    tensors = tuple((input_name, input_name) for input_name in input_names)
    return replace(task, tensors=tensors, optional=frozenset())


def require_trainable(task: Task) -> None:
    """Refuse a task that only a trainer outside of Ray, with a loss of its own, can train.

    Raises:
        ConfigError: workers can't train the task.

    """
    if task.name not in UNTRAINABLE:
        return
    trainable: list[str] = []
    for candidate in _TABLE:
        if candidate.modality == task.modality and candidate.name not in UNTRAINABLE:
            trainable.append(candidate.name)
    raise ConfigError(
        "MODEL012",
        f"{task.name} models can't be trained or scored: {UNTRAINABLE[task.name]}",
        allowed=f"for {task.modality}: {', '.join(trainable)}",
        fix="choose another model.type, or train it outside of Ray by bridge.commands",
    )
