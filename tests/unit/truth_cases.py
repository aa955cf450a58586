"""Small models of many families with samples for their tasks, for tests that hold our losses against plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hypha_ray.types import Arrays

SAMPLES, LENGTH, VOCABULARY = 6, 12, 64
_BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64}
_OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "vocab_size": 64}
_LLAMA = _BERT | {"num_key_value_heads": 2, "max_position_embeddings": 32}
_GPT = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 64}
_BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_JAMBA = _LLAMA | {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
_HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8, "num_local_experts": 2} | {
    "num_experts_per_tok": 1,
    "shared_intermediate_size": 8,
    "layer_types": ["mamba", "mamba"],
}
_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
}
_WHISPER = {name: value for name, value in _BART.items() if name != "max_position_embeddings"} | _ENDS
_WAVES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 12,
    "mask_time_prob": 0.0,
}


def _draws() -> np.random.Generator:
    return np.random.default_rng(5)


def text(**others: Any) -> Arrays:
    """Token ids with padding of several lengths."""
    mask = (np.arange(LENGTH) < np.array([[12], [5], [9], [12], [3], [7]])).astype(np.int64)
    return {"input_ids": _draws().integers(6, 60, (SAMPLES, LENGTH)), "attention_mask": mask, **others}


def tokens() -> Arrays:
    """Token ids without padding."""
    return {"input_ids": _draws().integers(6, 60, (SAMPLES, LENGTH))}


def answers() -> Arrays:
    """A prompt whose tokens aren't scored, and an answer."""
    arrays = text()
    prompt = np.arange(LENGTH) < 4
    return arrays | {"labels": np.where(prompt | (arrays["attention_mask"] == 0), -100, arrays["input_ids"])}


def pairs() -> Arrays:
    """Source tokens, and target tokens of several lengths."""
    width = np.array([[8], [3], [5], [8], [2], [6]])
    return text(labels=np.where(np.arange(8) < width, _draws().integers(6, 60, (SAMPLES, 8)), -100))


def tags() -> Arrays:
    """A class for each token, but for padding."""
    arrays = text()
    return arrays | {
        "labels": np.where(arrays["attention_mask"] == 1, _draws().integers(0, 3, (SAMPLES, LENGTH)), -100)
    }


def spans() -> Arrays:
    """Two answers lie outside of the sequence, one of them with its end alone."""
    return text(start_positions=np.array([0, 2, 99, 4, 1, 3]), end_positions=np.array([1, 4, 99, 99, 2, 6]))


def classes(count: int = 3) -> np.ndarray[Any, Any]:
    """A class for each sample."""
    return _draws().integers(0, count, SAMPLES)


def measures() -> np.ndarray[Any, Any]:
    """A number for each sample."""
    return _draws().normal(size=SAMPLES).astype(np.float32)


def choices() -> Arrays:
    """Four answers for each sample."""
    return {"input_ids": _draws().integers(6, 60, (SAMPLES, 4, LENGTH)), "labels": classes(4)}


def images(**others: Any) -> Arrays:
    """Grey pictures."""
    return {"images": _draws().random((SAMPLES, 1, 8, 8), dtype=np.float32), **others}


def _coloured(**others: Any) -> Arrays:
    return {"images": _draws().random((SAMPLES, 3, 16, 16), dtype=np.float32), **others}


def sounds(**others: Any) -> Arrays:
    """Waves."""
    return {"audio": _draws().normal(size=(SAMPLES, 320)).astype(np.float32), **others}


def transcripts() -> Arrays:
    """Waves, and what is said in them, of several lengths."""
    width = np.array([[6], [3], [4], [5], [2], [6]])
    return sounds(labels=np.where(np.arange(6) < width, _draws().integers(1, 12, (SAMPLES, 6)), -100))


def spectra() -> Arrays:
    """Log-mel features, and what is said in them."""
    features = _draws().normal(size=(SAMPLES, 8, 40)).astype(np.float32)
    return {"input_features": features, "labels": pairs()["labels"]}


@dataclass(frozen=True)
class Case:
    """A model, and samples for it."""

    task: str
    model_type: str
    config: dict[str, Any]
    arrays: Arrays
    count: int | None = None
    """Scores, where they can be told by hand."""
    by_hand: bool = False
    """The model's own loss isn't the right one: that of the logits is."""
    floats: bool = False
    """Labels are whole numbers, and measures or several truths at once."""

    def by_keyword(self) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model, as anyone would make them of the samples."""
        inputs = {_KEYWORDS.get(name, name): torch.tensor(array) for name, array in self.arrays.items()}
        labels, ids = inputs.get("labels"), inputs.get("input_ids")
        if self.task in ("causal-lm", "image-text-to-text", "multimodal-lm") and labels is None:
            inputs["labels"] = (
                ids if "attention_mask" not in inputs else ids.masked_fill(inputs["attention_mask"] == 0, -100)
            )
        if labels is not None and self.floats:
            inputs["labels"] = labels.float()
        if "start_positions" in inputs:  # An answer with one end outside is none.
            outside = inputs["end_positions"] >= LENGTH
            inputs["start_positions"] = inputs["start_positions"].masked_fill(outside, 1000)
        return inputs

    def __str__(self) -> str:
        return f"{self.task}-{self.model_type}"


_KEYWORDS = {
    "images": "pixel_values",
    "videos": "pixel_values",
    "audio": "input_values",
    "masks": "bool_masked_pos",
}
_SCORED = 48 - 6  # tokens of `text` that aren't padding, but for the first of each sample
_ANSWERED = 8 + 1 + 5 + 8 + 0 + 3
_TARGETS = 8 + 3 + 5 + 8 + 2 + 6

ACCEPTED = (
    Case("causal-lm", "gpt2", _GPT, text(), _SCORED),
    Case("causal-lm", "gpt2", _GPT, answers(), _ANSWERED),
    Case("causal-lm", "llama", _LLAMA, text(), _SCORED),
    Case("causal-lm", "qwen2", _LLAMA, text(token_type_ids=np.zeros((SAMPLES, LENGTH), np.int64)), _SCORED),
    Case("causal-lm", "gemma", _LLAMA | {"head_dim": 8}, answers(), _ANSWERED),
    Case("causal-lm", "gpt_neox", _BERT | {"max_position_embeddings": 32}, text(), _SCORED),
    Case("causal-lm", "opt", _OPT, text()),
    Case("causal-lm", "bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}, text(), _SCORED),
    Case("causal-lm", "mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 64}, text()),
    Case(
        "causal-lm",
        "mixtral",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        text(),
        _SCORED,
    ),
    Case(
        "causal-lm", "bert", _BERT | {"is_decoder": True}, text(position_ids=np.tile(np.arange(LENGTH), (SAMPLES, 1)))
    ),
    Case("causal-lm", "roberta", _BERT | {"is_decoder": True, "max_position_embeddings": 40}, text(), _SCORED),
    Case("causal-lm", "electra", _BERT | {"is_decoder": True, "embedding_size": 16}, text(), _SCORED),
    Case("causal-lm", "bart", _BART | {"is_decoder": True}, text(), _SCORED, by_hand=True),
    Case("causal-lm", "bart", _BART | {"is_decoder": True, "encoder_layers": 1}, text(), _SCORED, by_hand=True),
    Case("causal-lm", "jamba", _JAMBA | {"attn_layer_offset": 0, "attn_layer_period": 2}, text(), _SCORED),
    Case("causal-lm", "jamba", _JAMBA, text(), _SCORED, by_hand=True),
    Case("causal-lm", "granitemoehybrid", _LLAMA | _HYBRID, text(), _SCORED, by_hand=True),
    Case("causal-lm", "pegasus", _BART | {"is_decoder": True}, answers(), _ANSWERED, by_hand=True),
    Case("causal-lm", "whisper", _WHISPER | {"is_decoder": True, "max_target_positions": 32}, text(), by_hand=True),
    Case("masked-lm", "bert", _BERT | {"mask_token_id": 4}, text()),
    Case("masked-lm", "roberta", _BERT | {"mask_token_id": 4, "max_position_embeddings": 40}, text()),
    Case(
        "masked-lm",
        "distilbert",
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24} | {"vocab_size": 64, "mask_token_id": 4},
        text(),
    ),
    Case("masked-lm", "albert", _BERT | {"embedding_size": 16, "mask_token_id": 4}, text()),
    Case(
        "masked-lm",
        "bert",
        _BERT,
        text(labels=np.where(np.arange(LENGTH) % 5 == 1, 7, -100) * np.ones((SAMPLES, 1), np.int64)),
        18,
    ),
    Case("seq2seq-lm", "t5", _T5 | {"decoder_start_token_id": 0}, pairs(), _TARGETS),
    Case("seq2seq-lm", "bart", _BART | _ENDS, pairs(), _TARGETS),
    Case("seq2seq-lm", "marian", _BART | _ENDS | {"decoder_start_token_id": 0}, pairs(), _TARGETS),
    Case("sequence-classification", "bert", _BERT | {"num_labels": 3}, text(labels=classes()), SAMPLES),
    Case("sequence-classification", "bert", _BERT | {"num_labels": 1}, text(labels=measures()), SAMPLES),
    Case(
        "sequence-classification",
        "distilbert",
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24} | {"vocab_size": 64, "num_labels": 1},
        text(labels=classes(5)),
        SAMPLES,
        floats=True,
    ),
    Case(
        "sequence-classification",
        "roberta",
        _BERT | {"num_labels": 3, "max_position_embeddings": 40},
        text(labels=_draws().integers(0, 2, (SAMPLES, 3)).astype(np.float32)),
        SAMPLES,
    ),
    Case(
        "sequence-classification",
        "bert",
        _BERT | {"num_labels": 3, "problem_type": "multi_label_classification"},
        text(labels=_draws().integers(0, 2, (SAMPLES, 3))),
        SAMPLES,
        floats=True,
    ),
    Case(
        "sequence-classification",
        "gpt2",
        _GPT | {"num_labels": 3, "pad_token_id": 0},
        tokens() | {"labels": classes()},
        SAMPLES,
    ),
    Case("token-classification", "bert", _BERT | {"num_labels": 3}, tags(), 48),
    Case("multiple-choice", "bert", _BERT, choices(), SAMPLES),
    Case("next-sentence-prediction", "bert", _BERT, text(labels=classes(2)), SAMPLES),
    Case("question-answering", "bert", _BERT, spans(), 4),
    Case("question-answering", "roberta", _BERT | {"max_position_embeddings": 40}, spans(), 4),
    Case("image-classification", "vit", _VIT | {"num_labels": 3}, images(labels=classes()), SAMPLES),
    Case("image-classification", "vit", _VIT | {"num_labels": 1}, images(labels=measures()), SAMPLES),
    Case(
        "image-classification",
        "resnet",
        {
            "embedding_size": 4,
            "hidden_sizes": [4, 8],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_channels": 1,
            "num_labels": 3,
        },
        images(labels=classes()),
        SAMPLES,
    ),
    Case(
        "masked-image-modeling",
        "vit",
        _VIT | {"encoder_stride": 4},
        images(masks=_draws().integers(0, 2, (SAMPLES, 4)).astype(bool)),
    ),
    Case(
        "semantic-segmentation",
        "segformer",
        {
            "num_channels": 1,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
            "num_labels": 3,
        },
        images(labels=np.where(_draws().random((SAMPLES, 8, 8)) < np.linspace(0, 0.9, SAMPLES)[:, None, None], 255, 1)),
    ),
    Case(
        "audio-classification",
        "wav2vec2",
        _WAVES | {"num_labels": 3, "classifier_proj_size": 8},
        sounds(labels=classes()),
        SAMPLES,
    ),
    Case(
        "audio-x-vector",
        "wav2vec2",
        _WAVES
        | {
            "num_labels": 3,
            "tdnn_dim": [8, 8],
            "tdnn_kernel": [3, 1],
            "tdnn_dilation": [1, 1],
            "xvector_output_dim": 8,
        },
        sounds(labels=classes()),
        SAMPLES,
    ),
    Case("ctc", "wav2vec2", _WAVES | {"ctc_loss_reduction": "mean", "pad_token_id": 0}, transcripts(), SAMPLES),
    Case(
        "speech-seq2seq",
        "whisper",
        _WHISPER
        | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "decoder_start_token_id": 3},
        spectra(),
        _TARGETS,
    ),
    Case(
        "audio-frame-classification",
        "wav2vec2",
        _WAVES | {"num_labels": 3},
        sounds(labels=np.eye(3, dtype=np.int64)[_draws().integers(0, 3, (SAMPLES, 20))]),
        SAMPLES,
    ),
    Case(
        "video-classification",
        "timesformer",
        _VIT | {"num_frames": 2, "num_labels": 3},
        {"videos": _draws().random((SAMPLES, 2, 1, 8, 8), dtype=np.float32), "labels": classes()},
        SAMPLES,
    ),
    Case(
        "document-question-answering",
        "layoutlm",
        _BERT,
        spans() | {"bbox": np.sort(_draws().integers(0, 500, (SAMPLES, LENGTH, 4)), axis=-1)},
        4,
    ),
    Case(
        "visual-question-answering",
        "vilt",
        _BERT | _VIT | {"num_labels": 3},
        text(labels=_draws().random((SAMPLES, 3), dtype=np.float32)) | images(),
        SAMPLES,
    ),
    Case(
        "image-text-to-text",
        "git",
        _BERT | {"vision_config": _VIT, "max_position_embeddings": 32},
        text() | images(),
        _SCORED,
    ),
    Case(
        "multimodal-lm",
        "git",
        _BERT | {"vision_config": _VIT, "max_position_embeddings": 32},
        answers() | images(),
        _ANSWERED,
    ),
    Case("pretraining", "gpt2", _GPT, answers(), _ANSWERED),
    Case("pretraining", "t5", _T5 | {"decoder_start_token_id": 0}, pairs(), _TARGETS),
)

REFUSED = (
    Case("causal-lm", "bert", _BERT, text()),
    Case("causal-lm", "roberta", _BERT | {"max_position_embeddings": 40}, text()),
    Case("causal-lm", "xlnet", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 64}, tokens()),
    Case("ctc", "wav2vec2", _WAVES | {"ctc_loss_reduction": "sum", "pad_token_id": 0}, transcripts()),
    Case("pretraining", "bert", _BERT, tags() | {"next_sentence_label": classes(2)}),
    Case(
        "zero-shot-image-classification",
        "clip",
        {"text_config": _BERT | _ENDS, "vision_config": _VIT, "projection_dim": 8},
        text() | images(),
    ),
    Case("keypoint-detection", "superpoint", {}, _coloured(labels=classes())),
    Case("image-to-image", "swin2sr", {"embed_dim": 12, "depths": [1], "num_heads": [2]}, _coloured(labels=classes())),
    Case("object-detection", "yolos", _VIT | {"image_size": [8, 8]}, images(labels=classes())),
    Case(
        "depth-estimation",
        "glpn",
        {
            "num_channels": 1,
            "num_encoder_blocks": 4,
            "depths": [1] * 4,
            "hidden_sizes": [8] * 4,
            "num_attention_heads": [1] * 4,
            "decoder_hidden_size": 8,
        },
        {
            "images": _draws().random((SAMPLES, 1, 32, 32), dtype=np.float32),
            "labels": _draws().random((SAMPLES, 32, 32), dtype=np.float32) + 0.5,
        },
    ),
    Case("text-encoding", "t5", _T5, text()),
    Case("auto", "bert", _BERT, text(labels=classes())),
)

UNBUILT = frozenset(
    {
        "image-segmentation",
        "instance-segmentation",
        "universal-segmentation",
        "zero-shot-object-detection",
        "normal-estimation",
        "pointmap-estimation",
        "pose-estimation",
        "keypoint-matching",
        "image-matting",
        "mask-generation",
        "text-recognition",
        "table-recognition",
        "audio-tokenization",
        "rnnt",
        "tdt",
        "text-to-spectrogram",
        "text-to-waveform",
        "time-series-prediction",
        "decision",
        "table-question-answering",
    }
)
"""Tasks of which every family is large, or wants a package that isn't there: the trial before a start judges them."""
