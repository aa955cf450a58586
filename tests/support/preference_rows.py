"""Preferences of sorted digits over unsorted ones, of which a tiny model learns to tell held-out pairs apart."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.prepared import table

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Configuration of a Llama of 84 thousand parameters."""


def digit_pairs(file: Path) -> Path:
    """A file with the 720 triples of different digits: in order they are chosen, in another order rejected."""
    generator = np.random.default_rng(0)
    rows = []
    for digits in permutations("0123456789", 3):
        ordered = "".join(sorted(digits))
        others = ["".join(order) for order in permutations(ordered) if "".join(order) != ordered]
        rows.append({"prompt": "".join(digits) + ":", "chosen": ordered, "rejected": str(generator.choice(others))})
    return table(file, *rows)
