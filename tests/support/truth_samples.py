"""Samples for tasks, and small configurations of many families."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypha_ray.types import Arrays

SAMPLES, LENGTH, VOCABULARY = 6, 12, 64
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64}
OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "vocab_size": 64}
LLAMA = BERT | {"num_key_value_heads": 2, "max_position_embeddings": 32}
GPT = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 64}
BART = {
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
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
JAMBA = LLAMA | {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4}
HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8, "num_local_experts": 2} | {
    "num_experts_per_tok": 1,
    "shared_intermediate_size": 8,
    "layer_types": ["mamba", "mamba"],
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
}
WHISPER = {name: value for name, value in BART.items() if name != "max_position_embeddings"} | ENDS
WAVES = {
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


CONFORMER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 8,
    "conv_kernel_size": 3,
}
TRANSDUCER = {"encoder_config": CONFORMER, "vocab_size": 13, "decoder_hidden_size": 8, "num_decoder_layers": 1} | {
    "blank_token_id": 12,
    "pad_token_id": 2,
}
SPEECHT5 = {name: value for name, value in BART.items() if name not in ("d_model", "max_position_embeddings")} | {
    "hidden_size": 16,
    "num_mel_bins": 4,
    "speech_decoder_prenet_units": 8,
    "speech_decoder_prenet_dropout": 0.0,
    "speech_decoder_postnet_units": 8,
    "speech_decoder_postnet_layers": 2,
    "conv_dim": [8, 8],
    "conv_kernel": [4, 4],
    "conv_stride": [4, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
SWIN = {"model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1] * 4} | {
    "num_heads": [1, 1, 2, 2],
    "window_size": 2,
    "num_channels": 1,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DETR = {name: value for name, value in BART.items() if name not in ("vocab_size", "max_position_embeddings")} | {
    "model_type": "detr",
    "num_queries": 4,
}
MASKFORMER = {"backbone_config": SWIN, "decoder_config": DETR, "num_labels": 3} | {
    "fpn_feature_size": 64,
    "mask_feature_size": 8,
}
SEAMLESS = {name: value for name, value in BART.items() if name != "d_model"} | {
    "hidden_size": 16,
    "speech_encoder_layers": 1,
    "speech_encoder_attention_heads": 2,
    "speech_encoder_intermediate_size": 24,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    "t2u_encoder_ffn_dim": 24,
    "t2u_decoder_ffn_dim": 24,
    "t2u_encoder_attention_heads": 2,
    "t2u_decoder_attention_heads": 2,
    "t2u_vocab_size": 32,
    "t2u_max_position_embeddings": 32,
    "unit_hifi_gan_vocab_size": 32,
    "unit_embed_dim": 8,
    "lang_embed_dim": 4,
    "spkr_embed_dim": 4,
    "vocoder_num_langs": 2,
    "vocoder_num_spkrs": 2,
    "upsample_initial_channel": 8,
    "upsample_rates": [2],
    "upsample_kernel_sizes": [4],
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1]],
}
_LENGTHS = np.array([[6], [3], [4], [5], [2], [6]])


def draws() -> np.random.Generator:
    """A fresh generator, so that equal calls give equal samples."""
    return np.random.default_rng(5)


def text(**others: Any) -> Arrays:
    """Token ids with padding of several lengths."""
    mask = (np.arange(LENGTH) < np.array([[12], [5], [9], [12], [3], [7]])).astype(np.int64)
    return {"input_ids": draws().integers(6, 60, (SAMPLES, LENGTH)), "attention_mask": mask, **others}


def tokens() -> Arrays:
    """Token ids without padding."""
    return {"input_ids": draws().integers(6, 60, (SAMPLES, LENGTH))}


def answers() -> Arrays:
    """A prompt whose tokens aren't scored, and an answer."""
    arrays = text()
    prompt = np.arange(LENGTH) < 4
    return arrays | {"labels": np.where(prompt | (arrays["attention_mask"] == 0), -100, arrays["input_ids"])}


def pairs() -> Arrays:
    """Source tokens, and target tokens of several lengths."""
    width = np.array([[8], [3], [5], [8], [2], [6]])
    return text(labels=np.where(np.arange(8) < width, draws().integers(6, 60, (SAMPLES, 8)), -100))


def tags() -> Arrays:
    """A class for each token, but for padding."""
    arrays = text()
    return arrays | {"labels": np.where(arrays["attention_mask"] == 1, draws().integers(0, 3, (SAMPLES, LENGTH)), -100)}


def spans() -> Arrays:
    """Two answers lie outside of the sequence, one of them with its end alone."""
    return text(start_positions=np.array([0, 2, 99, 4, 1, 3]), end_positions=np.array([1, 4, 99, 99, 2, 6]))


def classes(count: int = 3) -> np.ndarray[Any, Any]:
    """A class for each sample."""
    return draws().integers(0, count, SAMPLES)


def measures() -> np.ndarray[Any, Any]:
    """A number for each sample."""
    return draws().normal(size=SAMPLES).astype(np.float32)


def choices() -> Arrays:
    """Four answers for each sample."""
    return {"input_ids": draws().integers(6, 60, (SAMPLES, 4, LENGTH)), "labels": classes(4)}


def images(**others: Any) -> Arrays:
    """Grey pictures."""
    return {"images": draws().random((SAMPLES, 1, 8, 8), dtype=np.float32), **others}


def coloured(**others: Any) -> Arrays:
    """Pictures of three channels."""
    return {"images": draws().random((SAMPLES, 3, 16, 16), dtype=np.float32), **others}


def sounds(**others: Any) -> Arrays:
    """Waves."""
    return {"audio": draws().normal(size=(SAMPLES, 320)).astype(np.float32), **others}


def transcripts() -> Arrays:
    """Waves, and what is said in them, of several lengths."""
    return sounds(labels=np.where(np.arange(6) < _LENGTHS, draws().integers(1, 12, (SAMPLES, 6)), -100))


def spectra() -> Arrays:
    """Log-mel features, and what is said in them."""
    features = draws().normal(size=(SAMPLES, 8, 40)).astype(np.float32)
    return {"input_features": features, "labels": pairs()["labels"]}


def transduced(padding: int) -> Arrays:
    """Log-mel features of several lengths, what is said in them, and the same tokens behind a blank."""
    said = np.where(np.arange(6) < _LENGTHS, draws().integers(3, 12, (SAMPLES, 6)), padding)
    return {
        "input_features": draws().normal(size=(SAMPLES, 64, 8)).astype(np.float32),
        "attention_mask": (np.arange(64) < 8 + 9 * _LENGTHS).astype(np.int64),
        "decoder_input_ids": np.concatenate([np.full((SAMPLES, 1), 12), said], axis=1),
        "labels": said,
    }


def spoken() -> Arrays:
    """Texts, and spectrograms of several lengths."""
    frames = draws().normal(size=(SAMPLES, 8, 4))
    there = np.arange(8) < 1 + _LENGTHS
    return text(labels=np.where(there[:, :, None], frames, -100).astype(np.float32))


def cells() -> Arrays:
    """Tables with a question, whose answer is a column."""
    place = np.arange(LENGTH)
    segments = np.stack([place > 3, place % 3, place // 4, *[np.zeros(LENGTH)] * 4], axis=-1).astype(np.int64)
    answer = np.tile((place % 3 == 1).astype(np.int64), (SAMPLES, 1))
    return text(token_type_ids=np.tile(segments, (SAMPLES, 1, 1)), labels=answer)


def objects() -> Arrays:
    """Two objects in each picture, with a mask and a class."""
    return {
        "images": draws().random((SAMPLES, 1, 32, 32), dtype=np.float32),
        "mask_labels": draws().integers(0, 2, (SAMPLES, 2, 32, 32)),
        "class_labels": draws().integers(0, 3, (SAMPLES, 2)),
    }


def heatmaps() -> Arrays:
    """Pictures, and where three keypoints are in them."""
    return {
        "images": draws().random((SAMPLES, 1, 16, 16), dtype=np.float32),
        "labels": draws().random((SAMPLES, 3, 8, 8), dtype=np.float32),
    }


def series() -> Arrays:
    """Past and future values."""
    values = draws().normal(size=(SAMPLES, 24)).astype(np.float32)
    return {"past_values": values[:, :16], "future_values": values[:, 16:]}
