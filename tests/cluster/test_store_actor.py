"""The store as a Ray actor: a run's commits and snapshots on disk, in the order of its rounds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file

from hypha_ray.config.schema import Checkpoint
from hypha_ray.errors import CheckpointError
from hypha_ray.scheduler.commands import Persist
from hypha_ray.store.actor import Store
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.snapshots import load_snapshot, rounds
from hypha_ray.types import Commit, Contribution, Entry, Flat, Layout, Span, Verdict

GROUP, COUNT = "parameters/float32", "buffers/int64"
LAYOUT = Layout(
    (
        Entry("a", "bfloat16", (2, 3), 0, GROUP, 0, 6),
        Entry("b", "float32", (200, 200), 1, GROUP, 0, 40_000),
        Entry("c", "float32", (4,), 0, GROUP, 6, 4),
        Entry("n", "int64", (), 0, COUNT, 0, 1),
    ),
    (("alias", "a"),),
    2,
)
WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("local_ray")


def outcome(number: int) -> Persist:
    verdict = Verdict(number, (Contribution(0, 0, 8, 0.5),), (), 0.25)
    return Persist(number, verdict, ((0, (Span(0, 3, 0, 8),)),), {3: 8 * (number + 1)}, 0, {})


def theta(number: int) -> list[Flat]:
    rng = np.random.default_rng(number)
    first = {GROUP: rng.standard_normal(10, dtype=np.float32), COUNT: np.array([number])}
    return [first, {GROUP: rng.standard_normal(40_000, dtype=np.float32)}]


def momentum(number: int) -> list[Flat]:
    return [{GROUP: flat[GROUP] * np.float32(0.5)} for flat in theta(number)]


def start(directory: Path, rounds: int, **checkpoint: int) -> Any:
    return ray.remote(Store).options(num_cpus=0).remote(str(directory), Checkpoint(**checkpoint), rounds)


def commit(store: Any, number: int) -> Any:
    refs = [ray.put(flat) for flat in (*theta(number), *momentum(number))]
    return store.commit.remote(outcome(number), ray.put(LAYOUT), *refs)


def sha256sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_store_rounds_become_a_chain_whose_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    store = start(tmp_path, 3, keep=3)
    origin = store.begin.remote(LAYOUT, *theta(99))
    commits: list[Commit] = ray.get([commit(store, number) for number in range(3)], timeout=WAIT_S)
    assert CommitLog(tmp_path).read() == tuple(commits)
    CommitLog(tmp_path).verify()
    assert [one.parent_sha256 for one in commits] == [ray.get(origin), *(one.theta_sha256 for one in commits[:-1])]
    for number, one in enumerate(commits):
        folder = tmp_path / "checkpoints" / f"round_{number:06d}"
        assert one.theta_sha256 == sha256sum(folder / "model.safetensors")
        assert one.outer_sha256 == sha256sum(folder / "outer.safetensors")
    assert commits[2].cursors == {3: 24} and commits[2].spans == ((0, (Span(0, 3, 0, 8),)),)


def test_store_snapshot_has_all_tensors_by_name_in_master_precision(tmp_path: Path) -> None:
    ray.get(commit(start(tmp_path, 1), 0), timeout=WAIT_S)
    tensors = load_file(tmp_path / "checkpoints" / "round_000000" / "model.safetensors")
    first, second = theta(0)
    assert {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()} == {
        "a": ("float32", (2, 3)),
        "b": ("float32", (200, 200)),
        "c": ("float32", (4,)),
        "n": ("int64", ()),
    }
    assert np.array_equal(tensors["a"].ravel(), first[GROUP][:6]) and np.array_equal(tensors["c"], first[GROUP][6:])
    assert np.array_equal(tensors["b"].ravel(), second[GROUP])
    snapshot = load_snapshot(tmp_path, 0)
    assert snapshot.outer.keys() == {"a", "b", "c"}
    assert np.array_equal(snapshot.outer["c"], first[GROUP][6:] * np.float32(0.5))
    assert snapshot.state["tied"] == [["alias", "a"]] and snapshot.state["layout_sha256"] == LAYOUT.sha256()


def test_store_keeps_every_commit_and_the_snapshots_that_the_job_wants(tmp_path: Path) -> None:
    store = start(tmp_path, 8, every_rounds=3, keep=2)
    ray.get([commit(store, number) for number in range(7)], timeout=WAIT_S)
    assert rounds(tmp_path) == [2, 5]
    ray.get(commit(store, 7), timeout=WAIT_S)
    assert rounds(tmp_path) == [5, 7]
    CommitLog(tmp_path).verify()
    assert len(CommitLog(tmp_path).read()) == 8


def test_store_hash_is_the_same_whether_a_snapshot_is_written_or_not(tmp_path: Path) -> None:
    written = ray.get(commit(start(tmp_path / "a", 9), 0), timeout=WAIT_S)
    counted = ray.get(commit(start(tmp_path / "b", 9, every_rounds=5), 0), timeout=WAIT_S)
    assert rounds(tmp_path / "b") == []
    assert (written.theta_sha256, written.outer_sha256) == (counted.theta_sha256, counted.outer_sha256)


def test_store_refuses_a_gap_and_a_repetition_and_goes_on(tmp_path: Path) -> None:
    store = start(tmp_path, 9)
    ray.get(commit(store, 0), timeout=WAIT_S)
    for wrong in (0, 2):
        with pytest.raises(CheckpointError, match=f"got round {wrong}, allowed round 1"):
            ray.get(commit(store, wrong), timeout=WAIT_S)
    assert ray.get(commit(store, 1), timeout=WAIT_S).round == 1
    assert rounds(tmp_path) == [0, 1]


def test_store_started_anew_goes_on_with_the_weights_of_the_newest_commit_only(tmp_path: Path) -> None:
    ray.get(commit(start(tmp_path, 9), 0), timeout=WAIT_S)
    store = start(tmp_path, 9)
    with pytest.raises(CheckpointError, match="weights differ from those of the newest commit"):
        ray.get(store.begin.remote(LAYOUT, *theta(5)), timeout=WAIT_S)
    parent = ray.get(store.begin.remote(LAYOUT, *theta(0)), timeout=WAIT_S)
    assert ray.get(commit(store, 1), timeout=WAIT_S).parent_sha256 == parent
    CommitLog(tmp_path).verify()
