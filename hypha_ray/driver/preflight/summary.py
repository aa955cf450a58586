"""Summary of a job, a line for each subject; a line is left out if it means nothing for the job, or isn't known.

Lines about the model, the data and the rounds have what a job file and a manifest say of them. The only measure of the
time that a job will take is the pace of an earlier run of the same work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config import Job
from hypha_ray.config.schema import samples_of_rounds
from hypha_ray.config.training import Dataset
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.storage import Place
from hypha_ray.driver.data_source import DataSource
from hypha_ray.driver.dataset_settings import samples_in_epochs
from hypha_ray.driver.earlier_runs import generator_facts, pace_of_earlier_run, pace_of_run, time_facts
from hypha_ray.driver.preflight.run_costs import DiskSizes, Exchange, disk_sizes, exchange_of, free_bytes, round_samples
from hypha_ray.files import uncollected
from hypha_ray.market.requirements import NodeResources
from hypha_ray.scheduler.round_sizes import MOST
from hypha_ray.scheduler.worker_state import batch_size, has_equal_batches
from hypha_ray.store.directory import RunDirectory, runs
from hypha_ray.store.snapshots import SnapshotHeader, read_header, snapshot_path
from hypha_ray.store.snapshots import rounds as snapshot_rounds
from hypha_ray.telemetry.sinks.files import METRICS, Record, by_round, read_jsonl
from hypha_ray.telemetry.sinks.table import si
from hypha_ray.texts import counted
from hypha_ray.types import Layout, dataset_of
from hypha_ray.types.data import is_trained

if TYPE_CHECKING:
    from hypha_ray.driver.preflight.compatibility import Case

SUBJECT_WIDTH = 10
"""Width of the column of subjects in characters."""
FEW_HELD_OUT = 100
"""Number of held-out samples below which a small difference of their mean loss is chance."""
MOST_READ_BYTES = 32 << 20
"""Most bytes of training samples that are read to count tokens without padding."""


def exchange_text(job: Job, exchange: Exchange) -> str:
    """Describe the traffic of all workers together."""
    about = "at most " if exchange.is_bound else ""
    if exchange.is_estimated:
        about += "about "
    up_text = f"{_range(exchange.up)} up"
    down_text = f"{_range(exchange.down)} down"
    total_text = f"{size_text(exchange.total_up)} and {size_text(exchange.total_down)} in all"
    if job.rounds.max_exchange_share is not None:
        total_text = f"at most {total_text}"
    codecs = f"{job.sync.codec} up, {job.sync.downward_codec} down"
    if job.sync.codec == job.sync.downward_codec:
        codecs = job.sync.codec
    return f"{about}{up_text} and {down_text} a round, {total_text} ({counted(job.num_workers, 'worker')}, {codecs})"


def disk_text(job: Job, use: DiskSizes) -> str:
    """Describe the space that a run takes and the space that is free."""
    about = "about"
    if use.is_bound:
        about = "at least"
    snapshots_text = f"{counted(use.snapshots, 'snapshot')} of {size_text(use.snapshot)}"
    models_text = f"{counted(use.models, 'model')} of {size_text(use.model)}"
    text = f"{about} {size_text(use.in_the_end)} beside logs, plots and records: {snapshots_text}, {models_text}"
    folder = runs(job.run.dir)
    text += f"; {size_text(free_bytes(folder))} free in {folder}"
    mirror = job.checkpoint.mirror
    if mirror is not None:
        text += "; as much again at checkpoint.mirror"
    return text


def space_notes(job: Job, use: DiskSizes) -> Iterator[str]:
    """Warn of a disk that a run will fill."""
    places = {"run.dir": runs(job.run.dir)}
    mirror = job.checkpoint.mirror
    if mirror is not None and "://" not in mirror:
        places["checkpoint.mirror"] = Path(mirror)
    for key, folder in places.items():
        free = free_bytes(folder)
        if free < use.at_most:
            problem = f"the run takes up to {size_text(use.at_most)} in {folder}, and {size_text(free)} are free"
            yield f"{problem}: make room, choose another {key}, or keep fewer snapshots by checkpoint.keep"


def _range(rounds: Counter[int]) -> str:
    """Write the bytes of a round, or the least and the most of them if rounds differ."""
    least_text = size_text(min(rounds))
    most_text = size_text(max(rounds))
    if least_text == most_text:
        return most_text
    return f"{least_text} to {most_text}"


def size_text(size_bytes: int) -> str:
    """Write a number of bytes: 999 B, 1.23 kB, 45.6 MB."""
    text = si(size_bytes)
    if text[-1].isdigit():
        return f"{text} B"
    return f"{text[:-1]} {text[-1]}B"


@dataclass(frozen=True, slots=True)
class JobReport:
    """Facts about a job by subject, in order, and warnings that follow from them."""

    facts: list[tuple[str, str]]
    """Subject, such as ``model``, and text."""
    warnings: list[str]

    def text(self) -> str:
        """Write a line for each fact."""
        lines: list[str] = []
        for subject, text in self.facts:
            lines.append(f"{subject.ljust(SUBJECT_WIDTH)} {text}")
        return "\n".join(lines)


def summary_of_new(
    job: Job,
    source: DataSource | None,
    case: Case | None,
    nodes: Sequence[NodeResources],
    price: float | None,
) -> JobReport:
    """Summarize a job that begins; a partial one has fewer facts.

    Args:
        job: the job file.
        source: its dataset; None: it has none.
        case: its model on the dataset; None: it lacks one of them.
        nodes: nodes of the cluster.
        price: price of all machines per hour; None: they have none.

    """
    if case is None and source is None:
        return JobReport([("rounds", rounds_text(job))], [])
    if case is None:
        assert source is not None
        return JobReport([("data", data_text(job, source)), ("rounds", rounds_text(job, source.manifest))], [])
    summary = _of_case(case)
    with uncollected():
        from hypha_ray.driver.preflight.notes import step_notes

    notes = step_notes(case, nodes)
    for text in notes.memory:
        summary.facts.append(("memory", text))
    for text in notes.settings:
        summary.facts.append(("settings", text))
    summary.facts.extend(generator_facts(job, case.manifest))
    summary.facts.extend(time_facts(job, pace_of_earlier_run(job, case.manifest), price))
    summary.warnings.extend(notes.warnings)
    return summary


def summary_of_resumed(job: Job, source: DataSource, directory: RunDirectory, price: float | None) -> JobReport:
    """Summarize a run that goes on, by its own records; libraries of models aren't loaded for it.

    Args:
        job: the job file.
        source: its dataset.
        directory: directory of the run.
        price: price of all machines per hour; None: they have none.

    """
    records = by_round(read_jsonl(directory.path / METRICS, ("round",)), "round")
    facts: list[tuple[str, str]] = []
    snapshots = snapshot_rounds(directory.path)
    newest = None
    if snapshots:
        newest = read_header(directory.path, snapshots[-1])
    if newest is not None:
        facts.extend(_of_model(newest))
    facts.append(("data", data_text(job, source)))
    facts.append(("rounds", rounds_text(job, source.manifest, done=len(records))))
    if records:
        facts.extend(_of_records(records))
    if newest is not None:
        facts.extend(_of_snapshots(directory, snapshots))
    pace = pace_of_run(directory.path, job.num_workers) or pace_of_earlier_run(job, source.manifest)
    facts.extend(time_facts(job, pace, price, done=len(records)))
    return JobReport(facts, [])


def _of_case(case: Case) -> JobReport:
    """Summarize model, data, rounds, traffic and disk."""
    with uncollected():
        from hypha_ray.model.layout import layout_of

    job = case.job
    layout = layout_of(case.modules, job.sync.fragments, job.sync.partition)
    use = disk_sizes(case, layout)
    facts = [
        ("model", model_text(case.modules, layout)),
        ("data", data_text(job, case.source)),
        ("rounds", rounds_text(job, case.manifest)),
        ("exchange", exchange_text(job, exchange_of(job, layout))),
        ("disk", disk_text(job, use)),
    ]
    return JobReport(facts, list(space_notes(job, use)))


def _of_model(snapshot: SnapshotHeader) -> Iterator[tuple[str, str]]:
    """Facts about the model of a run, by the layout in a snapshot."""
    trained_count = 0
    for *_, group, _, elements in snapshot.state.get("entries", []):
        if is_trained(group):
            trained_count += elements
    if trained_count:
        yield "model", f"{trained_count:,} parameters are trained"


def _of_snapshots(directory: RunDirectory, rounds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Facts about the snapshots of a run, which it has of these rounds."""
    size_bytes = 0
    for file in snapshot_path(directory.path, rounds[-1]).iterdir():
        size_bytes += file.stat().st_size
    free_text = size_text(free_bytes(directory.path))
    count_text = counted(len(rounds), "snapshot")
    yield "disk", f"{count_text}, the newest of {size_text(size_bytes)}; {free_text} free in {directory.path.parent}"


def _of_records(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Facts about the traffic of the rounds so far."""
    total_up = 0
    total_down = 0
    up_bytes = 0
    down_bytes = 0
    for record in records:
        up_bytes = record.get("bytes_up") or 0
        down_bytes = record.get("bytes_down") or 0
        total_up += up_bytes
        total_down += down_bytes
    newest_text = f"{size_text(up_bytes)} up and {size_text(down_bytes)} down in the newest round"
    total_text = f"{size_text(total_up)} and {size_text(total_down)} so far"
    yield "exchange", f"{newest_text}, {total_text}"


def model_text(trained_model: Any, layout: Layout) -> str:
    """Describe a model by its class and its parameters.

    Args:
        trained_model: modules that are trained and exchanged, on any device.
        layout: their layout.

    """
    name = type(trained_model).__name__
    if hasattr(trained_model, "actor"):
        name = f"{type(trained_model.actor).__name__} as policy and as critic"
    count = layout.parameters()
    total = sum(parameter.numel() for parameter in trained_model.parameters())
    if count == total:
        return f"{name}, {total:,} parameters, all of them trained"
    return f"{name}, {count:,} of {total:,} parameters trained ({count / total:.2%})"


def data_text(job: Job, source: DataSource) -> str:
    """Describe a dataset: its samples, their tokens, how often the run uses them, and what is held out."""
    manifest = source.manifest
    samples = manifest.samples("train")
    parts = [f"{manifest.name}: {samples:,} {_noun(job)}"]
    if job.rl.algorithm is None:
        parts += _token_texts(source)
    if samples:
        parts.append(_epochs_text(job, manifest))
    validation_samples = manifest.samples("validation")
    if not validation_samples:
        return f"{', '.join(parts)}; none held out, so nothing is evaluated"
    text = f"{', '.join(parts)}; {validation_samples:,} held out"
    if validation_samples < FEW_HELD_OUT:
        text += ", too few to tell small differences from chance"
    return text


def rounds_text(job: Job, manifest: Manifest | None = None, done: int = 0) -> str:
    """Describe the rounds: their number, their samples, and a worker's batches.

    Args:
        job: the job file.
        manifest: its dataset; None: it has none.
        done: number of committed rounds of a run that goes on.

    """
    rounds = job.rounds.update_rounds
    samples = round_samples(job)
    if not job.rounds.counted:
        return f"as many of {samples:,} {_noun(job)} as {counted(job.rounds.epochs or 0, 'epoch')} take"
    if job.rounds.epochs is not None and manifest is not None:
        samples = min(samples, samples_in_epochs(job, manifest))
    text = f"{rounds:,} of {samples:,} {_noun(job)}"
    if job.rl.algorithm is not None and job.rl.group_size > 1:
        text += f" with {job.rl.group_size} responses each"
    if job.rounds.epochs is not None and rounds > 1 and not _has_equal_rounds(job, manifest):
        text += ", the last one with the rest"
    if job.rounds.max_exchange_share is not None:
        limit_text = f"{100 * job.rounds.max_exchange_share:g} %"
        text = f"at most {text}, and fewer, up to {MOST} times as long, if exchanges take over {limit_text} of the time"
    text += f": {_batches_text(job, samples)}"
    if job.rounds.warmup_rounds == 1:
        text += "; the first is one batch of each worker"
    elif job.rounds.warmup_rounds:
        text += f"; the first {job.rounds.warmup_rounds} are one batch of each worker"
    if job.rounds.patience is not None:
        text += f"; the run ends after {counted(job.rounds.patience, 'round')} without a better evaluation"
    if done:
        text += f"; {done:,} are done"
    return text


def _has_equal_rounds(job: Job, manifest: Manifest | None) -> bool:
    """Whether the last round of a job with epochs is as long as the others."""
    return manifest is not None and samples_in_epochs(job, manifest) == samples_of_rounds(job)


def run_samples(job: Job, manifest: Manifest) -> int:
    """Samples of all rounds of a run."""
    if job.rounds.epochs is not None:
        return samples_in_epochs(job, manifest)
    rounds = job.rounds.update_rounds
    warmup = min(job.rounds.warmup_rounds, rounds)
    warmup_samples = warmup * job.samples(0)
    return warmup_samples + (rounds - warmup) * round_samples(job)


def epochs_by_dataset(job: Job, manifest: Manifest) -> list[float]:
    """Return how often a run uses each sample of its dataset, or of each dataset of a mixture, on average."""
    samples = run_samples(job, manifest)
    if not job.dataset.mix:
        return [samples / manifest.samples("train")]
    counts = [0] * len(job.dataset.mix)
    for info in manifest.of("train"):
        counts[dataset_of(info.index)] += info.samples
    weights = sum(share.weight for share in job.dataset.mix)
    epochs: list[float] = []
    for share, count in zip(job.dataset.mix, counts, strict=True):
        epochs.append(samples * share.weight / weights / count)
    return epochs


def tokens_of(source: DataSource) -> tuple[int, bool] | None:
    """Count the tokens to train on.

    Samples with padding are read if they are few and on this machine.

    Returns:
        Number of tokens, and whether padding is counted as well; None for data without tokens.

    """
    manifest = source.manifest
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    if "input_ids" not in tensors:
        return None
    positions = manifest.samples("train") * math.prod(tensors["input_ids"].shape)
    mask = tensors.get("attention_mask")
    if mask is None and "position_ids" not in tensors:
        return positions, False
    if mask is not None and mask.minimum == 1:
        return positions, False
    size_bytes = manifest.samples("train") * manifest.sample_bytes
    if source.places != (Place(str(source.folder)),) or size_bytes > MOST_READ_BYTES:
        return positions, True
    from hypha_ray.model.checks import token_counts

    tokens = 0
    for info in manifest.of("train"):
        arrays = source.read(info)
        tokens += int(token_counts(arrays).sum())
    return tokens, False


def _token_texts(source: DataSource) -> list[str]:
    counted_tokens = tokens_of(source)
    if counted_tokens is None:
        return []
    tokens, has_padding = counted_tokens
    if has_padding:
        return [f"at most {tokens:,} tokens"]
    return [f"{tokens:,} tokens"]


def _epochs_text(job: Job, manifest: Manifest) -> str:
    """Say how often the run uses the samples."""
    epochs = epochs_by_dataset(job, manifest)
    about = "about "
    if job.sync.traits.has_barrier or job.rounds.epochs is not None:
        about = ""
    if not job.dataset.mix:
        uses = _number(epochs[0])
        noun = "epochs"
        if uses == "1":
            noun = "epoch"
        return f"{about}{uses} {noun} in all rounds"
    texts = []
    for part, number in zip(job.dataset.parts, epochs, strict=True):
        texts.append(f"{_part_name(part)} {_number(number)}")
    return f"epochs in all rounds: about {', '.join(texts)}"


def _part_name(part: Dataset) -> str:
    return part.name or Path(str(part.path)).name


def _number(value: float) -> str:
    """Write a number with two digits at least."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}"


def _noun(job: Job) -> str:
    return "samples" if job.rl.algorithm is None else "prompts"


def _batches_text(job: Job, samples: int) -> str:
    """Say which batches a worker takes in a round of so many samples, if all workers are equally fast."""
    batch_samples = min(batch_size(job), samples)
    batches = -(-samples // batch_samples)
    deltas = job.num_workers
    if not job.sync.traits.has_barrier:
        deltas = job.sync.period or job.num_workers
    least_batches, remainder = divmod(batches, deltas)
    text = f"{least_batches} batches"
    if remainder:
        text = f"{least_batches} to {least_batches + 1} batches"
    elif least_batches == 1:
        text = "1 batch"
    text += f" of {batch_samples}"
    if job.num_workers == 1:
        return text
    text += f" by each of {job.num_workers} workers"
    if has_equal_batches(job):
        return text
    return f"about {text}"
