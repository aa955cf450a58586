"""What a user can get wrong: one line that says what and how to mend it, the right exit code, and nothing left over."""

from __future__ import annotations

import pickle
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import get_node_ip_address, list_named_actors
from ray.util.placement_group import placement_group_table
from safetensors.numpy import load_file, save_file

from hypha_ray.config.schema import Model
from hypha_ray.data.catalogue import load
from hypha_ray.model.build import build_model
from hypha_ray.scheduler.epoch import Epoch
from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.job_scripts import Done, Jobs
from tests.support.prepared import prepared

RAY_LOG = re.compile(r"\[[\d: ,-]+ [WE] \d+ \d+\] \w+\.(cc|h):\d+: ")
"""How lines begin that Ray's core writes to standard error by itself."""


def error_of(done: Done) -> str:
    """The one line that a failed job wrote to standard error."""
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if not RAY_LOG.match(line)]
    assert re.match(r"error\[[A-Z]+\d{3}\]: .+ Fix: .+", line), line
    return line


def refused(done: Done, home: Path, exit_code: int) -> str:
    """The error of a job that started nothing."""
    error = error_of(done)
    assert (done.returncode, done.stdout) == (exit_code, ""), error
    assert not home.exists()
    return error


@pytest.fixture
def broken(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the dataset, to be spoiled."""
    return Path(shutil.copytree(corpus, tmp_path / "broken"))


def last_slice(dataset: Path) -> Path:
    """The file that comes last in the first epoch's order, so that rounds go by before it is read."""
    files = {info.index: info for info in load(dataset).of("train")}
    order = Epoch(0, {index: info.samples for index, info in files.items()}, seed=0).next_slices(10**9)
    return dataset / files[order[-1][0]].file


# ── the job file and the command line: without a library in test_early_refusals.py ───────────────────────────────


def test_dataset_of_prompts_is_refused_by_jobs_that_need_a_loss(run_job: Jobs, small_job: Path, tmp_path: Path) -> None:
    prepared("problems:sort2", tmp_path / "sort2", max_documents=200)
    error = refused(run_job("@", small_job, "--dataset.path", tmp_path / "sort2"), run_job.home, 3)
    assert error.startswith("error[DATA035]: dataset 'sort2' has prompts, which have no loss — got prompts")


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_setting_that_only_the_model_forbids_is_refused_before_a_cluster_is_looked_for(
    run_job: Jobs, small_job: Path, corpus: Path, flags: tuple[str, ...]
) -> None:
    arguments = ("@", small_job, "--dataset.path", corpus, "--sync.fragments", "1000", *flags)
    done = run_job(*arguments, env={"RAY_ADDRESS": "127.0.0.1:1"})
    error = error_of(done)
    assert done.returncode == 2 and error.startswith("error[MODEL009]: ") and "got 1000, allowed 1 to " in error
    assert not run_job.home.exists()


# ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tokens_beyond_the_vocabulary_are_refused(run_job: Jobs, small_job: Path, corpus: Path) -> None:
    largest = next(tensor.maximum for tensor in load(corpus).tensors if tensor.name == "input_ids")
    assert largest is not None and largest > 100
    done = run_job("@", small_job, "--dataset.path", corpus, "--model.config.vocab_size", "100")
    error = refused(done, run_job.home, 3)
    assert error.startswith("error[DATA023]: the model's vocabulary is too small for dataset 'corpus'")
    assert f"got input_ids up to {largest}, allowed 0 … 99" in error


def test_images_with_other_channels_than_the_model_are_refused(run_job: Jobs, tmp_path: Path) -> None:
    prepared("digits", tmp_path / "digits")
    arguments = ("--dataset.path", tmp_path / "digits", "--model.config.num_channels", "3")
    error = refused(run_job("@", "jobs/configs/digits.toml", *arguments), run_job.home, 3)
    assert "error[DATA025]: the images of dataset 'digits' don't fit the model — got 1 channels, allowed 3" in error


def test_pickle_under_a_safetensors_name_is_never_opened(run_job: Jobs, small_job: Path, tmp_path: Path) -> None:
    proof, folder = tmp_path / "proof", tmp_path / "bare"
    folder.mkdir()
    (folder / "data.safetensors").write_bytes(pickle.dumps(Trap(proof)))
    error = refused(run_job("@", small_job, "--dataset.path", folder), run_job.home, 3)
    assert error.startswith("error[DATA011]: slice 0 (data.safetensors): not a safetensors file — got a pickle")
    assert not proof.exists() and not (folder / "manifest.json").exists()


class Trap:
    """Its pickle makes a file where it is opened."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._proof,)


def test_slice_with_a_flipped_bit_ends_the_run_when_it_is_read(run_job: Jobs, small_job: Path, broken: Path) -> None:
    spoiled = last_slice(broken)
    content = bytearray(spoiled.read_bytes())
    content[-5] ^= 1
    spoiled.write_bytes(content)
    sizes = ("--rounds.update_rounds", "10", "--rounds.samples_between_updates", "200")
    done = run_job("@", small_job, "--dataset.path", broken, *sizes, "--run.name", "flipped")
    error = error_of(done)
    assert done.returncode == 3, error
    assert error.startswith("error[DATA016]: slice ") and spoiled.name in error
    assert "the sha256 isn't the manifest's" in error
    run = run_job.home / "flipped"
    rounds = read_jsonl(run / "metrics.jsonl", ["round"])
    assert 1 <= len(rounds) < 10 and (run / "commits" / "round_000000.json").exists()
    assert not (run / "model").exists() and "run: " not in done.stdout.splitlines()[-1]


def test_slice_that_is_cut_off_ends_the_run_and_frees_the_cluster(
    run_job: Jobs, small_job: Path, broken: Path, head: str
) -> None:
    spoiled = last_slice(broken)
    spoiled.write_bytes(spoiled.read_bytes()[:40])
    sizes = ("--rounds.update_rounds", "10", "--rounds.samples_between_updates", "200")
    arguments = ("@", small_job, "--dataset.path", broken, *sizes, "--run.name", "cut")
    done = run_job(*arguments)
    error = error_of(done)
    assert done.returncode == 3, error
    assert error.startswith("error[DATA012]: slice ") and f"({spoiled.name}): the file is cut off" in error
    ray.init(address=head, namespace="visitor", log_to_driver=False)
    try:
        whole = ray.remote(num_cpus=4)(get_node_ip_address).remote()
        assert ray.get(whole, timeout=60) == get_node_ip_address(), "the run holds on to its CPUs"
        assert list_named_actors(all_namespaces=True) == []
        assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    finally:
        ray.shutdown()


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_model_repository_that_cannot_be_reached_says_so_and_names_the_cache(
    run_job: Jobs, corpus: Path, tmp_path: Path
) -> None:
    places = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    done = run_job("--model.repository", "owner/nothing", "--dataset.path", corpus, env=places)
    error = refused(done, run_job.home, 75)
    assert error.startswith("error[HUB003]: owner/nothing is neither a local folder nor whole in the cache")
    assert "offline (HF_HUB_OFFLINE is set)" in error and str(tmp_path / "cache") in error


def test_model_folder_with_pickled_weights_only_is_refused(run_job: Jobs, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}')
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    error = refused(run_job("--model.repository", folder, "--dataset.path", corpus), run_job.home, 5)
    assert error.startswith(f"error[SEC003]: model repository {folder} has no safetensors weights")
    assert "got pytorch_model.bin" in error


# ── the cluster ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_more_than_any_node_has_says_which_node_lacks_how_much(run_job: Jobs, small_job: Path, corpus: Path) -> None:
    done = run_job("@", small_job, "--dataset.path", corpus, "--resources.worker.cpu", "100000")
    error = refused(done, run_job.home, 75)
    assert error.startswith("error[CFG004]: the cluster is too small: 100000 CPU per worker is needed; ")
    found = re.search(r"the closest node, (\S+), has (\d+) of its (\d+) left; 1 of 1 short", error)
    assert found is not None and found[1] == get_node_ip_address() and found[2] == found[3] != "100000"


@pytest.mark.parametrize("address", ["127.0.0.1:PORT", "name.invalid:PORT", "nowhere"])
def test_address_that_answers_nobody_is_no_cluster(run_job: Jobs, small_job: Path, corpus: Path, address: str) -> None:
    with socket.socket() as unheard:  # bound, so that nobody else takes the port, but nobody listens
        unheard.bind(("127.0.0.1", 0))
        address = address.replace("PORT", str(unheard.getsockname()[1]))
        done = run_job("@", small_job, "--dataset.path", corpus, env={"RAY_ADDRESS": address})
    error = refused(done, run_job.home, 75)
    assert error.startswith(f"error[NET002]: no Ray cluster at '{address}'") and "unset RAY_ADDRESS" in error


def test_wrong_token_is_refused_and_not_shown(run_job: Jobs, small_job: Path, corpus: Path, head: str) -> None:
    environment = {"RAY_ADDRESS": head, "RAY_AUTH_TOKEN": "wrong" * 8}
    done = run_job("@", small_job, "--dataset.path", corpus, env=environment)
    error = refused(done, run_job.home, 4)
    assert error.startswith(f"error[AUTH001]: Ray at '{head}' did not let us in") and "RAY_AUTH_TOKEN" in error
    assert environment["RAY_AUTH_TOKEN"] not in done.stderr


# ── weights that aren't the model's ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_weights_under_names_of_a_wrapper_are_refused_before_anything_starts(
    run_job: Jobs, corpus: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 64, "vocab_size": 384}
    build_model(Model(config=config), seed=0).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"module.{name}": array for name, array in load_file(file).items()}, file)
    done = run_job("--model.repository", tmp_path, "--dataset.path", corpus, *flags, env={"RAY_ADDRESS": "127.0.0.1:1"})
    error = error_of(done)
    assert done.returncode == 5 and error.startswith("error[MODEL006]: ") and "'module.'" in error
    assert not run_job.home.exists()
