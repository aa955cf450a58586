"""One local Ray for each module, and a small corpus to train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray with four logical CPUs, so that small jobs fit beside each other whatever the machine has."""
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=300_000_000,
        include_dashboard=False,
        log_to_driver=False,
        namespace="tests",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level language data from the standard library's source: 1 500 training samples of 32 tokens."""
    from hypha_ray.data.options import Options
    from hypha_ray.data.prepare import prepare

    out = tmp_path_factory.mktemp("data") / "corpus"
    options = Options("stdlib", out, seq_len=32, samples_per_slice=100, validation_samples=64, max_samples=1500)
    prepare(options, lambda what, count: None)
    return out
