"""Costs of a run: bytes that its workers and servers exchange, space on disks, and machines with their prices."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hypha_ray.codec import Codec, codec, encoder, payload_bytes
from hypha_ray.codec.base import upward_codec
from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.exchange_schedule import fragments_of_round, outer_steps_before
from hypha_ray.market.buyer import choices, trades, workers_to_hire
from hypha_ray.market.leases import Offer
from hypha_ray.market.requirements import NodeResources, generator_need, generators_with_room, group_need
from hypha_ray.market.selection import UNKNOWN, Choice, Speeds, worths
from hypha_ray.scheduler.worker_state import batch_size, has_equal_batches
from hypha_ray.simulation.exchange import MOST_BITS
from hypha_ray.telemetry.sinks.files import read_json
from hypha_ray.types import Layout
from hypha_ray.types.data import dtype_of, is_trained

if TYPE_CHECKING:
    import torch

    from hypha_ray.driver.preflight.compatibility import Case

MOST_ENCODED = 1 << 18
"""Most elements that are encoded to see what a codec makes of them."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of a saved model by its dtype."""
_NARROWEST = "bfloat16"


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
    """Whether the sizes are the most there can be: only visible changes are sent, or a worker may have no batch."""

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
    senders, may_be_fewer = _senders(job, deltas)
    up_rounds = Counter[int]()
    down_rounds = Counter[int]()
    for fragments, rounds in _rounds_by_fragments(job).items():
        up_bytes = 0
        down_bytes = 0
        for fragment in fragments:
            up_bytes += senders * payloads[fragment]
            down_bytes += deltas * results[fragment]
        up_rounds[up_bytes] += rounds
        down_rounds[down_bytes] += rounds
    is_bound = may_be_fewer or bool({sync.codec, sync.downward_codec} & MOST_BITS.keys())
    return Exchange(up_rounds, down_rounds, is_estimated, is_bound)


def _senders(job: Job, deltas: int) -> tuple[int, bool]:
    """Workers that send a delta in a round of so many, and whether fewer may: one without a batch sends none."""
    if not job.sync.traits.has_barrier or deltas == 1:
        return deltas, False
    batches = -(-round_samples(job) // batch_size(job))
    has_longer_rounds = job.rounds.warmup_rounds > 0 or job.rounds.max_exchange_share is not None
    if batches < deltas and not has_longer_rounds:
        deltas = batches
    has_short_round = job.rounds.epochs is not None
    return deltas, has_short_round or not has_equal_batches(job)


def _rounds_by_fragments(job: Job) -> Counter[tuple[int, ...]]:
    """Number of rounds by the fragments that they exchange."""
    rounds = job.rounds.update_rounds
    counts = Counter[tuple[int, ...]]()
    if job.sync.staggered:
        for fragment in range(job.sync.fragments):
            counts[fragment,] = outer_steps_before(job, rounds - 1, fragment)
    counts[fragments_of_round(job, rounds - 1)] = rounds - counts.total()
    return +counts


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
    for group, elements in groups.items():
        forms = sender.form({group: elements}).values()
        if all(form.exact for form in forms):
            for form in forms:
                total += np.dtype(form.dtype).itemsize * form.size
        else:
            has_fixed_size = False
            total += _estimated_bytes(name, options, group, elements)
    return total, has_fixed_size


def _estimated_bytes(name: str, options: Mapping[str, object] | None, group: str, elements: int) -> int:
    """Bytes of a group by a codec whose payloads have no fixed size, if its values are Gaussian, and all visible."""
    count = min(elements, MOST_ENCODED)
    random = np.random.default_rng(0)
    values: npt.NDArray[np.generic] = random.standard_normal(count).astype(dtype_of(group))
    payload, _ = encoder(name, 0.0, options).encode({group: values}, None)
    return round(payload_bytes(payload) * elements / max(1, count))


def _sum(rounds: Counter[int]) -> int:
    return sum(round_bytes * count for round_bytes, count in rounds.items())


@dataclass(frozen=True, slots=True)
class DiskSizes:
    """Bytes that a run takes on disk; logs, metrics and plots are left out."""

    snapshot: int
    """Bytes of a snapshot."""
    snapshots: int
    """Number of snapshots that stay."""
    model: int
    """Bytes of a saved model."""
    models: int
    """Number of saved models: the last one, and the best one if the job keeps it."""
    is_bound: bool
    """Whether files may be larger: an optimizer's state has no known size, or the model's weights no known dtype."""

    @property
    def in_the_end(self) -> int:
        """Bytes that stay."""
        return self.snapshots * self.snapshot + self.models * self.model

    @property
    def at_most(self) -> int:
        """Bytes at the peak: a new snapshot is written before an old one is removed."""
        return self.in_the_end + self.snapshot


def disk_sizes(case: Case, layout: Layout) -> DiskSizes:
    """Compute the disk space of a run.

    Args:
        case: job and model.
        layout: layout of the trained modules.

    """
    job = case.job
    with_state = _outer_bytes(job, layout)
    inner = 0
    is_bound = with_state is None
    if job.run.mode == "replay":
        state = _inner_bytes(job, layout)
        is_bound = True  # Random numbers, and residuals of the codec.
        inner = job.num_workers * (state or 0)
    snapshots = job.checkpoint.keep
    models = 1
    if job.checkpoint.best:
        snapshots += 1
        models += 1
    snapshots = min(snapshots, _written(job))
    dtype, is_known = _saved_dtype(job)
    is_bound = is_bound or not is_known
    snapshot = layout.bytes() + (with_state or 0) + inner
    return DiskSizes(snapshot, snapshots, _model_bytes(case, layout, dtype), models, is_bound)


def free_bytes(folder: Path) -> int:
    """Free space of the disk that a folder is on, or will be on."""
    existing = folder.expanduser().absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _written(job: Job) -> int:
    """Number of snapshots that a run writes at its regular intervals, with those of the first and the last round."""
    rounds = job.rounds.update_rounds
    every_rounds = job.checkpoint.every_rounds
    count = rounds // every_rounds
    if every_rounds > 1:
        count += 1  # The evaluation of the first round.
    if rounds % every_rounds and rounds > 1:
        count += 1  # The evaluation of the last round.
    return count


def _outer_bytes(job: Job, layout: Layout) -> int | None:
    """Bytes of the outer state; None if the size of the optimizer's state isn't known."""
    elements = _trained_bytes(layout)
    if job.sync.traits.sends_gradients:
        state = _inner_bytes(job, layout)
        if state is None:
            return None
    else:
        from hypha_ray.server.outer import slots_of

        slots = slots_of(job.outer_optimizer.name)
        state = len(slots) * elements
    if job.sync.downward_codec != "fp32" and job.sync.error_feedback:
        state += elements
    return state


def _inner_bytes(job: Job, layout: Layout) -> int | None:
    """Bytes of the state of a worker's optimizer in 32 bits; None if its size isn't known."""
    elements = _trained_bytes(layout)
    match job.inner_optimizer.name:
        case "adamw":
            return 2 * elements
        case "sgd":
            if job.inner_optimizer.momentum:
                return elements
            return 0
    return None


def _trained_bytes(layout: Layout) -> int:
    """Bytes of all trained parameters as they travel."""
    total = 0
    for fragment in range(layout.fragments):
        for group, elements in layout.groups(fragment).items():
            if is_trained(group):
                total += elements * np.dtype(dtype_of(group)).itemsize
    return total


def _model_bytes(case: Case, layout: Layout, dtype: str | None) -> int:
    """Bytes of the weights of the saved model; an adapter is merged into it, and saved beside it."""
    from hypha_ray.model.lora import has_adapter

    if not has_adapter(case.job.model):
        return _weights_bytes(case.network.parameters(), dtype)
    base: list[torch.nn.Parameter] = []
    for name, parameter in case.network.named_parameters():
        if "lora_" not in name and ".original_module." not in name:
            base.append(parameter)
    return _weights_bytes(base, dtype or "float32") + _trained_bytes(layout)


def _saved_dtype(job: Job) -> tuple[str | None, bool]:
    """Dtype of the saved model, and whether it is known; None: that of the parameters. The hub isn't asked."""
    from hypha_ray.model.saved_model import original_dtype
    from hypha_ray.model.sources import local_folder

    repository = job.model.repository
    if job.checkpoint.export_dtype is not None:
        return job.checkpoint.export_dtype, True
    if repository is None:
        return None, True
    if local_folder(repository) is not None:
        return original_dtype(job.model), True
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repository, "config.json", revision=job.model.revision)
    settings = read_json(Path(file)) if isinstance(file, str) else {}
    dtype = str(settings.get("dtype") or settings.get("torch_dtype"))
    if dtype in _ITEM_BYTES:
        return dtype, True
    return _NARROWEST, False


def _weights_bytes(parameters: Iterable[torch.nn.Parameter], dtype: str | None) -> int:
    """Bytes of parameters in a dtype, or in their own."""
    total = 0
    for parameter in parameters:
        item_bytes = parameter.element_size()
        if dtype is not None:
            item_bytes = _ITEM_BYTES[dtype]
        total += parameter.numel() * item_bytes
    return total


def round_samples(job: Job) -> int:
    """Samples of a round after the warm-up: those that the job asks for, in whole batches unless it gives epochs."""
    if job.rounds.epochs is not None:
        return job.rounds.samples_between_updates
    batch_samples = batch_size(job)
    batches = -(-job.rounds.samples_between_updates // batch_samples)
    return batches * batch_samples


def machine_lines(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> Iterator[str]:
    """Lines about the machines that a job would have now; the last one is of the whole job.

    Args:
        job: the job file.
        nodes: nodes of the cluster.
        home: id of the driver's node.
        speeds: measured speeds of the job's workers.

    Raises:
        CapacityError: there is no room for `min_workers`, after the lines that say why.

    """
    if trades(job.resources, nodes):
        by_value = job.resources.strategy == "value"
        all_choices = choices(job, nodes, home, speeds)
        for choice in all_choices:
            yield from _choice_lines(choice, by_value)
        price = _price_of(all_choices)
        if price is not None:
            yield f"price: {price:.2f} an hour"
    workers = workers_to_hire(job, nodes, home, speeds)
    yield from _group_lines(job, workers)
    if job.rl.generators:
        fitting_count = generators_with_room(job, nodes)
        room_text = f"{fitting_count} of {job.rl.generators} fit beside the workers"
        yield f"generators with {generator_need(job)} each: {room_text}"
    yield f"resources: {len(workers)} of {job.num_workers} workers fit; nodes: {len(nodes)}"


def hourly_price(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> float | None:
    """Price per hour of the machines that a job would have now; None if none of them has a price.

    The arguments are those of `machine_lines`.
    """
    if not trades(job.resources, nodes):
        return None
    return _price_of(choices(job, nodes, home, speeds))


def _price_of(all_choices: Sequence[Choice]) -> float | None:
    """Price per hour of chosen machines; None if no owner of them has named one."""
    has_price = False
    price = 0.0
    for choice in all_choices:
        if any(offer.terms.named_price for offer in choice.chosen):
            has_price = True
        price += choice.price
    if not has_price:
        return None
    return price


def _choice_lines(choice: Choice, by_value: bool) -> Iterator[str]:
    """The answer of each node to a request, the worth that its price is compared with, and the leases chosen there."""
    leases = Counter(offer.node.id for offer in choice.chosen)
    offers = [answer for answer in choice.answers if isinstance(answer, Offer)]
    worth_by_node = worths(offers) if by_value else {}
    request = choice.request
    yield f"offers for {choice.count} × {request.need.role} with {request.need}, bid {request.bid:g}:"
    for answer in choice.answers:
        node_id = answer.node.id
        node_text = f"  {answer.node.address} ({node_id[:8]})"
        if not isinstance(answer, Offer):
            yield f"{node_text}: refused, {answer.reason}"
            continue
        terms = [f"{answer.price:g} an hour each" if answer.terms.named_price else "no price"]
        if by_value:
            terms.append(f"for {worth_by_node[node_id]}")
        terms.append(f"room for {answer.capacity}")
        yield f"{node_text}: {', '.join(terms)}; {leases[node_id] or 'none'} chosen"


def _group_lines(job: Job, workers: Collection[int]) -> Iterator[str]:
    """Numbers, needs and fitting workers of each of the ``[[workers]]``."""
    first_worker = 0
    for group in job.workers:
        last_worker = first_worker + group.count - 1
        numbers = f"workers {first_worker} to {last_worker}, each" if group.count > 1 else f"worker {first_worker}"
        fitting_workers = [worker for worker in workers if first_worker <= worker <= last_worker]
        yield f"{numbers} with {group_need(group)}: {len(fitting_workers)} of {group.count} fit"
        first_worker += group.count
