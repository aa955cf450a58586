"""Faults of data nodes in the middle of a run of three epochs: what they cost, and whether anything is lost.

A cluster of this machine has two nodes for workers and two that only have data. A data node is killed; one of two is
removed with its machine; and one of two has a slice with a flipped bit.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import ray
from chaoslab.arena import make_place_of_note
from ray.cluster_utils import Cluster

from hypha_ray.config import Job
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.storage import Place
from hypha_ray.driver.attempts import records
from hypha_ray.driver.cluster_offers import serve, withdraw
from hypha_ray.driver.data_source import in_folder
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import EVENTS, read_jsonl
from hypha_ray.types import Span

ROWS = ("data_node_killed", "data_node_removed", "data_node_damaged")
EPOCHS = 3
SAMPLES = 600
ROUNDS = 13
BATCH_S = 0.1
AT_ROUND = 5
"""Round after which the fault happens; the run is in the second epoch then."""
TINY = Path(__file__).parents[2] / "jobs" / "configs" / "tiny.toml"
Record: TypeAlias = dict[str, Any]
SHARED = {"object_store_memory": 200_000_000}


class _Lab:
    """A cluster with a dataset that data nodes of it serve."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder = folder
        self._cluster = cluster
        self.data = folder / "corpus"
        options = PrepareOptions("stdlib", str(self.data), seq_len=32, samples_per_slice=50, max_samples=SAMPLES)
        prepare(options, lambda kind, count: None)

    def add(self, **options: Any) -> Any:
        return self._cluster.add_node(**SHARED, **options)

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node)

    def job(self, name: str) -> Job:
        batches = ROUNDS - 1  # So that the run has three epochs and a little more.
        rounds = {"update_rounds": ROUNDS, "samples_between_updates": EPOCHS * SAMPLES // batches, "max_batch_size": 5}
        flags = ["--rounds.evaluate_every", "0", "--testing.batch_s", str(BATCH_S), "--dataset.name", name]
        for key, value in rounds.items():
            flags += [f"--rounds.{key}", str(value)]
        return load(["@", str(TINY), *flags]).job

    def run(self, name: str, fault: Callable[[], object]) -> tuple[RunDirectory, list[Record]]:
        """Run a job on the data nodes of a name; `fault` happens once."""
        job = self.job(name)
        directory = RunDirectory.create(self._folder, name, resolved_toml(job))
        source = replace(in_folder(self.data), places=(Place(name, served=True),))
        run_records = list[Record]()
        for record in records(job, name, directory, source):
            run_records.append(record)
            if (record["kind"], record.get("round")) == ("round", AT_ROUND):
                fault()
        return directory, run_records

    def lost_or_twice(self, directory: RunDirectory) -> int:
        """Samples of the first epochs that the commits lack, or have more than once."""
        used: Counter[tuple[int, int, int]] = Counter()
        for path in sorted((directory.path / "commits").glob("round_*.json")):
            commit = json.loads(path.read_text(encoding="utf-8"))
            for spans in commit["spans"].values():
                for fields in spans:
                    span = Span(*fields)
                    used.update((span.epoch, span.slice, sample) for sample in range(span.start, span.stop))
        expected = set[tuple[int, int, int]]()
        for epoch in range(EPOCHS):
            for info in load_manifest(self.data).of("train"):
                expected.update((epoch, info.index, sample) for sample in range(info.samples))
        repeated = sum(count > 1 for count in used.values())
        return len(expected - set(used)) + repeated


def data_faults() -> dict[str, dict[str, Any]]:
    """Samples that were lost or used twice, and the longest round over what it may last; both of them are exact."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder / "ray"), **SHARED}
    make_place_of_note()
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, namespace="bench", log_to_driver=False)
        lab = _Lab(folder, cluster)
        for _ in range(2):
            lab.add(num_cpus=1)
        return {"data_node_killed": killed(lab), "data_node_removed": removed(lab), "data_node_damaged": damaged(lab)}
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def killed(lab: _Lab) -> dict[str, Any]:
    """The only data node is killed; Ray starts it again."""
    node = lab.add(num_cpus=0)
    replica = serve(str(lab.data), "killed", node.node_id)

    def kill() -> None:
        data_node = ray.get_actor(replica.name, namespace=CLUSTER)
        pid = ray.get(data_node.ping.remote())
        os.kill(pid, signal.SIGKILL)

    directory, run_records = lab.run("killed", kill)
    withdraw("killed", None)
    return _row(lab, directory, run_records, "samples lost or twice")


def removed(lab: _Lab) -> dict[str, Any]:
    """One of two machines with data goes away: how long the longest round lasted, over 2 medians and `lease_s`."""
    first_node = lab.add(num_cpus=0)
    second_node = lab.add(num_cpus=0)
    first_replica = serve(str(lab.data), "removed", first_node.node_id)
    serve(str(lab.data), "removed", second_node.node_id)
    directory, run_records = lab.run("removed", lambda: lab.remove(first_node))
    withdraw("removed", None)
    times_s = [record["time_s"] for record in run_records if record["kind"] == "round"]
    longest_s = max(times_s)
    median_s = median(times_s)
    allowed_s = 2 * median_s + lab.job("removed").lease_s
    row = _row(lab, directory, run_records, "longest round ÷ (2 medians + lease_s)", longest_s / allowed_s)
    return row | {"longest_s": round(longest_s, 2), "median_s": round(median_s, 2), "gone": first_replica.name}


def damaged(lab: _Lab) -> dict[str, Any]:
    """One of two data nodes has a slice with a flipped bit: slices that were set aside."""
    bad_node = lab.add(num_cpus=0)
    good_node = lab.add(num_cpus=0)
    copy = lab.data.with_name("copy")
    shutil.copytree(lab.data, copy)
    bad_replica = serve(str(copy), "damaged", bad_node.node_id)
    serve(str(lab.data), "damaged", good_node.node_id)
    for info in load_manifest(lab.data).of("train"):
        file = copy / info.file
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    directory, run_records = lab.run("damaged", lambda: None)
    withdraw("damaged", None)
    quarantined = len(_events(directory, "quarantine"))
    problems = [event["text"] for event in _events(directory, "problem")]
    named = sum(bad_replica.name in text for text in problems)
    return _row(lab, directory, run_records, "slices in quarantine", quarantined) | {"named": named}


def _row(
    lab: _Lab, directory: RunDirectory, run_records: list[Record], of: str, value: float | None = None
) -> dict[str, Any]:
    lost = lab.lost_or_twice(directory)
    rounds = sum(record["kind"] == "round" for record in run_records)
    shared = {"of": of, "rounds": rounds, "epochs": EPOCHS, "samples_lost_or_twice": lost}
    return {
        "value": lost if value is None else value,
        "target": "<= 1" if of.startswith("longest") else "= 0",
        **shared,
    }


def _events(directory: RunDirectory, kind: str) -> list[Record]:
    return list(read_jsonl(directory.path / EVENTS, kinds=(kind,)))
