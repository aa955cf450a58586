"""Decision to begin a run, to resume it, or to refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.config.cli.output import print_notes
from hypha_ray.config.compare import Difference, differences, refuse_changes
from hypha_ray.config.load import load, resolved_toml, with_absolute_folders
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import DATASET, RunDataset, described
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.errors import CheckpointError
from hypha_ray.model.identity import IDENTITY, changes, folder_hash, identity_of, is_replaceable, other, pinned
from hypha_ray.scheduler.rounds.signs import Patience
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
        CheckpointError: the run trains something else.

    """
    if directory.begun:
        compare(job, directory, manifest, resume)
    directory.write(DATASET, described(manifest))
    directory.configure(resolved_toml(job))


def with_identity(job: Job, directory: RunDirectory, source: DataSource, resume: bool) -> Job:
    """The job with the hashes of what its run began with, and with the commits of a hub's repositories as revisions.

    Args:
        job: with `run.name` and `run.dir` set.
        directory: run directory, which may not exist yet.
        source: the dataset, whose tokenizer lies beside it.
        resume: whether to accept other external trainers, another reward model, or another source of a user's member
            of a family.

    Raises:
        CheckpointError: CKPT007, something has other content than the run began with.
        HyphaError: a hub refuses or can't be reached.

    """
    known = known_identity(directory)
    job = pinned(job, known)
    here = identity_of(with_absolute_folders(job))
    made_by = source.manifest.preprocessor
    if made_by is not None and made_by.folder is not None and (source.folder / made_by.folder).is_dir():
        here["dataset's tokenizer"] = folder_hash(source.folder / made_by.folder)
    changed = changes(here, known)
    refused = [key for key in changed if not (resume and is_replaceable(key))]
    if refused:
        raise other(refused)
    print_notes([f"{key} has changed; it is taken as it is here" for key in changed])
    return job.beginning_with({**known, **here})


def known_identity(directory: RunDirectory) -> dict[str, str]:
    """Hashes of what a run began with; none before, and of a run of an earlier release."""
    return read_json(directory.path / IDENTITY) if directory.begun else {}


def keep_identity(job: Job, directory: RunDirectory) -> None:
    """Write down what the run began with.

    Raises:
        ConfigError: the directory can't be written.

    """
    directory.write(IDENTITY, json.dumps(dict(job.begun_with), indent=1, sort_keys=True))


def compare(job: Job, directory: RunDirectory, manifest: Manifest, resume: bool) -> None:
    """Check that an existing run is this one, and print its progress; nothing is written.

    Raises:
        HyphaError: as `settle`.

    """
    known = RunDataset.parse(read_json(directory.path / DATASET)).sha256
    changed = differences(job, load(["@", str(directory.config)]).job)
    if not resume:
        refuse_changes(changed, job)
    _require_same_training(changed, directory, None if known is None else known == manifest.identity, manifest.name)
    print_notes([f"{change}; it is taken as it is here" for change in changed])
    print_notes([f"run {directory.path.name} {standing(job, directory)}"])


def is_done(job: Job, directory: RunDirectory) -> bool:
    """Whether all rounds are committed, and the last weights are undamaged, or the run has ended early."""
    done = committed(directory)
    if ended_early(job, directory) is not None:
        return True
    return done >= job.rounds.update_rounds and newest_good(directory.path) == done - 1


def ended_early(job: Job, directory: RunDirectory) -> str | None:
    """Reason for which the run ended before all rounds; None if it didn't, or if it has more patience now."""
    if read_json(directory.path / SUMMARY).get("ended_early") is None or newest_good(directory.path) is None:
        return None
    return Patience(job.rounds, by_round(read_jsonl(directory.path / METRICS, ("eval",)), "eval")).exhausted


def last_round(job: Job, directory: RunDirectory) -> int:
    """Round whose weights are the run's result, once it has ended."""
    newest = None if ended_early(job, directory) is None else newest_good(directory.path)
    return committed(directory) - 1 if newest is None else newest


def committed(directory: RunDirectory) -> int:
    """Number of rounds, in words."""
    return max(CommitLog(directory.path).rounds(), default=-1) + 1


def standing(job: Job, directory: RunDirectory) -> str:
    """Progress of a run, in words; rounds are counted from one, as on the console."""
    done = committed(directory)
    wanted = job.rounds.update_rounds
    if (reason := ended_early(job, directory)) is not None:
        return f"ended early: {reason}"
    if done >= wanted:
        return f"has all of its {counted(wanted, 'round')}"
    if not done:
        return "has no commit yet, and starts from the beginning"
    usable = usable_rounds(directory.path, verify=True)
    if usable == done:
        return f"goes on after round {done} of {wanted}"
    again = rounds_text(range(usable, done))
    if usable:
        return f"goes on after round {usable} of {wanted}: there is no usable checkpoint of {again}"
    return f"has {counted(done, 'round')} of {wanted}, but no usable checkpoint"


def _require_same_training(
    changed: Sequence[Difference], directory: RunDirectory, same_data: bool | None, dataset: str
) -> None:
    """Refuse changes that can't be resumed from the run's commits; the same data may have moved."""
    fix = f"choose another run.name to train anew, or give what {directory.config} has"
    for change in changed:
        if change.forks and not (change.of_data and same_data):
            raise CheckpointError("CKPT004", f"run {directory.path.name} is another training: {change}", fix=fix)
    if same_data is False:
        what = f"run {directory.path.name} is another training: dataset {dataset!r} has other samples now"
        raise CheckpointError("CKPT004", what, fix="choose another run.name, or restore the dataset")
