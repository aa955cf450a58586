"""Number of rounds of a run whose job file gives epochs, by its dataset and by what its commits have used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypha_ray.config import Job
from hypha_ray.config.schema import beside_largest, largest, rounds_for
from hypha_ray.data.manifest import Manifest
from hypha_ray.errors import ConfigError
from hypha_ray.optim.schedules import check_schedule, inner_steps
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.directory import RunDirectory, quarantined
from hypha_ray.store.restore_point import usable_rounds
from hypha_ray.texts import counted
from hypha_ray.types import SliceInfo, Span, dataset_of


@dataclass(frozen=True, slots=True)
class EpochSamples:
    """Length of a run, in samples of all its epochs."""

    own: int
    """Samples of the dataset, or of the largest one of a mixture."""
    others: int
    """Samples of the other datasets of a mixture."""


def with_rounds(job: Job, manifest: Manifest, directory: RunDirectory | None) -> Job:
    """The job with the number of rounds that its epochs take, those included that its run has; others as they are.

    Args:
        job: the job.
        manifest: of the dataset.
        directory: run directory, which may not exist yet; None: the run has no name yet.

    Raises:
        ConfigError: CFG003, the warm-up has more rounds, or the run has begun more epochs; or as `check_schedule`.
        CheckpointError: STORE002, a commit record is damaged.

    """
    if job.rounds.epochs is None:
        return job
    slices: Sequence[SliceInfo] = manifest.of("train")
    next_round = 0
    spans: list[Span] = []
    if directory is not None and directory.begun:
        damaged = quarantined(directory.path)
        slices = [info for info in slices if info.index not in damaged]
        next_round = usable_rounds(directory.path)
        spans = _used_spans(directory, next_round)
        _check_epochs(job, spans)
    rounds = next_round + rounds_for(job, _unused(job, slices, spans), next_round)
    job = job.lasting(max(1, rounds))
    _check_warmup(job)
    check_schedule(job.inner_optimizer, inner_steps(job))
    return job


def length_note(job: Job, manifest: Manifest) -> str | None:
    """A line about the length of a run; None if the job file gives its rounds."""
    epochs = job.rounds.epochs
    if epochs is None:
        return None
    samples = _samples_by_dataset(manifest.of("train"))
    text = f"rounds.epochs = {epochs}: {counted(samples_in_epochs(job, manifest), 'sample')}"
    text += f" in {counted(job.rounds.update_rounds, 'round')}"
    if not job.dataset.mix:
        return text
    number = largest(samples)
    share = job.dataset.mix[number]
    return f"{text}; those of {share.name or share.path}, the largest dataset, {counted(epochs, 'time')}"


def samples_in_epochs(job: Job, manifest: Manifest) -> int:
    """Number of samples that a run uses whose job file gives epochs."""
    length = _length(job, _samples_by_dataset(manifest.of("train")))
    return length.own + length.others


def _unused(job: Job, slices: Sequence[SliceInfo], spans: Iterable[Span]) -> int:
    """Samples of all epochs that no span has."""
    assert job.rounds.epochs is not None
    samples = _samples_by_dataset(slices)
    length = _length(job, samples)
    number = largest(samples)
    indices = {info.index for info in slices}
    used: Counter[bool] = Counter()
    for span in spans:
        is_own = dataset_of(span.slice) == number
        if not is_own or (span.slice in indices and span.epoch < job.rounds.epochs):
            used[is_own] += span.samples
    return max(0, length.own - used[True]) + max(0, length.others - used[False])


def _length(job: Job, samples: Sequence[int]) -> EpochSamples:
    assert job.rounds.epochs is not None
    weights = [share.weight for share in job.dataset.mix] or [1.0]
    other_samples = beside_largest(samples, weights, job.rounds.epochs)
    return EpochSamples(job.rounds.epochs * max(samples), other_samples)


def _samples_by_dataset(slices: Iterable[SliceInfo]) -> list[int]:
    """Samples of each dataset of a mixture, in its order, or of the only one."""
    samples: Counter[int] = Counter()
    for info in slices:
        samples[dataset_of(info.index)] += info.samples
    return [samples[number] for number in range(max(samples, default=0) + 1)]


def _used_spans(directory: RunDirectory, rounds: int) -> list[Span]:
    """Samples of the first rounds of a run."""
    log = CommitLog(directory.path)
    spans: list[Span] = []
    for round in range(rounds):
        for _, worker_spans in log.load(round).spans:
            spans += worker_spans
    return spans


def _check_epochs(job: Job, spans: Iterable[Span]) -> None:
    """Refuse fewer epochs than a run has begun; datasets of a mixture have epochs of their own."""
    assert job.rounds.epochs is not None
    epochs = max((span.epoch + 1 for span in spans), default=0)
    if epochs > job.rounds.epochs and not job.dataset.mix:
        problem = "rounds.epochs is less than the run has begun"
        fix = "leave it out, or choose another run.name for a shorter run"
        raise ConfigError("CFG003", problem, str(job.rounds.epochs), f"{epochs} or more", fix)


def _check_warmup(job: Job) -> None:
    warmup = job.rounds.warmup_rounds
    if warmup > job.rounds.update_rounds:
        problem = f"rounds.warmup_rounds is more than the rounds of rounds.epochs = {job.rounds.epochs}"
        fix = "mend rounds.warmup_rounds or rounds.epochs, or have shorter rounds"
        raise ConfigError("CFG003", problem, str(warmup), f"up to {job.rounds.update_rounds}", fix)
