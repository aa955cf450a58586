"""The environment of every test and of the processes that it starts, set before anything reads it; and a corpus."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from hypha_ray.driver.credentials import make_token
from tests.support.gap_filling import GapFilling, give_way
from tests.support.long_tests import long_tests

os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_raylet_start_wait_time_s="120",  # By default 10, three times: too little on a machine with much else to do.
    RAY_enable_pipe_based_agent_to_parent_health_check="1",  # Forks have another parent.
    REPORTER_UPDATE_INTERVAL_MS="60000",  # Nobody reads each node's use of processors, which costs 1 % of one.
    RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="0",  # What runs on a head that ends isn't waited for.
    RAY_worker_niceness="0",  # By default workers give way to all else, other tests among it, and run late.
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MPLBACKEND="Agg",
)

settings.load_profile("ci")  # The same examples wherever the suite runs; `--hypothesis-profile default` tries new ones.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-seeds", action="store_true", help="crash at every point in every round, with three seeds")
    parser.addoption("--short", action="store_true", help="leave out tests and cases that are marked `long`")


def pytest_configure(config: pytest.Config) -> None:
    """Make Ray's token before there are several processes that test; one of these gives way to the others."""
    if not hasattr(config, "workerinput"):
        make_token()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has it ignored by what it starts in the background, and then by all processes of that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    give_way()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect, and keep the rewritten asserts of all files: they take each process seconds, the next time too.

    Libraries, tests and their files stay to the end: no search for garbage goes through them, now or later.
    """
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = False
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests out of a short run."""
    if config.getoption("--short"):
        left_out = set(long_tests(items))
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Distribute files so that one process fills the gaps of the others."""
    return GapFilling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level language data from the standard library's source: 1 500 training samples of 32 tokens in 15 slices."""
    from tests.support.prepared import prepared

    out = tmp_path_factory.mktemp("data") / "corpus"
    prepared("stdlib", out, seq_len=32, samples_per_slice=100, validation_samples=64, max_samples=1500)
    return out
