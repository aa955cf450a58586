"""Decision to begin a run, to resume it, or to refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.config.entry_point import print_notes
from hypha_ray.config.load import Difference, differences, load, refuse_changes, resolved_toml, with_absolute_folders
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import DATASET, RunDataset, described
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.errors import CheckpointError
from hypha_ray.model.identity import IDENTITY, changed_error, changes, folder_hash, identity_of, is_replaceable, pinned
from hypha_ray.scheduler.rounds.metrics import EvaluationPatience
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.directory import RunDirectory
from hypha_ray.store.restore_point import usable_rounds
from hypha_ray.store.snapshots import newest_good
from hypha_ray.telemetry.sinks.files import METRICS, SUMMARY, by_round, read_json, read_jsonl
from hypha_ray.texts import counted, rounds_text


def settle(job: Job, directory: RunDirectory, manifest: Manifest, resume: bool) -> None:
    """Begin a run, or check that an existing run is this one. The caller holds its lock.

    Args:
        job: with `run.name` and `run.dir` set.
        directory: run directory, which may not exist yet.
        manifest: of the dataset.
        resume: whether to accept changed settings, as far as possible.

    Raises:
        ConfigError: the run belongs to another job and `resume` is False, or the directory can't be written.
        CheckpointError: the run is of another training.

    """
    if directory.begun:
        compare(job, directory, manifest, resume)
    directory.write(DATASET, described(manifest))
    directory.configure(resolved_toml(job))


def with_identity(job: Job, directory: RunDirectory, source: DataSource, resume: bool) -> Job:
    """The job with the hashes of its run's first inputs, and with the commits of a hub's repositories as revisions.

    Args:
        job: with `run.name` and `run.dir` set.
        directory: run directory, which may not exist yet.
        source: the dataset, with its tokenizer.
        resume: whether to accept other external trainers, another reward model, or another source of a user's member
            of a family.

    Raises:
        CheckpointError: CKPT007, an input has another content than when the run began.
        HyphaError: a hub refuses or can't be reached.

    """
    first_hashes = known_identity(directory)
    job = pinned(job, first_hashes)
    hashes = identity_of(with_absolute_folders(job))
    preprocessor = source.manifest.preprocessor
    if preprocessor is not None and preprocessor.folder is not None:
        tokenizer_folder = source.folder / preprocessor.folder
        if tokenizer_folder.is_dir():
            hashes["dataset's tokenizer"] = folder_hash(tokenizer_folder)
    changed = changes(hashes, first_hashes)
    refused = [key for key in changed if not (resume and is_replaceable(key))]
    if refused:
        raise changed_error(refused)
    print_notes([f"{key} has changed; it is taken as it is here" for key in changed])
    return job.beginning_with({**first_hashes, **hashes})


def known_identity(directory: RunDirectory) -> dict[str, str]:
    """Hashes of a run's first inputs; none before it has begun, and of a run of an earlier release."""
    return read_json(directory.path / IDENTITY) if directory.begun else {}


def keep_identity(job: Job, directory: RunDirectory) -> None:
    """Write the hashes of the run's first inputs.

    Raises:
        ConfigError: the directory can't be written.

    """
    directory.write(IDENTITY, json.dumps(dict(job.begun_with), indent=1, sort_keys=True))


def compare(job: Job, directory: RunDirectory, manifest: Manifest, resume: bool) -> None:
    """Check that an existing run is this one, and print its progress; nothing is written.

    Raises:
        HyphaError: as `settle`.

    """
    first_sha256 = RunDataset.parse(read_json(directory.path / DATASET)).sha256
    same_data = None if first_sha256 is None else first_sha256 == manifest.identity
    run_job = load(["@", str(directory.config)]).job
    changed = differences(job, run_job)
    if not resume:
        refuse_changes(changed, job)
    _require_same_training(changed, directory, same_data, manifest.name)
    print_notes([f"{change}; it is taken as it is here" for change in changed])
    print_notes([f"run {directory.path.name} {standing(job, directory)}"])


def is_done(job: Job, directory: RunDirectory) -> bool:
    """Whether all rounds are committed, and the last weights are undamaged, or the run has ended early."""
    rounds = committed(directory)
    if ended_early(job, directory) is not None:
        return True
    return rounds >= job.rounds.update_rounds and newest_good(directory.path) == rounds - 1


def ended_early(job: Job, directory: RunDirectory) -> str | None:
    """Reason for which the run ended before all rounds; None if it didn't, or has more patience or money now."""
    reason = read_json(directory.path / SUMMARY).get("ended_early")
    if reason is None or newest_good(directory.path) is None:
        return None
    if str(reason).startswith(f"{job.goal.budget} "):
        return str(reason)
    evaluations = by_round(read_jsonl(directory.path / METRICS, ("eval",)), "eval")
    return EvaluationPatience(job.rounds, evaluations).exhausted


def last_round(job: Job, directory: RunDirectory) -> int:
    """Round whose weights are the run's result, once it has ended."""
    if ended_early(job, directory) is not None:
        newest = newest_good(directory.path)
        if newest is not None:
            return newest
    return committed(directory) - 1


def committed(directory: RunDirectory) -> int:
    """Number of committed rounds."""
    return max(CommitLog(directory.path).rounds(), default=-1) + 1


def standing(job: Job, directory: RunDirectory) -> str:
    """Progress of a run, in words; rounds are counted from one, as on the console."""
    rounds = committed(directory)
    total = job.rounds.update_rounds
    reason = ended_early(job, directory)
    if reason is not None:
        return f"ended early: {reason}"
    if rounds >= total:
        return f"has all of its {counted(total, 'round')}"
    if not rounds:
        return "has no commit yet, and starts from the beginning"
    usable = usable_rounds(directory.path, verify=True)
    if usable == rounds:
        return f"goes on after round {rounds} of {total}"
    if usable:
        lost = rounds_text(range(usable, rounds))
        return f"goes on after round {usable} of {total}: there is no usable checkpoint of {lost}"
    return f"has {counted(rounds, 'round')} of {total}, but no usable checkpoint"


def _require_same_training(
    changed: Sequence[Difference], directory: RunDirectory, same_data: bool | None, dataset: str
) -> None:
    """Refuse changes that can't be resumed from the run's commits; the same data may have moved."""
    fix = f"choose another run.name to train anew, or give what {directory.config} has"
    for change in changed:
        if change.forks and not (change.of_data and same_data):
            raise CheckpointError("CKPT004", f"run {directory.path.name} is another training: {change}", fix=fix)
    if same_data is False:
        problem = f"run {directory.path.name} is another training: dataset {dataset!r} has other samples now"
        raise CheckpointError("CKPT004", problem, fix="choose another run.name, or restore the dataset")
