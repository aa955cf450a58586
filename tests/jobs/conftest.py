"""Fixtures that run job scripts, and a cluster for them to join."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked_workers import workers_are_forked
from tests.support.head_node import head_node
from tests.support.job_scripts import Jobs, jobs_in

__all__ = ["workers_are_forked"]


@pytest.fixture
def run_job(tmp_path: Path, head: str) -> Iterator[Jobs]:
    """`run_job(*arguments, script="diloco", env={})` runs a job script; `run_job.home` is where its runs go."""
    with jobs_in(tmp_path / "home", address=head) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def run_shared_job(tmp_path_factory: pytest.TempPathFactory, head: str) -> Iterator[Jobs]:
    """The same for runs that several tests look at."""
    with jobs_in(tmp_path_factory.mktemp("home"), address=head) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def problems(run_shared_job: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts such as "83=" with the answer "38", as a prepared dataset."""
    folder = tmp_path_factory.mktemp("data") / "sort2"
    words = ("--source", "problems:sort2", "--tokenizer", "characters", "--out", folder)
    done = run_shared_job(*words, script="prepare")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="package")
def head() -> Iterator[str]:
    """The address of a running cluster for all files of this folder, see `head_node`.

    A file that changes what others see of it has a cluster of its own.
    """
    with head_node() as address:
        yield address


@pytest.fixture(scope="session")
def small_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file: a language model of 33 000 parameters, three rounds of a moment each, two workers."""
    file = tmp_path_factory.mktemp("files") / "small.toml"
    file.write_text(SMALL)
    return file


SMALL = """
[model.config]
model_type = "llama"
vocab_size = 384
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true
bos_token_id = 1
eos_token_id = 1
pad_token_id = 0

[rounds]
update_rounds = 3
samples_between_updates = 64
max_batch_size = 4

[inner_optimizer]
learning_rate = 3e-3

[resources]
num_workers = 2
"""
