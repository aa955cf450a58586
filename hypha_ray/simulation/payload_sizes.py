"""Sizes of deltas and weights on the wire, from the number of parameters; torch isn't needed for them.

The parameters are one group of float32, split evenly into fragments. A test holds the sizes against real payloads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import fragments_of_round, is_last_round
from hypha_ray.scheduler.messages import Merge

UNCODED: Final = "fp32"
WEIGHT_BYTES: Final = 4
"""Bytes of a parameter in uncoded weights."""

BYTES_PER_CHUNK: Final[dict[str, tuple[int, int]]] = {
    "fp32": (1, 4),
    "bf16": (1, 2),
    "fp16": (1, 2),
    "int8": (256, 260),
    "int4": (128, 66),
    "e3m0": (1024, 514),
    "topk": (4096, 228),
}
"""Elements of a chunk, and bytes of an encoded chunk, of codecs whose payloads have a fixed size."""
MEAN_BITS: Final[dict[str, float]] = {"huffman2": 1.67, "huffman3": 2.7}
"""Bits of an element of codecs whose payloads depend on the values; of Gaussian values, as the codecs state."""
MOST_BITS: Final[dict[str, float]] = {"visible": 16.0}
"""Bits of an element, at most, of codecs whose payloads depend on the length of the steps."""
ALL_VISIBLE: Final = (1.0, 1.0)
"""Parts of `MOST_BITS`, up and down, if nothing else is known."""


def fragment_sizes(parameters: int, fragments: int) -> list[int]:
    """Parameters of each fragment, in even parts."""
    bounds = [parameters * number // fragments for number in range(fragments + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def encoded_bytes(codec: str, parameters: int) -> int:
    """Bytes of an encoded fragment; an estimate for codecs of `MEAN_BITS`, the most for those of `MOST_BITS`."""
    if codec in MEAN_BITS:
        return round(parameters * MEAN_BITS[codec] / 8)
    if codec in MOST_BITS:
        return round(parameters * MOST_BITS[codec] / 8)
    chunk, size = BYTES_PER_CHUNK[codec]
    return -(-parameters // chunk) * size


class PayloadSizes:
    """Sizes of a run's payloads, in bytes.

    Args:
        job: gives codecs, fragments and their turns.
        parameters: trained parameters.

    """

    def __init__(self, job: Job, parameters: int) -> None:
        self._job = job
        self.fragments = fragment_sizes(parameters, job.sync.fragments)
        """Parameters of each fragment."""
        self.visible_shares = ALL_VISIBLE
        """Parts of the most bytes that payloads of `MOST_BITS` take, up and down. The last delta takes all."""
        self._encoded_bytes: dict[tuple[str, int], int] = {}
        """Bytes of encoded fragments, the most there can be, by codec and round."""

    def delta_bytes(self, round: int) -> int:
        """Bytes of a worker's delta of a round."""
        share = 1.0 if is_last_round(self._job, round) else self.visible_shares[0]
        return self._encoded(self._job.sync.codec, round, share)

    def coded_bytes(self, round: int) -> int:
        """Bytes of a round's new weights for a worker with those before; 0 if they are sent uncoded."""
        codec = self._job.sync.downward_codec
        return 0 if codec == UNCODED else self._encoded(codec, round, self.visible_shares[1])

    def weights_bytes(self, command: Merge) -> int:
        """Bytes of the weights that an order brings."""
        if command.whole or not self._job.sync.traits.has_barrier:
            return WEIGHT_BYTES * sum(self.fragments)
        round_before = command.version - 1
        return self.coded_bytes(round_before) or self._encoded(UNCODED, round_before)

    def _encoded(self, codec: str, round: int, visible_share: float = 1.0) -> int:
        total = self._encoded_bytes.get((codec, round))
        if total is None:
            total = sum(encoded_bytes(codec, self.fragments[index]) for index in fragments_of_round(self._job, round))
            self._encoded_bytes[codec, round] = total
        if codec in MOST_BITS:
            return int(total * visible_share)
        return total


def size_notes(job: Job, visible_shares: tuple[float, float] = ALL_VISIBLE) -> tuple[str, ...]:
    """Note for each codec whose sizes are estimates or bounds."""
    notes = []
    codecs = {job.sync.codec, job.sync.downward_codec}
    for codec in sorted(codecs & MEAN_BITS.keys()):
        notes.append(f"bytes of {codec} are estimated as those of Gaussian values")
    if visible_shares != ALL_VISIBLE:
        up, down = visible_shares
        notes.append(f"bytes of visible are {up:.1%} up and {down:.1%} down of those of bf16, as in the run")
        return tuple(notes)
    for codec in sorted(codecs & MOST_BITS.keys()):
        notes.append(f"bytes of {codec} are the most there can be, those of bf16: the shorter the steps, the fewer")
    return tuple(notes)
