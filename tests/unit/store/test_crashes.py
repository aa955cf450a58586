"""A store that dies at any of its disk operations: a restart sees the old state or the new one, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_ray.config.training import Checkpoint
from hypha_ray.failpoints import hits
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog, check_chain
from hypha_ray.store.restore_point import restart
from tests.support.store_bench import armed, ask

PLACES = [
    ("before_snapshot", 1, False),
    *(("write", hit, False) for hit in range(1, 7)),
    ("after_weights", 1, False),
    ("before_publish", 1, False),
    ("before_record", 1, False),
    ("before_link", 1, False),
    ("after_record", 1, True),
]
"""Each with whether the round is committed by then; the sixth write is that of the record."""

COMMIT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.store_bench import ask
from hypha_ray.config.training import Checkpoint
from hypha_ray.failpoints import arm
from hypha_ray.store.commit_writer import CommitWriter
arm([sys.argv[4]], sys.argv[3])
ask(CommitWriter(Path(sys.argv[2]), Checkpoint(), 9), 1, 2)
"""


def store(directory: Path) -> CommitWriter:
    return CommitWriter(directory, Checkpoint(), 9)


def old_or_new(directory: Path, committed: bool) -> None:
    """What a restart sees; then a store that is asked again brings it to an end."""
    past = restart(directory)
    assert past is not None and past.next_round == 1 + committed
    assert past.state == {"seed": 1 + committed} and past.skipped == ()
    assert ask(store(directory), 1, 2).problem is None
    past = restart(directory)
    assert past is not None and past.next_round == 2 and past.state == {"seed": 2}
    check_chain(CommitLog(directory).read())
    assert [path.name for path in directory.glob("*/*") if path.suffix == ".tmp"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("point", "hit", "committed"), PLACES)
def test_store_killed_at_a_disk_operation_leaves_old_or_new(
    tmp_path: Path, point: str, hit: int, committed: bool
) -> None:
    ask(store(tmp_path / "run"), 0, 1)
    log, spec = tmp_path / "hits.jsonl", f"store.{point}=kill@{hit}"
    command = [sys.executable, "-c", COMMIT, str(Path(__file__).parents[3]), str(tmp_path / "run"), str(log), spec]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert hits(log, f"store.{point}") == 1
    old_or_new(tmp_path / "run", committed)


@pytest.mark.parametrize(("point", "hit", "committed"), PLACES)
def test_store_that_fails_unexpectedly_leaves_old_or_new(tmp_path: Path, point: str, hit: int, committed: bool) -> None:
    ask(store(tmp_path / "run"), 0, 1)
    with armed(tmp_path / "hits", f"store.{point}=error@{hit}"), pytest.raises(RuntimeError, match="a failpoint"):
        ask(store(tmp_path / "run"), 1, 2)
    old_or_new(tmp_path / "run", committed)


@pytest.mark.parametrize(("point", "hit", "committed"), PLACES)
def test_store_asked_again_after_an_unexpected_failure_completes_the_round(
    tmp_path: Path, point: str, hit: int, committed: bool
) -> None:
    same = store(tmp_path / "run")
    ask(same, 0, 1)
    with armed(tmp_path / "hits", f"store.{point}=error@{hit}"), pytest.raises(RuntimeError, match="a failpoint"):
        ask(same, 1, 2)
    assert ask(same, 1, 2).problem is None and ask(same, 2, 3).problem is None
    past = restart(tmp_path / "run")
    assert past is not None and past.next_round == 3 and past.skipped == ()
