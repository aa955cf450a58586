"""The store and data shards as Ray actors: commits, snapshots and slices, and errors that arrive as what they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import safetensors.numpy
from ray.exceptions import RayActorError
from safetensors.numpy import load_file

from hypha_ray.config import schema
from hypha_ray.config.training import Checkpoint
from hypha_ray.data.actor import DataShard
from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import read_slice
from hypha_ray.errors import CheckpointError, DataError, HyphaError
from hypha_ray.failpoints import hits
from hypha_ray.scheduler.messages import Persist
from hypha_ray.store.actor import GROUPS, Store
from hypha_ray.store.commits import CommitLog, check_chain
from hypha_ray.store.directory import lock_store
from hypha_ray.store.snapshots import load_snapshot, rounds
from hypha_ray.types import Contribution, Entry, Flat, Layout, Saved, Span, Verdict

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
    span = Span(0, 3, 8 * number, 8 * number + 8)
    return Persist(number, verdict, ((0, (span,)),), {3: 8 * (number + 1)}, 0, {}, {"seen": number})


def theta(number: int) -> list[Flat]:
    rng = np.random.default_rng(number)
    first = {GROUP: rng.standard_normal(10, dtype=np.float32), COUNT: np.array([number])}
    return [first, {GROUP: rng.standard_normal(40_000, dtype=np.float32)}]


def momentum(number: int) -> list[Flat]:
    return [{GROUP: flat[GROUP] * np.float32(0.5)} for flat in theta(number)]


def inner(number: int) -> Flat:
    return {"rng": np.full(5, number, np.uint8)}


def start(directory: Path, rounds: int, testing: schema.Testing | None = None, **checkpoint: int) -> Any:
    cls = ray.remote(concurrency_groups=GROUPS)(Store)
    return cls.options(num_cpus=0).remote(
        str(directory), Checkpoint(**checkpoint), schema.Rounds(update_rounds=rounds), testing
    )


def commit(store: Any, number: int, workers: tuple[int, ...] = ()) -> Any:
    refs = [ray.put(flat) for flat in (*theta(number), *momentum(number), *(inner(worker) for worker in workers))]
    return store.commit.remote(outcome(number), ray.put(LAYOUT), workers, *refs)


def sha256sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_store_rounds_become_a_chain_whose_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    store = start(tmp_path, 3, keep=3)
    origin = store.begin.remote(LAYOUT, *theta(99))
    saved: list[Saved] = ray.get([commit(store, number) for number in range(3)], timeout=WAIT_S)
    assert [one.problem for one in saved] == [None] * 3
    commits = [one.commit for one in saved]
    assert CommitLog(tmp_path).read() == tuple(commits)
    check_chain(CommitLog(tmp_path).read())
    assert [one.parent_sha256 for one in commits] == [ray.get(origin), *(one.theta_sha256 for one in commits[:-1])]
    for number, one in enumerate(commits):
        folder = tmp_path / "checkpoints" / f"round_{number:06d}"
        assert one.theta_sha256 == sha256sum(folder / "model.safetensors")
        assert one.outer_sha256 == sha256sum(folder / "outer.safetensors")
    assert commits[2].cursors == {3: 24} and commits[2].spans == ((0, (Span(0, 3, 16, 24),)),)


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
    check_chain(CommitLog(tmp_path).read())
    assert len(CommitLog(tmp_path).read()) == 8


def test_store_hash_is_the_same_whether_a_snapshot_is_written_or_not(tmp_path: Path) -> None:
    hashes = []
    for every in (1, 5):
        store = start(tmp_path / str(every), 9, every_rounds=every)
        newest = ray.get([commit(store, number) for number in range(2)], timeout=WAIT_S)[1].commit
        hashes.append((newest.theta_sha256, newest.outer_sha256))
    assert rounds(tmp_path / "1") == [0, 1] and rounds(tmp_path / "5") == [0]
    assert hashes[0] == hashes[1]


def test_store_refuses_a_gap_and_another_outcome_and_goes_on(tmp_path: Path) -> None:
    store = start(tmp_path, 9)
    ray.get([commit(store, number) for number in range(2)], timeout=WAIT_S)
    for wrong in (0, 3):
        with pytest.raises(HyphaError, match=f"got round {wrong + 1}, allowed round 3"):
            ray.get(commit(store, wrong), timeout=WAIT_S)
    with pytest.raises(CheckpointError, match="committed already"):
        refs = [*theta(7), *momentum(7)]
        ray.get(store.commit.remote(outcome(1), LAYOUT, (), *refs), timeout=WAIT_S)
    assert ray.get(commit(store, 2), timeout=WAIT_S).commit.round == 2
    assert rounds(tmp_path) == [1, 2]


def test_store_started_anew_goes_on_with_the_weights_of_the_newest_commit_only(tmp_path: Path) -> None:
    first = start(tmp_path, 9)
    ray.get(commit(first, 0), timeout=WAIT_S)
    ray.kill(first)
    store = start(tmp_path, 9)
    with pytest.raises(CheckpointError, match="weights differ from those of the newest commit"):
        ray.get(store.begin.remote(LAYOUT, *theta(5)), timeout=WAIT_S)
    parent = ray.get(store.begin.remote(LAYOUT, *theta(0)), timeout=WAIT_S)
    assert ray.get(commit(store, 1), timeout=WAIT_S).commit.parent_sha256 == parent
    check_chain(CommitLog(tmp_path).read())


def test_store_of_a_run_without_a_commit_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    store = start(tmp_path / "new", 9)
    assert ray.get([store.survey.remote(), store.inner.remote()], timeout=WAIT_S) == [None, ()]
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        ray.get(store.recall.remote(LAYOUT), timeout=WAIT_S)
    assert len(ray.get(store.begin.remote(LAYOUT, *theta(0)), timeout=WAIT_S)) == 64


def test_store_recalls_what_was_committed_in_parts_and_cuts_the_log_there(tmp_path: Path) -> None:
    first = start(tmp_path, 9, every_rounds=2)
    ray.get([commit(first, number, (1, 4)) for number in range(3)], timeout=WAIT_S)
    ray.kill(first)
    store = start(tmp_path, 9, every_rounds=2)
    survey = ray.get(store.survey.remote(), timeout=WAIT_S)
    assert (survey.next_round, survey.epoch, survey.used) == (2, 0, [[0, 3, 0, 8], [0, 3, 8, 16]])
    assert survey.state == {"seen": 1} and survey.skipped == ("commit round 3: no checkpoint; using round 2",)
    assert survey.theta == survey.outer == {} and survey.inner == {1: {}, 4: {}}
    assert CommitLog(tmp_path).rounds() == [0, 1]
    assert ray.get(store.inner.remote(), timeout=WAIT_S) == (1, 4)
    *flats, receipt = ray.get(store.recall.options(num_returns=7).remote(LAYOUT), timeout=WAIT_S)
    assert receipt == 2
    for flat, expected in zip(flats, [*theta(1), *momentum(1), inner(1), inner(4)], strict=True):
        assert flat.keys() == expected.keys()
        assert all(
            np.array_equal(flat[name], expected[name]) and flat[name].dtype == expected[name].dtype for name in flat
        )
    ray.get(store.begin.remote(LAYOUT, *flats[:2]), timeout=WAIT_S)
    assert ray.get(commit(store, 2), timeout=WAIT_S).problem is None


def test_store_killed_in_a_commit_is_replaced_by_one_that_waits_for_its_lock(tmp_path: Path) -> None:
    """The second is there before the first is gone."""
    testing = schema.Testing(failpoints=["store.before_record=kill@2"], failpoint_log=str(tmp_path / "hits"))
    first, second = (start(tmp_path / "run", 9, testing) for _ in range(2))
    ray.get(commit(first, 0), timeout=WAIT_S)
    doomed, waiting = commit(first, 1), commit(second, 1)
    with pytest.raises(RayActorError):
        ray.get(doomed, timeout=WAIT_S)
    saved = ray.get(waiting, timeout=WAIT_S)
    assert saved.problem is None and CommitLog(tmp_path / "run").newest() == saved.commit
    assert ray.get(commit(second, 1), timeout=WAIT_S) == saved
    assert hits(tmp_path / "hits", "store.before_record") == 1


def test_store_answers_for_its_pulse_while_it_waits(tmp_path: Path) -> None:
    lock = lock_store(tmp_path)
    store = start(tmp_path, 9)
    waiting = commit(store, 0)
    pids = {ray.get(store.ping.remote(), timeout=WAIT_S) for _ in range(3)}
    assert len(pids) == 1 and os.getpid() not in pids
    assert ray.wait([waiting], timeout=0)[1] == [waiting]
    lock.release()
    assert ray.get(waiting, timeout=WAIT_S).problem is None


def test_store_of_a_directory_that_another_process_has_is_refused(tmp_path: Path) -> None:
    with (
        lock_store(tmp_path),
        pytest.raises(CheckpointError, match=f"another process writes.*process {os.getpid()} on"),
    ):
        ray.get(commit(start(tmp_path, 9), 0), timeout=WAIT_S)
    assert rounds(tmp_path) == []


@ray.remote(num_cpus=0)
class Reader:
    """Takes a slice as a worker does: a ref, which Ray fetches before the call."""

    def sums(self, arrays: dict[str, np.ndarray]) -> dict[str, int]:
        return {name: int(array.sum()) for name, array in arrays.items()}

    def writeable(self, arrays: dict[str, np.ndarray]) -> set[bool]:
        return {array.flags.writeable for array in arrays.values()}


def shard(folder: Path) -> Any:
    return (
        ray.remote(concurrency_groups={"pulse": 1})(DataShard)
        .options(num_cpus=0, max_restarts=0, max_task_retries=0)
        .remote(str(folder))
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two slices, each too large for Ray to pass it on without the object store."""
    for number in range(2):
        ids = np.random.default_rng(number).integers(0, 100, (512, 128))
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        safetensors.numpy.save_file(arrays, tmp_path / f"{number}.safetensors")
    return tmp_path


def test_shard_announces_the_manifest_of_its_folder(dataset: Path) -> None:
    manifest = ray.get(shard(dataset).announce.remote(), timeout=WAIT_S)
    assert manifest == load(dataset)
    assert manifest.samples("train") == 1024


def test_slice_goes_from_a_shard_to_another_actor_unchanged_and_read_only(dataset: Path) -> None:
    server, reader, manifest = shard(dataset), Reader.remote(), load(dataset)
    for info in manifest.slices:
        ref = server.read.remote(info.index)
        expected = read_slice(dataset, info, manifest)
        sums = ray.get(reader.sums.remote(ref), timeout=WAIT_S)
        assert sums == {name: int(array.sum()) for name, array in expected.items()}
        assert ray.get(reader.writeable.remote(ref), timeout=WAIT_S) == {False}
        np.testing.assert_array_equal(ray.get(ref, timeout=WAIT_S)["input_ids"], expected["input_ids"])


def test_two_shards_serve_one_folder(dataset: Path) -> None:
    servers = [shard(dataset), shard(dataset)]
    first, second = (ray.get(server.read.remote(1), timeout=WAIT_S) for server in servers)
    np.testing.assert_array_equal(first["input_ids"], second["input_ids"])
    assert len({ray.get(server.ping.remote(), timeout=WAIT_S) for server in servers}) == 2


def test_slice_read_outlives_its_shard(dataset: Path) -> None:
    server, reader = shard(dataset), Reader.remote()
    ref = server.read.remote(0)
    before = ray.get(reader.sums.remote(ref), timeout=WAIT_S)
    ray.kill(server)
    assert ray.get(reader.sums.remote(ref), timeout=WAIT_S) == before


def test_slice_damaged_after_the_announcement_is_refused_and_others_still_served(dataset: Path) -> None:
    server = shard(dataset)
    ray.get(server.announce.remote(), timeout=WAIT_S)
    path = dataset / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    with pytest.raises(DataError) as caught:
        ray.get(server.read.remote(0), timeout=WAIT_S)
    assert caught.value.cause.code == "DATA016"
    assert "slice 0 (0.safetensors)" in str(caught.value.cause)
    assert len(ray.get(server.read.remote(1), timeout=WAIT_S)["input_ids"]) == 512


def test_slice_truncated_while_served_does_not_kill_the_shard(dataset: Path) -> None:
    server = shard(dataset)
    before = ray.get(server.ping.remote(), timeout=WAIT_S)
    ray.get(server.read.remote(0), timeout=WAIT_S)
    with (dataset / "0.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError):
        ray.get(server.read.remote(0), timeout=WAIT_S)
    assert ray.get(server.ping.remote(), timeout=WAIT_S) == before


@pytest.mark.parametrize(("call", "code"), [("announce", "DATA001"), ("read", "DATA001")])
def test_shard_of_a_missing_folder_says_so_when_asked(tmp_path: Path, call: str, code: str) -> None:
    server = shard(tmp_path / "missing")
    with pytest.raises(DataError) as caught:
        ray.get(getattr(server, call).remote(*([0] if call == "read" else [])), timeout=WAIT_S)
    assert caught.value.cause.code == code
    assert ray.get(server.ping.remote(), timeout=WAIT_S)


def test_slice_that_the_dataset_lacks_is_refused(dataset: Path) -> None:
    with pytest.raises(DataError) as caught:
        ray.get(shard(dataset).read.remote(2), timeout=WAIT_S)
    assert (caught.value.cause.code, caught.value.cause.got) == ("DATA008", "2")


def test_shard_refuses_another_slice_than_its_reader_means_until_it_is_back(dataset: Path, tmp_path: Path) -> None:
    before, server = load(dataset), shard(dataset)
    hashes = {info.index: info.sha256 for info in before.slices}
    kept = {file: (dataset / file).read_bytes() for file in ("manifest.json", "0.safetensors")}
    ray.get(server.read.remote(0, False, hashes[0]), timeout=WAIT_S)
    ids = np.random.default_rng(9).integers(0, 100, (512, 128))
    safetensors.numpy.save_file({"input_ids": ids, "attention_mask": np.ones_like(ids)}, dataset / "0.safetensors")
    (dataset / "manifest.json").unlink()
    assert load(dataset).identity != before.identity
    for successor in (server, shard(dataset)):
        with pytest.raises(DataError) as caught:
            ray.get(successor.read.remote(0, False, hashes[0]), timeout=WAIT_S)
        assert caught.value.cause.code == "DATA046"
        assert hashes[0][:12] in str(caught.value.cause)
        assert len(ray.get(successor.read.remote(1, False, hashes[1]), timeout=WAIT_S)["input_ids"]) == 512
    for file, content in kept.items():
        (dataset / file).write_bytes(content)
    assert len(ray.get(server.read.remote(0, False, hashes[0]), timeout=WAIT_S)["input_ids"]) == 512
