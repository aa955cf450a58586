"""Models of many families with samples for their tasks, for tests that hold our losses against plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hypha_ray.types import Arrays
from tests.support.truth_samples import (
    BART,
    BERT,
    ENDS,
    GPT,
    HYBRID,
    JAMBA,
    LENGTH,
    LLAMA,
    MASKFORMER,
    OPT,
    SAMPLES,
    SEAMLESS,
    SPEECHT5,
    T5,
    TRANSDUCER,
    VIT,
    WAVES,
    WHISPER,
    answers,
    cells,
    choices,
    classes,
    coloured,
    draws,
    heatmaps,
    images,
    measures,
    objects,
    pairs,
    series,
    sounds,
    spans,
    spectra,
    spoken,
    tags,
    text,
    tokens,
    transcripts,
    transduced,
)


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
        if "mask_labels" in inputs:
            inputs["mask_labels"] = inputs["mask_labels"].float()
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
    Case("causal-lm", "gpt2", GPT, text(), _SCORED),
    Case("causal-lm", "gpt2", GPT, answers(), _ANSWERED),
    Case("causal-lm", "llama", LLAMA, text(), _SCORED),
    Case("causal-lm", "qwen2", LLAMA, text(token_type_ids=np.zeros((SAMPLES, LENGTH), np.int64)), _SCORED),
    Case("causal-lm", "gemma", LLAMA | {"head_dim": 8}, answers(), _ANSWERED),
    Case("causal-lm", "gpt_neox", BERT | {"max_position_embeddings": 32}, text(), _SCORED),
    Case("causal-lm", "opt", OPT, text()),
    Case("causal-lm", "bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}, text(), _SCORED),
    Case("causal-lm", "mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 64}, text()),
    Case(
        "causal-lm",
        "mixtral",
        LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        text(),
        _SCORED,
    ),
    Case("causal-lm", "bert", BERT | {"is_decoder": True}, text(position_ids=np.tile(np.arange(LENGTH), (SAMPLES, 1)))),
    Case("causal-lm", "roberta", BERT | {"is_decoder": True, "max_position_embeddings": 40}, text(), _SCORED),
    Case("causal-lm", "electra", BERT | {"is_decoder": True, "embedding_size": 16}, text(), _SCORED),
    Case("causal-lm", "bart", BART | {"is_decoder": True}, text(), _SCORED, by_hand=True),
    Case("causal-lm", "bart", BART | {"is_decoder": True, "encoder_layers": 1}, text(), _SCORED, by_hand=True),
    Case("causal-lm", "jamba", JAMBA | {"attn_layer_offset": 0, "attn_layer_period": 2}, text(), _SCORED),
    Case("causal-lm", "jamba", JAMBA, text(), _SCORED, by_hand=True),
    Case("causal-lm", "granitemoehybrid", LLAMA | HYBRID, text(), _SCORED, by_hand=True),
    Case("causal-lm", "pegasus", BART | {"is_decoder": True}, answers(), _ANSWERED, by_hand=True),
    Case("causal-lm", "whisper", WHISPER | {"is_decoder": True, "max_target_positions": 32}, text(), by_hand=True),
    Case("masked-lm", "bert", BERT | {"mask_token_id": 4}, text()),
    Case("masked-lm", "roberta", BERT | {"mask_token_id": 4, "max_position_embeddings": 40}, text()),
    Case(
        "masked-lm",
        "distilbert",
        {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24} | {"vocab_size": 64, "mask_token_id": 4},
        text(),
    ),
    Case("masked-lm", "albert", BERT | {"embedding_size": 16, "mask_token_id": 4}, text()),
    Case(
        "masked-lm",
        "bert",
        BERT,
        text(labels=np.where(np.arange(LENGTH) % 5 == 1, 7, -100) * np.ones((SAMPLES, 1), np.int64)),
        18,
    ),
    Case("seq2seq-lm", "t5", T5 | {"decoder_start_token_id": 0}, pairs(), _TARGETS),
    Case("seq2seq-lm", "bart", BART | ENDS, pairs(), _TARGETS),
    Case("seq2seq-lm", "mbart", BART | ENDS, pairs(), _TARGETS),
    Case("seq2seq-lm", "marian", BART | ENDS | {"decoder_start_token_id": 0}, pairs(), _TARGETS),
    Case("sequence-classification", "bert", BERT | {"num_labels": 3}, text(labels=classes()), SAMPLES),
    Case("sequence-classification", "bert", BERT | {"num_labels": 1}, text(labels=measures()), SAMPLES),
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
        BERT | {"num_labels": 3, "max_position_embeddings": 40},
        text(labels=draws().integers(0, 2, (SAMPLES, 3)).astype(np.float32)),
        SAMPLES,
    ),
    Case(
        "sequence-classification",
        "bert",
        BERT | {"num_labels": 3, "problem_type": "multi_label_classification"},
        text(labels=draws().integers(0, 2, (SAMPLES, 3))),
        SAMPLES,
        floats=True,
    ),
    Case(
        "sequence-classification",
        "gpt2",
        GPT | {"num_labels": 3, "pad_token_id": 0},
        tokens() | {"labels": classes()},
        SAMPLES,
    ),
    Case("token-classification", "bert", BERT | {"num_labels": 3}, tags(), 48),
    Case("multiple-choice", "bert", BERT, choices(), SAMPLES),
    Case("multiple-choice", "bert", BERT | {"num_labels": 1}, choices(), SAMPLES),
    Case("next-sentence-prediction", "bert", BERT, text(labels=classes(2)), SAMPLES),
    Case("question-answering", "bert", BERT, spans(), 4),
    Case("question-answering", "roberta", BERT | {"max_position_embeddings": 40}, spans(), 4),
    Case("image-classification", "vit", VIT | {"num_labels": 3}, images(labels=classes()), SAMPLES),
    Case("image-classification", "vit", VIT | {"num_labels": 1}, images(labels=measures()), SAMPLES),
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
        VIT | {"encoder_stride": 4},
        images(masks=draws().integers(0, 2, (SAMPLES, 4)).astype(bool)),
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
        images(labels=np.where(draws().random((SAMPLES, 8, 8)) < np.linspace(0, 0.9, SAMPLES)[:, None, None], 255, 1)),
    ),
    Case(
        "audio-classification",
        "wav2vec2",
        WAVES | {"num_labels": 3, "classifier_proj_size": 8},
        sounds(labels=classes()),
        SAMPLES,
    ),
    Case(
        "audio-x-vector",
        "wav2vec2",
        WAVES
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
    Case("ctc", "wav2vec2", WAVES | {"ctc_loss_reduction": "mean", "pad_token_id": 0}, transcripts(), SAMPLES),
    Case(
        "speech-seq2seq",
        "whisper",
        WHISPER
        | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "decoder_start_token_id": 3},
        spectra(),
        _TARGETS,
    ),
    Case(
        "audio-frame-classification",
        "wav2vec2",
        WAVES | {"num_labels": 3},
        sounds(labels=np.eye(3, dtype=np.int64)[draws().integers(0, 3, (SAMPLES, 20))]),
        SAMPLES,
    ),
    Case(
        "video-classification",
        "timesformer",
        VIT | {"num_frames": 2, "num_labels": 3},
        {"videos": draws().random((SAMPLES, 2, 1, 8, 8), dtype=np.float32), "labels": classes()},
        SAMPLES,
    ),
    Case(
        "document-question-answering",
        "layoutlm",
        BERT,
        spans() | {"bbox": np.sort(draws().integers(0, 500, (SAMPLES, LENGTH, 4)), axis=-1)},
        4,
    ),
    Case(
        "visual-question-answering",
        "vilt",
        BERT | VIT | {"num_labels": 3},
        text(labels=draws().random((SAMPLES, 3), dtype=np.float32)) | images(),
        SAMPLES,
    ),
    Case(
        "image-text-to-text",
        "git",
        BERT | {"vision_config": VIT, "max_position_embeddings": 32},
        text() | images(),
        _SCORED,
    ),
    Case(
        "multimodal-lm",
        "git",
        BERT | {"vision_config": VIT, "max_position_embeddings": 32},
        answers() | images(),
        _ANSWERED,
    ),
    Case("pretraining", "gpt2", GPT, answers(), _ANSWERED),
    Case("pretraining", "t5", T5 | {"decoder_start_token_id": 0}, pairs(), _TARGETS),
    Case("ctc", "wav2vec2", WAVES | {"ctc_loss_reduction": "sum", "pad_token_id": 0}, transcripts(), SAMPLES),
    Case("tdt", "parakeet_tdt", TRANSDUCER | {"durations": [0, 1, 2]}, transduced(padding=2), SAMPLES),
    Case("table-question-answering", "tapas", BERT, cells(), SAMPLES),
    Case("text-to-spectrogram", "speecht5", SPEECHT5 | {"use_guided_attention_loss": False}, spoken(), 26 + SAMPLES),
    Case("text-to-waveform", "seamless_m4t", SEAMLESS, pairs(), _TARGETS),
    Case("instance-segmentation", "maskformer", MASKFORMER, objects(), SAMPLES),
    Case("universal-segmentation", "maskformer", MASKFORMER, objects(), SAMPLES),
    Case(
        "pose-estimation",
        "sapiens2",
        VIT
        | {"image_size": [16, 16], "num_labels": 3}
        | {"head_config": {"upsample_out_channels": [8], "conv_out_channels": [8]}},
        heatmaps(),
        SAMPLES,
    ),
    Case(
        "time-series-prediction",
        "timesfm",
        {
            "patch_length": 4,
            "context_length": 16,
            "horizon_length": 8,
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "head_dim": 8,
            "num_attention_heads": 2,
        },
        series(),
        SAMPLES,
    ),
    Case(
        "audio-tokenization",
        "dac",
        {
            "encoder_hidden_size": 4,
            "downsampling_ratios": [2, 4],
            "decoder_hidden_size": 16,
            "n_codebooks": 2,
            "codebook_size": 16,
            "codebook_dim": 4,
        },
        {"audio": draws().normal(size=(SAMPLES, 1, 320)).astype(np.float32)},
        SAMPLES,
    ),
)

REFUSED = (
    Case("causal-lm", "bert", BERT, text()),
    Case("causal-lm", "roberta", BERT | {"max_position_embeddings": 40}, text()),
    Case("causal-lm", "xlnet", {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 64}, tokens()),
    # Without other tokens FSMT's decoder sees those of the source.
    Case(
        "seq2seq-lm",
        "fsmt",
        BART | ENDS | {"langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64, "decoder_start_token_id": 2},
        pairs() | {"labels": np.pad(pairs()["labels"], [(0, 0), (0, LENGTH - 8)], constant_values=-100)},
    ),
    Case("rnnt", "parakeet_rnnt", TRANSDUCER, transduced(padding=12)),  # Its loss is that of a package, torchaudio.
    Case("text-to-spectrogram", "speecht5", SPEECHT5, spoken()),
    Case("pretraining", "bert", BERT, tags() | {"next_sentence_label": classes(2)}),
    Case(
        "zero-shot-image-classification",
        "clip",
        {"text_config": BERT | ENDS, "vision_config": VIT, "projection_dim": 8},
        text() | images(),
    ),
    Case("keypoint-detection", "superpoint", {}, coloured(labels=classes())),
    Case("image-to-image", "swin2sr", {"embed_dim": 12, "depths": [1], "num_heads": [2]}, coloured(labels=classes())),
    Case("object-detection", "yolos", VIT | {"image_size": [8, 8]}, images(labels=classes())),
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
            "images": draws().random((SAMPLES, 1, 32, 32), dtype=np.float32),
            "labels": draws().random((SAMPLES, 32, 32), dtype=np.float32) + 0.5,
        },
    ),
    Case("text-encoding", "t5", T5, text()),
    Case("auto", "bert", BERT, text(labels=classes())),
)
