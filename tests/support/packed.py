"""Packed samples from lists of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hypha_ray.rl.dataflow.requests import Meta, Packed, Sample


def packed(ids: Sequence[str], sequences: Mapping[str, Sequence[Sequence[Packed]]]) -> Sample:
    """Pack sequences: `sequences[key][i]` are those of the i-th id."""
    lengths = {key: tuple(tuple(map(len, group)) for group in groups) for key, groups in sequences.items()}
    data = {key: np.concatenate([one for group in groups for one in group]) for key, groups in sequences.items()}
    return Sample(Meta(tuple(ids), lengths), data)
