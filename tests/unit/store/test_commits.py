"""The commit log: a chain that no crash leaves half written and no flipped bit changes unseen."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.store.commits import CommitLog, check_chain
from hypha_ray.store.disk import publish_once
from hypha_ray.types import Commit, Contribution, PromptsOfResponder, Rejection, Span


def sha(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def commit(number: int) -> Commit:
    return Commit(
        round=number,
        parent_sha256=sha(number - 1),
        theta_sha256=sha(number),
        outer_sha256=sha(f"outer {number}"),
        deltas=(Contribution(0, 0, 12, 0.1 + number), Contribution(3, 2, 20, 1e-300)),
        spans=((0, (Span(1, 4, 0, 12),)), (3, (Span(1, 5, 0, 15), Span(2, 0, 7, 12)))),
        cursors={4: 12, 5: 15},
        epoch=1,
        ahead={2: {0: 12}},
        rejected=(Rejection(2, "non-finite values in parameters/float32"),),
    )


def log_of(directory: Path, rounds: int) -> CommitLog:
    log = CommitLog(directory)
    for number in range(rounds):
        log.append(commit(number))
    return log


def file_of(directory: Path, number: int) -> Path:
    return directory / "commits" / f"round_{number:06d}.json"


def test_log_append_read_gives_equal_records(tmp_path: Path) -> None:
    log_of(tmp_path, 3)
    again = CommitLog(tmp_path)
    assert again.read() == (commit(0), commit(1), commit(2))
    assert again.newest() == commit(2)
    check_chain(again.read())


def test_record_names_the_prompts_of_each_responder_only_if_there_may_be_others(tmp_path: Path) -> None:
    responders = (
        PromptsOfResponder("generator-0", ((1, 4, 7), (1, 4, 2))),
        PromptsOfResponder("worker-3", ((2, 0, 9),)),
    )
    named = replace(commit(0), responders=responders)
    CommitLog(tmp_path).append(named)

    record = json.loads(file_of(tmp_path, 0).read_text())
    assert record["responders"] == {"generator-0": [[1, 4, 7], [1, 4, 2]], "worker-3": [[2, 0, 9]]}
    assert CommitLog(tmp_path).read() == (named,)
    CommitLog(tmp_path).append(commit(1))
    assert "responders" not in json.loads(file_of(tmp_path, 1).read_text())


def test_log_empty_has_no_newest_and_is_sound(tmp_path: Path) -> None:
    log = CommitLog(tmp_path)
    check_chain(log.read())
    assert log.newest() is None and log.read() == ()


def test_record_file_has_the_fields_of_the_contract(tmp_path: Path) -> None:
    log_of(tmp_path, 1)
    record = json.loads(file_of(tmp_path, 0).read_text())
    assert record["round"] == 0 and record["parent_sha256"] == sha(-1) and record["theta_sha256"] == sha(0)
    assert record["deltas"][0] == {"worker": 0, "incarnation": 0, "samples": 12, "norm": 0.1}
    assert record["cursors"] == {"4": 12, "5": 15} and record["epoch"] == 1 and record["ahead"] == {"2": {"0": 12}}
    assert record["rejected"] == [{"worker": 2, "reason": "non-finite values in parameters/float32"}]
    assert record["spans"] == {"0": [[1, 4, 0, 12]], "3": [[1, 5, 0, 15], [2, 0, 7, 12]]}


@pytest.mark.parametrize(
    ("offered", "complaint"),
    [
        (commit(0), "got round 1, allowed round 3"),
        (replace(commit(1), theta_sha256=sha("other")), "got round 2, allowed round 3"),
        (commit(3), "got round 4, allowed round 3"),
        (replace(commit(2), parent_sha256=sha("other")), f"got parent {sha('other')}, allowed parent {sha(1)}"),
        (replace(commit(2), parent_sha256=None), "got parent None"),
    ],
)
def test_log_append_out_of_the_chain_is_refused_and_changes_nothing(
    tmp_path: Path, offered: Commit, complaint: str
) -> None:
    log = log_of(tmp_path, 2)
    with pytest.raises(CheckpointError, match=complaint):
        log.append(offered)
    assert log.read() == (commit(0), commit(1))


def test_log_append_of_the_newest_record_again_changes_nothing(tmp_path: Path) -> None:
    log = log_of(tmp_path, 2)
    before = file_of(tmp_path, 1).stat()
    log.append(commit(1))
    assert file_of(tmp_path, 1).stat().st_mtime_ns == before.st_mtime_ns and log.read() == (commit(0), commit(1))


def test_log_origin_is_what_the_first_round_begins_with(tmp_path: Path) -> None:
    log = CommitLog(tmp_path)
    assert log.origin() is None
    log.begin(sha("a"))
    log.begin(sha("b"))
    assert CommitLog(tmp_path).origin() == sha("b") and log.read() == ()
    (tmp_path / "origin.json").write_text("{}")
    assert log.origin() is None


def test_log_two_committers_of_a_round_exactly_one_wins(tmp_path: Path) -> None:
    log_of(tmp_path, 1)
    offers = [replace(commit(1), theta_sha256=sha(f"by {number}")) for number in range(8)]
    barrier = Barrier(len(offers))

    def offer(one: Commit) -> str | None:
        log = CommitLog(tmp_path)
        barrier.wait()
        try:
            log.append(one)
        except CheckpointError as error:
            return error.code
        return None

    with ThreadPoolExecutor(len(offers)) as pool:
        outcomes = list(pool.map(offer, offers))
    assert outcomes.count(None) == 1 and set(outcomes) <= {None, "STORE008", "STORE003"}
    assert CommitLog(tmp_path).read() == (commit(0), offers[outcomes.index(None)])
    assert [path.name for path in (tmp_path / "commits").glob("*.tmp")] == []


def test_log_record_that_appears_at_the_last_moment_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, link = log_of(tmp_path, 1), os.link

    def late(source: Path, target: Path, **options: object) -> None:
        file_of(tmp_path, 1).write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(CheckpointError, match="another run writes to") as caught:
        log.append(commit(1))
    assert caught.value.code == "STORE008" and file_of(tmp_path, 1).read_text() == "theirs"


def test_log_without_hard_links_takes_a_rename_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    log = log_of(tmp_path, 2)
    assert log.read() == (commit(0), commit(1))
    source = tmp_path / "new"
    source.write_text("mine")
    with pytest.raises(FileExistsError):
        publish_once(source, file_of(tmp_path, 1))
    assert log.read() == (commit(0), commit(1))


def test_log_set_aside_leaves_the_rounds_before_and_keeps_what_it_moves(tmp_path: Path) -> None:
    log = log_of(tmp_path, 4)
    log.set_aside(2)
    assert log.read() == (commit(0), commit(1))
    log.append(replace(commit(2), theta_sha256=sha("again")))
    log.set_aside(2)
    log.set_aside(2)
    aside = tmp_path / "commits" / "rewound"
    assert sorted(str(path.relative_to(aside)) for path in aside.glob("*/*")) == [
        "1/round_000002.json",
        "1/round_000003.json",
        "2/round_000002.json",
    ]


def test_log_half_written_temporary_of_any_length_is_ignored_and_replaced(tmp_path: Path) -> None:
    log_of(tmp_path / "whole", 2)
    data = file_of(tmp_path / "whole", 1).read_bytes()
    for length in range(0, len(data), 50):
        directory = tmp_path / str(length)
        log_of(directory, 1)
        file_of(directory, 1).with_suffix(".tmp").write_bytes(data[:length])
        log = CommitLog(directory)
        assert log.read() == (commit(0),)
        log.append(commit(1))
        assert log.read() == (commit(0), commit(1))


@pytest.mark.slow
def test_log_truncated_record_is_recognised_at_every_length(tmp_path: Path) -> None:
    log = log_of(tmp_path, 1)
    data = file_of(tmp_path, 0).read_bytes()
    for length in range(len(data)):
        file_of(tmp_path, 0).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            log.read()


@pytest.mark.slow
def test_log_any_flipped_bit_is_recognised(tmp_path: Path) -> None:
    log = log_of(tmp_path, 1)
    data = file_of(tmp_path, 0).read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file_of(tmp_path, 0).write_bytes(flipped)
        with pytest.raises(CheckpointError, match="is damaged"):
            log.newest()


def test_log_missing_record_breaks_the_chain(tmp_path: Path) -> None:
    log = log_of(tmp_path, 3)
    file_of(tmp_path, 1).unlink()
    with pytest.raises(CheckpointError, match="chain breaks at round 2"):
        check_chain(log.read())


def test_log_record_of_another_run_breaks_the_chain(tmp_path: Path) -> None:
    log, other = log_of(tmp_path / "a", 3), CommitLog(tmp_path / "b")
    for number in range(2):
        other.append(replace(commit(number), theta_sha256=sha(f"b{number}"), parent_sha256=sha(f"b{number - 1}")))
    file_of(tmp_path / "b", 1).replace(file_of(tmp_path / "a", 1))
    with pytest.raises(CheckpointError, match="chain breaks at round 2"):
        check_chain(log.read())


def test_log_record_under_a_foreign_number_is_recognised(tmp_path: Path) -> None:
    log = log_of(tmp_path, 2)
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 0).read_bytes())
    with pytest.raises(CheckpointError, match="got the record of round 1, allowed round 2"):
        log.newest()


def test_log_foreign_files_are_ignored(tmp_path: Path) -> None:
    log = log_of(tmp_path, 1)
    for name in ("notes.txt", "round_0.json", "round_000007.json.bak", "round_latest.json"):
        (tmp_path / "commits" / name).write_text("{}")
    assert log.read() == (commit(0),)


def test_log_folder_that_cannot_be_made_asks_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "commits").write_text("a file where a folder should be")
    with pytest.raises(TryAgainError, match=r"round_000000\.json can't be written"):
        CommitLog(tmp_path).append(commit(0))


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hypha_ray.store.commits import CommitLog, check_chain
from tests.unit.store.test_commits import commit
log = CommitLog(Path(sys.argv[2]))
for number in range(100_000):
    log.append(commit(number))
    print(number, flush=True)
"""


@pytest.mark.slow
def test_log_of_a_killed_writer_has_every_round_that_it_acknowledged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parents[3]), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(25):
            acknowledged = int(writer.stdout.readline())
        writer.kill()
    log = CommitLog(tmp_path)
    check_chain(log.read())
    newest = log.newest()
    assert newest is not None and newest.round >= acknowledged == 24
    log.append(commit(newest.round + 1))
