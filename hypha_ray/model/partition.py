"""Partition of a model's parameters into fragments."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate

from hypha_ray.errors import ConfigError


def contiguous(sizes: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Cut parameters, in the model's order, into runs of about equal size.

    Args:
        sizes: bytes of each parameter, by name.
        fragments: number of runs.

    Raises:
        ConfigError: there are fewer parameters than fragments.

    """
    _check(fragments, len(sizes), "its trained tensors")
    counts = list(sizes.values())
    ends = list(accumulate(counts))
    cuts = [0]
    for part in range(1, fragments):
        goal = ends[-1] * part / fragments
        after = bisect_left(ends, goal)
        near = after + 1 if ends[after] - goal <= goal - (ends[after] - counts[after]) else after
        cuts.append(min(max(near, cuts[-1] + 1), len(counts) - (fragments - part)))
    return {name: bisect_right(cuts, item) - 1 for item, name in enumerate(sizes)}


def strided(sizes: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Put layer ℓ into fragment ℓ mod P, as Streaming DiLoCo does (arXiv 2501.18512, section 2.2).

    Parameters with the same first number in their names form a layer. Parameters outside of layers, such as
    embeddings, go to the smallest fragment one after the other, the largest first.

    Args:
        sizes: bytes of each parameter, by name.
        fragments: P, the number of fragments.

    Raises:
        ConfigError: there are fewer layers than fragments.

    """
    layers = {name: int(found[1]) for name in sizes if (found := re.search(r"(?:^|\.)(\d+)\.", name))}
    _check(fragments, len(set(layers.values())), "its layers")
    rank = {layer: index for index, layer in enumerate(sorted(set(layers.values())))}
    fragment_of = {name: rank[layer] % fragments for name, layer in layers.items()}
    filled = [sum(sizes[name] for name in layers if fragment_of[name] == part) for part in range(fragments)]
    for name in sorted(sizes.keys() - layers.keys(), key=lambda one: (-sizes[one], one)):
        fragment_of[name] = smallest = filled.index(min(filled))
        filled[smallest] += sizes[name]
    return fragment_of


def _check(fragments: int, most: int, of: str) -> None:
    if not 1 <= fragments <= most:
        allowed = f"1 to {most}, {of}"
        fix = f"set sync.fragments to {most} or less"
        raise ConfigError("MODEL009", "sync.fragments doesn't fit the model", str(fragments), allowed, fix)
