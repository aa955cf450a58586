"""The store with one defect each."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from hypha_ray.store import commit_writer, commits, disk, restore_point, snapshots
from tests.support.mutation import (
    Defect,
    attribute,
    call,
    caught,
    condition,
    drop,
    mutated,
    operation,
    statement,
    value,
)

MUTANTS = {
    "a repetition isn't compared": Defect("store.commit_writer", "_compare", operation("!=", "False")),
    "a repetition is taken for a new round": Defect(
        "store.commit_writer", "CommitWriter.commit", attribute("_newest", "0", 1)
    ),
    "a repetition trusts a damaged snapshot": Defect(
        "store.commit_writer", "CommitWriter._is_due", call("_is_good", "self._log.path({0}).exists()")
    ),
    "a round that the disk refused is forgotten": Defect(
        "store.commit_writer", "CommitWriter._queue_record", drop("append")
    ),
    "waiting records are written newest first": Defect(
        "store.commit_writer",
        "CommitWriter._write_backlog",
        statement(
            "while",
            "while self._backlog:\n    self._log.append(self._backlog[-1])\n"
            "    self._written = self._backlog[-1].round + 1\n    del self._backlog[-1]",
        ),
    ),
    "of the waiting records one is written": Defect(
        "store.commit_writer", "CommitWriter._write_backlog", statement("delete", "{}\nbreak")
    ),
    "snapshots go while the disk refuses": Defect(
        "store.commit_writer",
        "CommitWriter._save_records",
        statement("if", "prune(self._directory, commit.round)\n{}", 2),
    ),
    "refusals aren't counted": Defect("store.commit_writer", "CommitWriter._count_failure", drop("_failures")),
    "refusals of long ago count": Defect("store.commit_writer", "CommitWriter._save_records", drop("_failures")),
    "a refused snapshot isn't tried again": Defect(
        "store.commit_writer", "CommitWriter._is_due", operation("or", "{0}", 3)
    ),
    "a run without a snapshot has records": Defect(
        "store.commit_writer", "CommitWriter._save_records", operation("or", "True", 1)
    ),
    "waiting records go before the first snapshot": Defect(
        "store.commit_writer", "CommitWriter._save_snapshot", condition("True", 1)
    ),
    "the first snapshot isn't at once": Defect(
        "store.commit_writer", "CommitWriter._is_due", operation("in", "{0} == {1.1}")
    ),
    "pruning counts snapshots of nobody": Defect(
        "store.commit_writer", "CommitWriter._save_records", call("_good_rounds", "rounds(self._directory)")
    ),
    "pruning keeps one": Defect("store.commit_writer", "CommitWriter._prune", attribute("keep", "1")),
    "pruning removes the oldest that it keeps": Defect("store.snapshots", "prune", operation("<", "{0} <= {1}")),
    "a gap is bridged": Defect("store.commit_writer", "CommitWriter._require_next", operation(">", "False")),
    "a record is there before it should": Defect(
        "store.commits", "CommitLog._write", statement("failpoint", "path.hardlink_to(temporary)\n{}\npath.unlink()")
    ),
    "rewinding sets one record aside": Defect("store.commits", "CommitLog.set_aside", call("reversed", "{0}[-1:]")),
    "rewinding leaves the next round": Defect("store.commits", "CommitLog.set_aside", operation(">=", "{0} > {1}")),
    "a refused snapshot's files stay": Defect("store.snapshots", "write_snapshot", drop("_clear", 2)),
    "a snapshot replaces none": Defect("store.snapshots", "write_snapshot", drop("_clear", 1)),
    "hashes aren't compared": Defect("store.snapshots", "_verify_files", operation("!=", "False")),
    "workers' files aren't checked": Defect("store.snapshots", "_verify_files", call("items", "[*{}][:2]")),
    "the weights of another commit will do": Defect(
        "store.restore_point", "_require_agreement", operation("!=", "not {}")
    ),
    "a run that could hardly begin is lost": Defect("store.restore_point", "restart", operation("or", "{0}")),
    "the oldest snapshot is used": Defect("store.restore_point", "_newest_usable", call("reversed", "{0}")),
    "momentum is taken from the weights": Defect(
        "store.restore_point", "_restore_point", value("outer", "{0}.tensors")
    ),
    "the scheduler's state is lost": Defect(
        "store.restore_point", "_restore_point", call("get", "snapshot.state.get('nothing', {1})")
    ),
    "samples of the oldest epoch are unused": Defect(
        "store.restore_point", "_restore_point", operation(">=", "{0} > {1}")
    ),
    "samples of rewound rounds are used": Defect(
        "store.restore_point", "_newest_usable", call("_restore_point", "_restore_point({0}, {1.0}, {2}, {3})")
    ),
    "the last round is trained again": Defect("store.restore_point", "_restore_point", operation("+", "{0}")),
    "nothing is rewound": Defect("store.restore_point", "RestorePoint.rewind", drop("set_aside")),
    "a damaged newest record ends the run": Defect("store.restore_point", "_read_chain", caught("KeyError")),
    "nobody says what was passed over": Defect("store.restore_point", "_newest_usable", value("=", "[]", 5)),
    "leftovers stay": Defect("store.disk", "sweep", drop("unlink")),
}


@cache
def mutant(name: str) -> Any:
    """The store with that defect."""
    modules = [disk, snapshots, commits, restore_point, commit_writer]
    point, writer = mutated(modules, name, MUTANTS)[-2:]
    return SimpleNamespace(CommitWriter=writer.CommitWriter, restart=point.restart)
