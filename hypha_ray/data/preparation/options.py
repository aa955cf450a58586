"""Options of `prepare`. Free of heavy imports: the command line is made from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Turns a corpus into slices of packed sequences or images, with a manifest."""

    source: str
    """stdlib, digits, a file of text, CSV, JSON or Parquet, a folder or pattern of them, or a Hugging Face dataset"""
    out: Path
    """folder to make; its name is the dataset's"""
    tokenizer: str = "byte"
    """byte or characters (nothing to download), or a Hugging Face name or local folder"""
    tokenizer_revision: str | None = None
    """branch, tag or commit of the tokenizer"""
    seq_len: int = 256
    """tokens in a sample"""
    samples_per_slice: int = 1024
    """samples in a slice, the unit that workers are sent"""
    validation_fraction: float = 0.05
    """part of the documents or images that is held out"""
    validation_samples: int = 256
    """most samples to hold out"""
    seed: int = 0
    """seed of split and order"""
    max_documents: int | None = None
    """read no more documents than this"""
    max_samples: int | None = None
    """write no more training samples than this"""
    text_column: str = "text"
    """column of tables and Hugging Face datasets that has the text; of CSV files default: the only one with text"""
    subset: str | None = None
    """configuration of a Hugging Face dataset, such as wikitext-103-raw-v1"""
    split: str = "train"
    """split of a Hugging Face dataset to read"""
    revision: str | None = None
    """branch, tag or commit of a Hugging Face dataset"""
    overwrite: bool = False
    """replace the dataset that OUT already has"""

    def check(self) -> None:
        """Refuse what can't be.

        Raises:
            ConfigError: a number is out of range.

        """
        least = {"seq_len": 2, "samples_per_slice": 1, "validation_samples": 0, "seed": 0}
        least |= {name: 1 for name in ("max_documents", "max_samples") if getattr(self, name) is not None}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise _out_of_range(name, getattr(self, name), f"{minimum} and up")
        if not 0 <= self.validation_fraction < 1 or not math.isfinite(self.validation_fraction):
            raise _out_of_range("validation_fraction", self.validation_fraction, "0 ≤ x < 1")
        if not self.source:
            raise _out_of_range("source", "nothing", "stdlib, digits, a path, or a Hugging Face name")


def _out_of_range(name: str, got: object, allowed: str) -> ConfigError:
    return ConfigError("PREP001", f"--{name.replace('_', '-')} is out of range", str(got), allowed)
