"""Data shards on a real Ray: slices go from a shard to another actor, and errors arrive as what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import safetensors.numpy

from hypha_ray.data.actor import DataShard
from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import read_slice
from hypha_ray.errors import DataError

pytestmark = pytest.mark.usefixtures("local_ray")
WAIT_S = 60.0


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
