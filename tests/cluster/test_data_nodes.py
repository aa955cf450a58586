"""Datasets that aren't on the head: data nodes, which jobs outlive and leave as they are, and URLs with their cache."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import ray
from ray._private.internal_api import node_stats
from ray._private.state import actors

from hypha_ray.config import Job
from hypha_ray.config.entry_point import Phases
from hypha_ray.config.load import parse, resolved_toml
from hypha_ray.config.training import Dataset
from hypha_ray.data.catalogue import load
from hypha_ray.data.mixture import RunDataset
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.storage import Place
from hypha_ray.driver.cluster_offers import prepare_on_nodes, problems, serve, served, withdraw
from hypha_ray.driver.data_source import opened, run_copy
from hypha_ray.driver.launch import dry_run
from hypha_ray.driver.launch import run_job as run_loaded
from hypha_ray.driver.run_folders import find_run
from hypha_ray.errors import ClusterError, ConfigError, DataError
from hypha_ray.market.cluster import lease_entries
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import read_json, read_jsonl
from hypha_ray.types import SLICES_PER_PART, dataset_of
from tests.support.clusters import cluster_of
from tests.support.faults import events
from tests.support.jobs import Outcome, job_of, run_job
from tests.support.prepared import prepared
from tests.support.web import web_of

ROUNDS = {"update_rounds": 12, "samples_between_updates": 400, "max_batch_size": 8}
"""Three epochs of the corpus, and a little more."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder that all processes have as HYPHA_RAY_HOME."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HYPHA_RAY_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def nodes(home: Path) -> Iterator[list[str]]:
    """Ids of a head, two nodes for a worker each, and two machines without CPUs that have data."""
    with cluster_of([{"num_cpus": 1}] * 2 + [{"num_cpus": 0, "labels": {"site": "a"}}] * 2) as cluster:
        cpus = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes()}
        others = sorted((node.node_id for node in cluster.worker_nodes), key=lambda node: -cpus[node])
        yield [cluster.head_node.node_id, *others]


@pytest.fixture(autouse=True)
def withdrawn(nodes: list[str]) -> Iterator[None]:
    """No data node stays."""
    yield
    for name in served():
        withdraw(name, None)


def named_job(name: str, dataset: str, rounds: dict[str, int] = ROUNDS) -> Job:
    job = job_of(name, Path("none"), rounds=rounds)
    return job.model_copy(update={"dataset": job.dataset.model_copy(update={"path": None, "name": dataset})})


def every_sample_was_used_once(run: Outcome, corpus: Path) -> bool:
    """Whether each of the first three epochs is complete, and nothing is twice."""
    used, train = run.used(), load(corpus).of("train")
    whole = {(epoch, info.index, n) for epoch in range(3) for info in train for n in range(info.samples)}
    return set(used.values()) == {1} and whole <= set(used)


def bytes_in_store(node: str) -> int:
    """Bytes of all objects in the object store of a node, as its raylet tells them."""
    (found,) = (row for row in ray.nodes() if row["NodeID"] == node)
    told = node_stats(found["NodeManagerAddress"], found["NodeManagerPort"], include_memory_info=False)
    return int(told.store_stats.object_store_bytes_used)


def pid(data_node: str) -> int:
    return int(ray.get(ray.get_actor(data_node, namespace="hypha_ray").ping.remote()))


def test_job_reads_from_a_data_node_that_is_killed_and_that_outlives_it(
    nodes: list[str], corpus: Path, tmp_path: Path
) -> None:
    replica = serve(str(corpus), "demo", nodes[3])
    killed: list[int] = []

    def kill(record: dict[str, Any]) -> None:
        if record["kind"] == "round" and record["round"] == 2:
            killed.append(pid(replica.name))
            os.kill(killed[0], signal.SIGKILL)

    run = run_job(named_job("far", "demo"), tmp_path, corpus, seen=kill, place=Place("demo", served=True))
    assert killed and every_sample_was_used_once(run, corpus)
    sources = [record["bytes_from"] for record in run.of_kind("round") if "bytes_from" in record]
    assert {name for counted in sources for name in counted} == {replica.name}
    assert (
        sum(sum(counted.values()) for counted in sources) >= load(corpus).samples("train") * load(corpus).sample_bytes
    )
    places = {actor["Name"]: actor["Address"]["NodeID"] for actor in actors().values()}
    assert places[replica.name] == nodes[3] and "shard-0" not in places
    found, lost = served()["demo"]
    assert [one.name for one in found] == [replica.name] and not lost
    assert found[0].readers == () or found[0].readers == ("far",)
    assert pid(replica.name) != killed[0]


def test_slices_of_a_data_node_never_lie_in_the_store_of_the_head(nodes: list[str], tmp_path: Path) -> None:
    """Slices are too large to travel within a message."""
    out = tmp_path / "large"
    sizes = {"samples_per_slice": 8192, "max_samples": 3 * 8192, "validation_samples": 64}
    manifest = prepared("stdlib", out, seq_len=32, **sizes)
    slice_bytes = min(info.samples for info in manifest.of("train")) * manifest.sample_bytes
    serve(str(out), "large", nodes[3])
    used = {node: [bytes_in_store(node)] for node in nodes}

    def look(record: dict[str, Any]) -> None:
        for node in nodes:
            used[node].append(bytes_in_store(node))

    rounds = {"update_rounds": 3, "samples_between_updates": 64, "max_batch_size": 4}
    run_job(named_job("stores", "large", rounds), tmp_path, out, seen=look, place=Place("large", served=True))
    grown = {node: max(found) - found[0] for node, found in used.items()}
    assert slice_bytes > 200_000
    assert max(grown[node] for node in nodes[1:3]) >= slice_bytes
    assert grown[nodes[0]] < slice_bytes


@pytest.mark.long
def test_damage_on_one_replica_is_read_from_the_other_and_nothing_is_set_aside(
    nodes: list[str], corpus: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(corpus, tmp_path / "damaged")
    near, far = [serve(str(damaged), "twice", node) for node in nodes[1:3]], serve(str(corpus), "twice", nodes[3])
    file = damaged / load(corpus).of("train")[3].file
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    run = run_job(named_job("both", "twice"), tmp_path, corpus, place=Place("twice", served=True))
    assert every_sample_was_used_once(run, corpus) and not events(run, "quarantine")
    texts = [event["text"] for event in events(run, "problem")]
    assert any(one.name in text and file.name in text for text in texts for one in near)
    assert not any(far.name in text for text in texts)
    found = problems([near[0], far])
    assert len(found[near[0].name]) == 1 and file.name in found[near[0].name][0] and found[far.name] == []


def test_job_goes_on_with_another_replica_when_one_is_withdrawn(nodes: list[str], corpus: Path, tmp_path: Path) -> None:
    replicas = [serve(str(corpus), "pair", node) for node in nodes[3:]]

    def end(record: dict[str, Any]) -> None:
        if record["kind"] == "round" and record["round"] == 2:
            assert withdraw("pair", nodes[3]) == [replicas[0].name]

    run = run_job(named_job("pair", "pair"), tmp_path, corpus, seen=end, place=Place("pair", served=True))
    assert every_sample_was_used_once(run, corpus)
    assert [one.name for one in served()["pair"][0]] == [replicas[1].name]


def test_dataset_that_is_only_served_trains_and_exports_with_its_tokenizer(
    nodes: list[str], corpus: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    folder = shutil.copytree(corpus, tmp_path / "elsewhere")
    serve(str(folder), "only", nodes[4])
    prefer = opened(Dataset(name="only", locality="prefer"))
    with pytest.raises(ConfigError, match=r"CFG011.*every place of 'only' has all of its slices"), prefer:
        pass
    rounds = {"update_rounds": 2, "samples_between_updates": 64, "max_batch_size": 4}
    file = tmp_path / "job.toml"
    job = named_job("only", "only", rounds)
    file.write_text(resolved_toml(job))
    dry_run(parse(["@", str(file), "--dry-run"], None, find_run), Phases())
    run_loaded(parse(["@", str(file)], None, find_run), "diloco")
    directory = RunDirectory(home / "only")
    assert (directory.path / "model" / "tokenizer_config.json").is_file()
    withdraw("only", None)
    shutil.rmtree(folder)
    assert run_copy(job.dataset, directory).manifest.identity == load(corpus).identity
    shutil.rmtree(directory.path / "model")
    run_loaded(parse(["@", str(file)], None, find_run), "diloco")
    assert (directory.path / "model" / "tokenizer_config.json").is_file()


def test_serve_refuses_other_samples_under_a_name_and_a_second_time_on_a_node(
    nodes: list[str], corpus: Path, tmp_path: Path
) -> None:
    first = serve(str(corpus), "one", nodes[3])
    with pytest.raises(ConfigError, match="DATA042"):
        serve(str(corpus), "one", nodes[3])
    other = shutil.copytree(corpus, tmp_path / "other")
    (other / "manifest.json").unlink()
    (other / load(corpus).slices[0].file).unlink()
    with pytest.raises(DataError, match="DATA040") as caught:
        serve(str(other), "one", nodes[4])
    assert nodes[3][:8] in str(caught.value) and nodes[4][:8] in str(caught.value)
    assert [one.name for one in served()["one"][0]] == [first.name]
    with pytest.raises(DataError, match=r"DATA001.*did you mean 'one'"):
        withdraw("onne", None)
    with pytest.raises(DataError, match="DATA001"):
        serve(str(tmp_path / "missing"), "missing", nodes[4])
    assert "missing" not in served()


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset like the corpus, with the same name and other samples."""
    out = tmp_path_factory.mktemp("others") / "corpus"
    prepared("stdlib", out, seq_len=32, samples_per_slice=100, validation_samples=64, max_samples=1500, seed=7)
    return out


def overwrite(folder: Path, source: Path) -> None:
    """Put a dataset into the place of another one, file by file, as `rsync` does."""
    for file in (file for file in source.rglob("*") if file.is_file()):
        fresh = folder / file.relative_to(source).with_suffix(".new")
        shutil.copy(file, fresh)
        fresh.replace(folder / file.relative_to(source))


def patient(job: Job, max_idle_s: float) -> Job:
    return job.model_copy(update={"resources": job.resources.model_copy(update={"max_idle_s": max_idle_s})})


def in_round(number: int, act: Callable[[], object]) -> Callable[[dict[str, Any]], None]:
    """Act once, when a round has ended."""
    left = [act]

    def see(record: dict[str, Any]) -> None:
        if record["kind"] == "round" and record["round"] == number and left:
            left.pop()()

    return see


@pytest.mark.long
def test_data_node_whose_folder_was_prepared_anew_is_not_read_until_the_samples_are_back(
    nodes: list[str], corpus: Path, others: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(corpus, tmp_path / "served")
    replica, news = serve(str(folder), "anew", nodes[3]), list[str]()

    def change() -> None:
        overwrite(folder, others)
        os.kill(pid(replica.name), signal.SIGKILL)

    overwritten = in_round(2, change)

    def see(record: dict[str, Any]) -> None:
        overwritten(record)
        if record["kind"] == "news" and "other samples now" in record["text"] and not news:
            news.append(record["text"])
            overwrite(folder, corpus)

    job = patient(named_job("anew", "anew"), 60.0)
    run = run_job(job, tmp_path, corpus, seen=see, place=Place("anew", served=True))
    assert every_sample_was_used_once(run, corpus)
    assert news and "another one is read from" not in news[0]


@pytest.mark.long
def test_scheduler_that_follows_refuses_other_samples_under_the_name(
    nodes: list[str], corpus: Path, others: Path, tmp_path: Path
) -> None:
    serve(str(corpus), "next", nodes[3])

    def change() -> None:
        withdraw("next", None)
        serve(str(others), "next", nodes[3])
        os.kill(ray.get(ray.get_actor("scheduler", namespace="next").ping.remote()), signal.SIGKILL)

    job, began = patient(named_job("next", "next"), 4.0), load(corpus).identity
    with pytest.raises(DataError, match=rf"DATA046.*other samples now.*{load(others).identity[:12]}.*{began[:12]}"):
        run_job(job, tmp_path, corpus, seen=in_round(2, change), place=Place("next", served=True))
    commits = Outcome(tmp_path / "next", []).commits()
    assert len(commits) <= 5, "rounds that were under way"
    assert RunDataset.parse(read_json(tmp_path / "next" / "dataset.json")).sha256 == began


def test_folder_of_a_job_that_was_prepared_anew_ends_the_run_after_its_patience(
    nodes: list[str], corpus: Path, others: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(corpus, tmp_path / "own")

    def change() -> None:
        overwrite(folder, others)
        os.kill(ray.get(ray.get_actor("shard-0", namespace="own").ping.remote()), signal.SIGKILL)

    job = patient(job_of("own", folder, rounds=ROUNDS), 4.0)
    with pytest.raises(DataError, match=r"DATA046.*'corpus' has other samples now"):
        run_job(job, tmp_path, folder, seen=in_round(2, change))
    lines = read_jsonl(tmp_path / "own" / "events.jsonl", ["problem"])
    assert sum("other samples now" in line["text"] for line in lines) == 1
    assert len(Outcome(tmp_path / "own", []).commits()) <= 6


@pytest.mark.long
def test_data_nodes_that_come_back_are_read_from_again(nodes: list[str], corpus: Path, tmp_path: Path) -> None:
    """First one comes back, while the other serves; then the other is withdrawn for good."""
    first, second = (serve(str(corpus), "back", node) for node in nodes[3:])

    def again() -> None:
        withdraw("back", nodes[3])
        serve(str(corpus), "back", nodes[3])

    back, gone = in_round(1, again), in_round(4, lambda: withdraw("back", nodes[4]))

    def see(record: dict[str, Any]) -> None:
        back(record)
        gone(record)

    job = patient(named_job("back", "back"), 20.0)
    run = run_job(job, tmp_path, corpus, seen=see, place=Place("back", served=True))
    assert every_sample_was_used_once(run, corpus)
    late = [record["bytes_from"] for record in run.of_kind("round") if record["round"] > 6 and "bytes_from" in record]
    assert late and {name for counted in late for name in counted} == {first.name}
    assert second.name not in {one.name for one in served()["back"][0]}


def test_only_data_node_that_is_served_again_is_read_from_again(nodes: list[str], corpus: Path, tmp_path: Path) -> None:
    serve(str(corpus), "alone", nodes[3])

    def again() -> None:
        withdraw("alone", nodes[3])
        serve(str(corpus), "alone", nodes[3])

    job = patient(named_job("alone", "alone"), 20.0)
    run = run_job(job, tmp_path, corpus, seen=in_round(2, again), place=Place("alone", served=True))
    assert every_sample_was_used_once(run, corpus)


@pytest.mark.parametrize(
    ("cache_gb", "most_bytes"),
    [(1.0, 10**9), (0.00006, 60_000), (0.000001, 0)],
    ids=["all slices", "two slices", "less than a slice"],
)
@pytest.mark.long(keep=1)
def test_slices_of_a_url_are_fetched_once_in_three_epochs_if_the_cache_is_large_enough(
    nodes: list[str], corpus: Path, tmp_path: Path, home: Path, cache_gb: float, most_bytes: int
) -> None:
    shutil.rmtree(home / "cache", ignore_errors=True)
    (home / "cache" / "ab").mkdir(parents=True)
    (home / "cache" / "ab" / "notes").write_text("of another program")
    job = job_of("web", corpus, rounds=ROUNDS)
    with web_of(corpus) as web:
        dataset = job.dataset.model_copy(update={"path": web.url, "cache_gb": cache_gb})
        run = run_job(job.model_copy(update={"dataset": dataset}), tmp_path, corpus, place=Place(web.url))
        fetched = {name: count for name, count in web.fetched.items() if name.endswith(".safetensors")}
    assert every_sample_was_used_once(run, corpus)
    kept = [path for path in (home / "cache").rglob("*") if path.is_file() and path.name != "notes"]
    assert sum(path.stat().st_size for path in kept) <= most_bytes
    assert (home / "cache" / "ab" / "notes").read_text() == "of another program"
    notes = [event["text"] for event in events(run, "problem")]
    if most_bytes == 10**9:
        assert set(fetched) == {info.file for info in load(corpus).slices} and set(fetched.values()) == {1}
        assert not notes
        waits = [record["data_wait_fraction"] for record in run.of_kind("round")[1:]]
        # Batches take 11 ms here, of which taking one that is ready is a hundredth.
        assert median(waits) <= 0.05
    else:
        assert len(notes) == (1 if most_bytes == 0 else 0) or all("larger than" in note for note in notes)
        assert bool(kept) == (most_bytes > 0)


def test_mixture_of_a_data_node_a_url_and_a_folder_has_exact_shares_through_a_kill_and_a_resumption(
    nodes: list[str], corpus: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    serve(str(corpus), "part", nodes[3])
    file = tmp_path / "job.toml"
    rounds = {"update_rounds": 6, "samples_between_updates": 160, "max_batch_size": 10}
    job = job_of("mix", corpus, rounds=rounds).model_copy(update={"dataset": Dataset()})
    with web_of(corpus) as web:
        mix = [("name", "part", 0.5), ("path", web.url, 0.3), ("path", str(corpus), 0.2)]
        tables = "".join(f'[[dataset.mix]]\n{key} = "{place}"\nweight = {weight}\n' for key, place, weight in mix)
        file.write_text(resolved_toml(job).replace("[dataset]", f"{tables}[dataset]"))
        killer = ("--testing.failpoints", "worker.step:0=kill@9", "--testing.failpoint_log", str(tmp_path / "fired"))
        run_loaded(parse(["@", str(file), *killer], None, find_run), "diloco")
        more = ("--rounds.update_rounds", "9")
        run_loaded(parse(["@", str(file), "--resume", "mix", *more], None, find_run), "diloco")
    run = Outcome(home / "mix", [])
    assert (tmp_path / "fired").read_text()
    assert len(run.commits()) == 9 and set(run.used().values()) == {1}
    shares = Counter(dataset_of(index) for _, index, _ in run.used())
    for number, (_, _, weight) in enumerate(mix):
        assert abs(shares[number] - weight * sum(shares.values())) <= 10, "one batch"
    assert (home / "mix" / "model" / "tokenizer_config.json").is_file()


def test_preparation_in_parts_that_loses_a_process_asks_to_try_again(nodes: list[str], tmp_path: Path) -> None:
    def kill_first() -> None:
        at_work: list[psutil.Process] = []
        while not at_work:
            time.sleep(0.05)
            running = list(psutil.process_iter(["name"]))  # Of those that end meanwhile it says nothing.
            at_work = [process for process in running if (process.info["name"] or "").startswith("ray::_prepare")]
        at_work[0].kill()

    killer = threading.Thread(target=kill_first)
    killer.start()
    with pytest.raises(ClusterError, match=r"NET014.*isn't prepared") as caught:
        prepare_on_nodes(PrepareOptions("stdlib", str(tmp_path / "lost"), seq_len=32, nodes=2))
    killer.join()
    assert caught.value.exit_code == 75
    assert "lost" not in served()


def test_dataset_in_parts_on_two_nodes_is_one_dataset_and_a_missing_part_is_named(
    nodes: list[str], tmp_path: Path
) -> None:
    options = PrepareOptions(
        "stdlib", str(tmp_path / "parts"), seq_len=32, samples_per_slice=100, max_documents=40, nodes=2
    )
    replicas = prepare_on_nodes(options)
    assert {one.node_id for one in replicas} == set(nodes[1:3])
    assert all(one.name.startswith("data/parts/") for one in replicas)
    assert [one.manifest.part for one in replicas] == [(0, 2), (1, 2)]
    rounds = {"update_rounds": 4, "samples_between_updates": 200, "max_batch_size": 8}
    source = tmp_path / "parts" / "part-0"
    run = run_job(named_job("parts", "parts", rounds), tmp_path, source, place=Place("parts", served=True))
    assert set(run.used().values()) == {1} and len(run.commits()) == 4
    assert {index // SLICES_PER_PART for _, index, _ in run.used()} == {0, 1}
    near = named_job("near", "parts", {"update_rounds": 2, "samples_between_updates": 80, "max_batch_size": 8})
    near = near.model_copy(update={"dataset": near.dataset.model_copy(update={"locality": "prefer"})})
    near = near.model_copy(update={"resources": near.resources.model_copy(update={"num_workers": 1})})
    on = set[str | None]()

    def look(record: dict[str, Any]) -> None:
        on.update(entry.node for entry in lease_entries("near") if entry.name == "worker-0")

    run = run_job(near, tmp_path, source, seen=look, place=Place("parts", served=True))
    (own,) = [one.manifest.part for one in replicas if one.node_id in on]
    assert own is not None and {index // SLICES_PER_PART for _, index, _ in run.used()} == {own[0]}
    withdraw("parts", nodes[1])
    missing = next(one for one in replicas if one.node_id == nodes[1]).manifest.part
    assert missing is not None
    with pytest.raises(DataError, match=rf"DATA045.*no part {missing[0]}/2"):
        run_job(named_job("less", "parts", rounds), tmp_path, source, place=Place("parts", served=True))
