"""Elements of a flat group where they lie: in a model's live tensors, on any device."""

from __future__ import annotations

from bisect import bisect_right

import torch

from hypha_ray.model.layout import live_tensors
from hypha_ray.types import Layout


class LiveGroup:
    """A group of a fragment, whose dtype all its tensors have.

    Args:
        model: model that the layout was made from.
        layout: places of the tensors.
        fragment: index of the fragment.
        group: name of the group.

    """

    def __init__(self, model: torch.nn.Module, layout: Layout, fragment: int, group: str) -> None:
        pairs = [pair for pair in live_tensors(model, layout, fragment) if pair[0].group == group]
        pairs.sort(key=lambda pair: pair[0].offset)
        self._tensors = [tensor.detach().reshape(-1) for _, tensor in pairs]
        self._starts = [entry.offset for entry, _ in pairs]
        self.size = layout.groups(fragment)[group]
        """Number of elements."""

    def block(self, part: slice) -> torch.Tensor:
        """Return a range of elements, 1-D: a view if one tensor has them all, which isn't to be written to."""
        pieces: list[torch.Tensor] = []
        for index in range(bisect_right(self._starts, part.start) - 1, len(self._starts)):
            start = self._starts[index]
            if start >= part.stop:
                break
            pieces.append(self._tensors[index][max(0, part.start - start) : part.stop - start])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
