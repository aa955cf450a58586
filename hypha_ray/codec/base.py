"""The seam between worker, wire and parameter server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from hypha_ray.types import Flat

if TYPE_CHECKING:
    import torch


class Form(NamedTuple):
    """What an array of a payload must look like: numpy's name of its dtype, and its number of elements."""

    dtype: str
    size: int


class Codec(Protocol):
    """A payload encoding; it has no state of its own."""

    name: str
    yields: Literal["weights", "deltas"]
    """What `decode` gives for parameters: the worker's weights w, or their difference w − θ."""

    def encode(self, weights: Flat, theta: Flat | None) -> Flat:
        """Encode a fragment's weights on the worker; codecs that yield deltas need θ."""
        ...

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe the payload of a fragment with these groups and sizes (`Layout.groups`)."""
        ...

    def decode(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> torch.Tensor:
        """Decode elements of a group; the result may be a view of the payload, so nobody writes into it."""
        ...


def payload_bytes(payload: Flat) -> int:
    """Size of a payload on the wire, in bytes."""
    return sum(array.nbytes for array in payload.values())
