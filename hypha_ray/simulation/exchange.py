"""Sizes of deltas and weights on the wire, and the time that workers wait for an exchange, computed from rates.

Torch isn't needed for sizes: the parameters are one group of float32, split evenly into fragments. A test holds the
sizes against real payloads. A command line has rates and latencies of links as ``100mbit``, ``50mbit/5mbit``, ``20ms``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.keys import shown
from hypha_ray.errors import ConfigError
from hypha_ray.exchange_schedule import fragments_of_round, is_last_round
from hypha_ray.plugins import create
from hypha_ray.scheduler.messages import Merge
from hypha_ray.texts import significant

UNCODED: Final = "fp32"
WEIGHT_BYTES: Final = 4
"""Bytes of a parameter in uncoded weights."""
_GROUP: Final = "parameters/float32"
"""Group of a payload that all parameters are in."""

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
MBPS: Final = {"k": 1e-3, "m": 1.0, "g": 1e3, "t": 1e6}
"""Megabits per second of a unit, by its first letter."""
SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
"""Seconds of a unit of time."""
_NUMBER: Final = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?"
_RATE: Final = rf"({_NUMBER})\s*([kmgt])(?:bit(?:/s|ps)?|bps)"
_RATES: Final = re.compile(rf"{_RATE}(?:\s*/\s*{_RATE})?", re.IGNORECASE)
_SHORT_RATES: Final = re.compile(rf"({_NUMBER})\s*/\s*{_RATE}", re.IGNORECASE)
"""Two rates with the unit behind the second one."""
_BYTE_RATE: Final = re.compile(rf"({_NUMBER})\s*((?i:[kmgt]))(?:B(?:/s|ps)?|(?i:byte.*))")
_TIME: Final = re.compile(rf"({_NUMBER})\s*({'|'.join(SECONDS)})")
RATE_EXAMPLES: Final = "a rate such as 100mbit, 1gbit or 50mbit/5mbit (down/up)"
TIME_EXAMPLES: Final = "a time such as 20ms, 0.1ms or 1s"
ENCODE_GB_S: Final = {
    "bf16": 1.7,
    "fp16": 1.9,
    "int8": 1.5,
    "int4": 0.76,
    "e3m0": 0.73,
    "huffman3": 0.44,
    "huffman2": 0.45,
    "topk": 0.30,
}
"""GB of fp32 that one core of an AMD EPYC encodes in a second, with feedback: docs/communication.md."""
DECODE_GB_S: Final = {
    "bf16": 23.0,
    "fp16": 27.0,
    "int8": 18.0,
    "int4": 2.2,
    "e3m0": 2.4,
    "huffman3": 1.1,
    "huffman2": 1.2,
    "topk": 6.7,
}
"""GB of fp32 that one core decodes in a second: the same table."""
MERGE_GB_S: Final = 1.6 / 0.194
"""GB of fp32 deltas exchanged in a second on one machine, by 4 workers with 100 million parameters: the same page."""


def fragment_sizes(parameters: int, fragments: int) -> list[int]:
    """Parameters of each fragment, in even parts."""
    bounds = [parameters * number // fragments for number in range(fragments + 1)]
    return [stop - start for start, stop in pairwise(bounds)]


def encoded_bytes(codec: str, parameters: int, options: Mapping[str, Any] | None = None) -> int:
    """Bytes of an encoded fragment; an estimate for codecs of `MEAN_BITS`, the most for those of `MOST_BITS`.

    A codec that a user brings may have options, and tells the size itself.
    """
    if codec in MEAN_BITS:
        return round(parameters * MEAN_BITS[codec] / 8)
    if codec in MOST_BITS:
        return round(parameters * MOST_BITS[codec] / 8)
    if codec in BYTES_PER_CHUNK:
        chunk, size = BYTES_PER_CHUNK[codec]
        return -(-parameters // chunk) * size
    return sum(np.dtype(form.dtype).itemsize * form.size for form in _forms(codec, parameters, options))


def has_known_size(codec: str, options: Mapping[str, Any] | None) -> bool:
    """Whether payloads of a codec have a size that doesn't depend on the values, or one that can be estimated."""
    if codec in (*MEAN_BITS, *MOST_BITS, *BYTES_PER_CHUNK):
        return True
    return all(form.exact for form in _forms(codec, 1, options))


def _forms(codec: str, parameters: int, options: Mapping[str, Any] | None) -> list[Any]:
    """Forms of the arrays of an encoded fragment, by a codec that a user brings."""
    return list(create("codecs", codec, options).form({_GROUP: parameters}).values())


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
        """Bytes of encoded fragments, the most there can be, by the codec's key and round."""

    def delta_bytes(self, round: int) -> int:
        """Bytes of a worker's delta of a round."""
        share = 1.0 if is_last_round(self._job, round) else self.visible_shares[0]
        return self._encoded("codec", round, share)

    def coded_bytes(self, round: int) -> int:
        """Bytes of a round's new weights for a worker with those before; 0 if they are sent uncoded."""
        if self._job.sync.downward_codec == UNCODED:
            return 0
        return self._encoded("downward_codec", round, self.visible_shares[1])

    def weights_bytes(self, command: Merge) -> int:
        """Bytes of the weights that an order brings."""
        if command.whole or not self._job.sync.traits.has_barrier:
            return WEIGHT_BYTES * sum(self.fragments)
        round_before = command.version - 1
        return self.coded_bytes(round_before) or WEIGHT_BYTES * sum(self._parameters(round_before))

    def _parameters(self, round: int) -> list[int]:
        """Parameters of the fragments that a round exchanges."""
        return [self.fragments[index] for index in fragments_of_round(self._job, round)]

    def _encoded(self, key: str, round: int, visible_share: float) -> int:
        codec = getattr(self._job.sync, key)
        total = self._encoded_bytes.get((key, round))
        if total is None:
            options = getattr(self._job.sync, f"{key}_options")
            total = sum(encoded_bytes(codec, parameters, options) for parameters in self._parameters(round))
            self._encoded_bytes[key, round] = total
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
        up_share, down_share = visible_shares
        notes.append(
            f"bytes of visible are {up_share:.1%} up and {down_share:.1%} down of those of bf16, as in the run"
        )
        return tuple(notes)
    for codec in sorted(codecs & MOST_BITS.keys()):
        notes.append(f"bytes of {codec} are the most there can be, those of bf16: the shorter the steps, the fewer")
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class Link:
    """Link of a machine. Rates in megabits per second, each way."""

    down_mbps: float
    up_mbps: float
    latency_s: float = 0.0
    """Seconds that a message takes one way."""

    def scaled(self, factor: float) -> Link:
        """Return a link of other rates with the same latency."""
        return Link(self.down_mbps * factor, self.up_mbps * factor, self.latency_s)

    def __str__(self) -> str:
        if self.down_mbps == self.up_mbps:
            return rate_text(self.down_mbps)
        return f"{rate_text(self.down_mbps)} down and {rate_text(self.up_mbps)} up"


def parse_link(text: str, flag: str, latency_s: float = 0.0) -> Link:
    """Read a rate, or two of them: down, as a worker sees it, and up.

    Args:
        text: value of an option.
        flag: option's name, for errors.
        latency_s: seconds that a message takes one way.

    Raises:
        ConfigError: CFG003, the rate is 0; CFG015, the text is none.

    """
    match = _RATES.fullmatch(_with_both_units(text.strip()))
    if match is None:
        raise ConfigError("CFG015", f"{flag} can't be understood", shown(text), RATE_EXAMPLES, _rate_remedy(text))
    down_number, down_unit, up_number, up_unit = match.groups()
    down_mbps = _mbps(down_number, down_unit)
    up_mbps = down_mbps if up_number is None else _mbps(up_number, up_unit)
    for rate in (down_mbps, up_mbps):
        if not 0 < rate < math.inf:
            raise ConfigError(
                "CFG003", f"{flag} is out of range", shown(text), "a rate above 0", "give what a link has"
            )
    return Link(down_mbps, up_mbps, latency_s)


def parse_latency(text: str, flag: str) -> float:
    """Read a time; returns seconds.

    Raises:
        ConfigError: CFG015, the text is no time; CFG003, it is longer than a minute.

    """
    match = _TIME.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError("CFG015", f"{flag} can't be understood", shown(text), TIME_EXAMPLES, "give number and unit")
    number, unit = match.groups()
    seconds = float(number) * SECONDS[unit]
    if seconds > 60:
        raise ConfigError("CFG003", f"{flag} is out of range", shown(text), "up to 60s", "give the time of a message")
    return seconds


def rate_text(mbps: float) -> str:
    """Write a rate: ``20 Mbit/s``, ``1.5 Gbit/s``."""
    if mbps >= 1000:
        return f"{significant(mbps / 1000, 3)} Gbit/s"
    return f"{significant(mbps, 3)} Mbit/s"


def _with_both_units(text: str) -> str:
    """Turn ``50/5mbit`` into ``50mbit/5mbit``; other texts stay."""
    match = _SHORT_RATES.fullmatch(text)
    if match is None:
        return text
    down, up, unit = match.groups()
    return f"{down}{unit}bit/{up}{unit}bit"


def _mbps(number: str, unit: str) -> float:
    return float(number) * MBPS[unit.lower()]


def _rate_remedy(text: str) -> str:
    """Remedy for a text that is no rate; bytes are turned into bits."""
    match = _BYTE_RATE.fullmatch(text.strip())
    if match is None:
        return "give number and unit"
    number, unit = match.groups()
    return f"count bits, not bytes: {8 * float(number):g}{unit.lower()}bit"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a model and the limits of its partition into fragments."""

    parameters: int
    """Number of trained parameters."""
    layers: int | None = None
    """Number of its layers; None if only the number of parameters is known."""
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Parameters of each fragment, by number of fragments; even parts for numbers not listed."""

    def fragment_parameters(self, fragments: int) -> tuple[int, ...]:
        """Parameters of each fragment."""
        if fragments in self.parts:
            return self.parts[fragments]
        return tuple(fragment_sizes(self.parameters, fragments))


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Conditions that a job's exchange has to suit: the model, the fleet and the links."""

    model: ModelShape
    batch_s: tuple[float, ...]
    """Seconds of a batch of each worker."""
    link: Link
    """Link of each worker."""
    head: Link
    """Link of the machine of scheduler and parameter servers."""
    fails_every_h: float | None = None
    """Mean hours between two failures of a machine; None if they aren't expected."""
    server_threads: int = 4
    """Threads in which a parameter server decodes and merges."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.batch_s)

    @property
    def step_s(self) -> float:
        """Seconds in which the workers together make as many batches as there are workers."""
        return self.workers / sum(1 / seconds for seconds in self.batch_s)

    @property
    def unequal(self) -> bool:
        """Whether workers differ in speed."""
        return max(self.batch_s) > min(self.batch_s)

    @property
    def unreliable(self) -> bool:
        """Whether failures are expected."""
        return self.fails_every_h is not None


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Settings of an exchange."""

    codec: str
    downward_codec: str
    steps: int
    """H, inner steps between two exchanges of the same weight; a multiple of `fragments`."""
    fragments: int = 1
    delay_steps: int = 0
    in_flight: int = 1

    @property
    def round_steps(self) -> int:
        """Inner steps of a round, which exchanges one fragment."""
        return self.steps // self.fragments

    @property
    def lateness(self) -> int:
        """Inner steps from a delta to its result."""
        return (self.in_flight - 1) * self.round_steps + self.delay_steps


@dataclass(frozen=True, slots=True)
class ExchangeEstimate:
    """Estimated times of a round with its exchange, in seconds."""

    train_s: float
    """Time of the round's batches."""
    up_s: float
    """Time of all deltas on the narrowest link."""
    down_s: float
    """Time of all new weights on the narrowest link."""
    latency_s: float
    """Time of messages without contents."""
    coding_s: float
    """Time to encode, decode and merge."""
    wait_s: float
    """Time that workers wait for the exchange."""
    worker_bytes: int
    """Bytes of a worker's delta and of its new weights."""

    @property
    def exchange_s(self) -> float:
        """Time from the last delta until all workers have new weights."""
        return self.up_s + self.down_s + self.latency_s + self.coding_s

    @property
    def overhead(self) -> float:
        """Part of the time that workers wait for exchanges."""
        return self.wait_s / (self.train_s + self.wait_s)


def estimate(settings: ExchangeSettings, circumstances: Circumstances) -> ExchangeEstimate:
    """Estimate the times of a round of a steady run; all workers hand over at the same time.

    Times of the exchange are those of the largest fragment; `wait_s` and `worker_bytes` are means over all fragments.
    """
    sizes = circumstances.model.fragment_parameters(settings.fragments)
    exchanges = [_of_fragment(parameters, settings, circumstances) for parameters in sizes]
    largest = max(exchanges, key=lambda exchange: exchange.exchange_s)
    wait_s = sum(exchange.wait_s for exchange in exchanges) / len(exchanges)
    worker_bytes = sum(exchange.worker_bytes for exchange in exchanges) // len(exchanges)
    return replace(largest, wait_s=wait_s, worker_bytes=worker_bytes)


def _of_fragment(parameters: int, settings: ExchangeSettings, circumstances: Circumstances) -> ExchangeEstimate:
    """Estimate the times of a round that exchanges a fragment of so many parameters."""
    up_bytes = encoded_bytes(settings.codec, parameters)
    down_bytes = encoded_bytes(settings.downward_codec, parameters)
    link = circumstances.link
    head = circumstances.head
    workers = circumstances.workers
    up_s = max(transfer_s(up_bytes, link.up_mbps), transfer_s(workers * up_bytes, head.down_mbps))
    down_s = max(transfer_s(down_bytes, link.down_mbps), transfer_s(workers * down_bytes, head.up_mbps))
    latency_s = 4 * max(link.latency_s, head.latency_s)  # A request and an answer each way.
    coding_s = _coding_s(settings, parameters, circumstances)
    train_s = settings.round_steps * circumstances.step_s
    exchange_s = up_s + down_s + latency_s + coding_s
    hidden_s = (settings.in_flight - 1) * train_s + settings.delay_steps * min(circumstances.batch_s)
    late_s = (exchange_s - hidden_s) / settings.in_flight
    busy_s = max(up_s, down_s) - train_s  # The next exchange needs the link.
    wait_s = max(0.0, late_s, busy_s)
    return ExchangeEstimate(train_s, up_s, down_s, latency_s, coding_s, wait_s, up_bytes + down_bytes)


def transfer_s(size_bytes: float, rate_mbps: float) -> float:
    """Seconds of a transfer at a rate in megabits per second."""
    return 8e-6 * size_bytes / rate_mbps


def whole_weights_s(circumstances: Circumstances) -> float:
    """Seconds until all workers have all weights in fp32, as at the start of a run."""
    size_bytes = WEIGHT_BYTES * circumstances.model.parameters
    at_head_s = transfer_s(circumstances.workers * size_bytes, circumstances.head.up_mbps)
    return max(transfer_s(size_bytes, circumstances.link.down_mbps), at_head_s)


def merge_s(parameters: int, workers: int) -> float:
    """Seconds in which a parameter server merges deltas and hands out new weights, on one machine with all workers."""
    return workers * WEIGHT_BYTES * parameters / 1e9 / MERGE_GB_S


def _coding_s(settings: ExchangeSettings, parameters: int, circumstances: Circumstances) -> float:
    """Seconds to encode at a worker, to decode and merge all deltas, and to encode and decode new weights."""
    size_gb = WEIGHT_BYTES * parameters / 1e9
    workers = circumstances.workers
    seconds = merge_s(parameters, workers)
    if settings.codec in ENCODE_GB_S:
        seconds += size_gb / ENCODE_GB_S[settings.codec]
        seconds += workers * size_gb / DECODE_GB_S[settings.codec] / circumstances.server_threads
    if settings.downward_codec in ENCODE_GB_S:
        seconds += size_gb / ENCODE_GB_S[settings.downward_codec]
        seconds += size_gb / DECODE_GB_S[settings.downward_codec]
    return seconds
