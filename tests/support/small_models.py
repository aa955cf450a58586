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
