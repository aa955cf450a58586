"""Configurations of models that several tests build."""

from __future__ import annotations

RESNET = {
    "model_type": "resnet",
    "embedding_size": 4,
    "hidden_sizes": [4, 8],
    "depths": [1, 1],
    "layer_type": "basic",
    "num_channels": 1,
    "num_labels": 3,
}
"""Has buffers, of floats and of integers."""
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
BERT = {"model_type": "bert", "vocab_size": 32, "max_position_embeddings": 16, **SIZES}
VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10, **SIZES}
