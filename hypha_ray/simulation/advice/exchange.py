"""Time of an exchange, and the part of a round that workers wait for it, by arithmetic from sizes and rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from hypha_ray.simulation.advice.link import Link
from hypha_ray.simulation.payload_sizes import WEIGHT_BYTES, encoded_bytes, fragment_sizes

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
    exchanges = [_of_fragment(size, settings, circumstances) for size in sizes]
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
