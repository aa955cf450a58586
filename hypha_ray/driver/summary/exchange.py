"""Bytes that workers and servers exchange in a run, by the model's layout and the form of the codecs' payloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hypha_ray.codec import Codec, codec, encoder, payload_bytes
from hypha_ray.codec.registry import upward_codec
from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.simulation.payload_sizes import MOST_BITS
from hypha_ray.types import Layout
from hypha_ray.types.layout import dtype_of

MOST_ENCODED = 1 << 18
"""Most elements that are encoded to see what a codec makes of them."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Bytes on the wire, of all workers together, if each of them takes part in all rounds."""

    up: Counter[int]
    """Number of rounds by the bytes that workers send in one."""
    down: Counter[int]
    """Number of rounds by the bytes that workers receive in one."""
    is_estimated: bool
    """Whether sizes of payloads, or the number of transfers, depend on values or on the order of arrivals."""
    is_bound: bool
    """Whether the sizes are the most there can be, because only visible changes are sent."""

    @property
    def is_exact(self) -> bool:
        """Whether the bytes are those of the run."""
        return not (self.is_estimated or self.is_bound)

    @property
    def total_up(self) -> int:
        """Bytes that workers send in the whole run."""
        return _sum(self.up)

    @property
    def total_down(self) -> int:
        """Bytes that workers receive in the whole run."""
        return _sum(self.down)


def exchange_of(job: Job, layout: Layout) -> Exchange:
    """Compute the traffic of a run.

    Args:
        job: the job file.
        layout: layout of the trained modules, in the job's fragments.

    """
    sync = job.sync
    sender = upward_codec(sync)
    is_estimated = not sync.traits.has_barrier or sync.quorum is not None
    payloads: list[int] = []
    results: list[int] = []
    for fragment in range(layout.fragments):
        groups = layout.groups(fragment)
        payload, has_fixed_size = _payload_bytes(sender, sync.codec, sync.codec_options, groups)
        result, result_has_fixed_size = _result_bytes(sync, layout, fragment)
        payloads.append(payload)
        results.append(result)
        is_known = has_fixed_size or sync.codec in MOST_BITS
        result_is_known = result_has_fixed_size or sync.downward_codec in MOST_BITS
        is_estimated = is_estimated or not (is_known and result_is_known)
    deltas = job.num_workers
    if not sync.traits.has_barrier:
        deltas = sync.period or job.num_workers
    up = Counter[int]()
    down = Counter[int]()
    for fragments, rounds in _rounds_by_fragments(job).items():
        up_bytes = 0
        down_bytes = 0
        for fragment in fragments:
            up_bytes += deltas * payloads[fragment]
            down_bytes += deltas * results[fragment]
        up[up_bytes] += rounds
        down[down_bytes] += rounds
    is_bound = bool({sync.codec, sync.downward_codec} & MOST_BITS.keys())
    return Exchange(up, down, is_estimated, is_bound)


def _rounds_by_fragments(job: Job) -> Counter[tuple[int, ...]]:
    """Number of rounds by the fragments that they exchange."""
    rounds = job.rounds.update_rounds
    if not job.sync.staggered:
        return Counter({fragments_of_round(job, 0): rounds})
    return Counter(fragments_of_round(job, round) for round in range(rounds))


def _result_bytes(sync: Sync, layout: Layout, fragment: int) -> tuple[int, bool]:
    """Bytes of a fragment's new weights for one worker, and whether their number is fixed."""
    if sync.downward_codec == "fp32":
        return layout.bytes(fragment), True
    sender = codec(sync.downward_codec, sync.downward_codec_options)
    return _payload_bytes(sender, sync.downward_codec, sync.downward_codec_options, layout.groups(fragment))


def _payload_bytes(
    sender: Codec, name: str, options: Mapping[str, object] | None, groups: Mapping[str, int]
) -> tuple[int, bool]:
    """Bytes of a fragment's payload, and whether their number is fixed; otherwise they are estimated."""
    total = 0
    has_fixed_size = True
    for group, size in groups.items():
        forms = sender.form({group: size}).values()
        if all(form.exact for form in forms):
            for form in forms:
                total += np.dtype(form.dtype).itemsize * form.size
        else:
            has_fixed_size = False
            total += _estimated_bytes(name, options, group, size)
    return total, has_fixed_size


def _estimated_bytes(name: str, options: Mapping[str, object] | None, group: str, size: int) -> int:
    """Bytes of a group by a codec whose payloads have no fixed size, if its values are Gaussian, and all visible."""
    count = min(size, MOST_ENCODED)
    random = np.random.default_rng(0)
    values: npt.NDArray[np.generic] = random.standard_normal(count).astype(dtype_of(group))
    payload, _ = encoder(name, 0.0, options).encode({group: values}, None)
    return round(payload_bytes(payload) * size / max(1, count))


def _sum(rounds: Counter[int]) -> int:
    return sum(size * count for size, count in rounds.items())
