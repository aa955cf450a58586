"""The store with one defect each: its source with one place changed."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hypha_ray.store import commit_writer, commits, disk, restore_point, snapshots, tensorfile

HALF_BEGUN = "if not commits or _is_half_begun(directory, commits):"
NOT_GOOD = ") and not self._is_good(round)"
RECORD = '            failpoint("store.before_link")\n'
EARLY = f"            path.hardlink_to(temporary)\n{RECORD}            path.unlink()\n"
ASIDE = "for round in reversed(rounds):\n                self"
REFUSED = "        if refusal is not None:\n"
FIRST_RECORD = """self._log.append(self._backlog[0])
            self._written = self._backlog[0].round + 1
            del self._backlog[0]"""
ONLY_SOUND = "good = [round for round in rounds(self._directory) if self._is_good(round)]"
SAYS = 'lines = [f"{line}; using round {commit.round}" for line in (*passed, *_without(commits, commit, present))]'

MUTANTS = {
    "a repetition isn't compared": ("if found != commit:", "if False:"),
    "a repetition is taken for a new round": ("if self._newest and outcome", "if 0 and outcome"),
    "a repetition trusts a damaged snapshot": (NOT_GOOD, ") and not self._log.path(round).exists()"),
    "a round that the disk refused is forgotten": ("self._backlog.append(commit)", "pass"),
    "waiting records are written newest first": (FIRST_RECORD, FIRST_RECORD.replace("[0]", "[-1]")),
    "of the waiting records one is written": (FIRST_RECORD, f"{FIRST_RECORD}\n            break"),
    "snapshots go while the disk refuses": (REFUSED, f"        prune(self._directory, commit.round)\n{REFUSED}"),
    "refusals aren't counted": ("self._failures += 1", "pass"),
    "refusals of long ago count": ("        self._failures = 0\n        good", "        good"),
    "a refused snapshot isn't tried again": ("regular or self._failures > 0", "regular"),
    "a run without a snapshot has records": ("if refusal is None or self._written:", "if True:"),
    "waiting records go before the first snapshot": (" " * 12 + "if self._written:", " " * 12 + "if True:"),
    "the first snapshot isn't at once": ("round in (0, self._update_rounds - 1)", "round == self._update_rounds - 1"),
    "pruning counts snapshots of nobody": (ONLY_SOUND, ONLY_SOUND.replace(" if self._is_good(round)", "")),
    "pruning keeps one": ("good[-self._checkpoint.keep :]", "good[-1:]"),
    "pruning removes the oldest that it keeps": ("if round < first and", "if round <= first and"),
    "a gap is bridged": ("if round > due:", "if False:"),
    "a record is there before it should": (RECORD, EARLY),
    "rewinding sets one record aside": (ASIDE, ASIDE.replace("reversed(rounds)", "rounds[-1:]")),
    "rewinding leaves the next round": ("if round >= first]", "if round > first]"),
    "a refused snapshot's files stay": ("Error:\n        _clear(temporary)\n", "Error:\n"),
    "a snapshot replaces none": ("            _clear(path)\n", ""),
    "hashes aren't compared": ("if found != expected:", "if False:"),
    "workers' files aren't checked": ('in record["sha256"].items():', 'in [*record["sha256"].items()][:2]:'),
    "the weights of another commit will do": ("if label is not None and label", "if label is not None and not label"),
    "a run that could hardly begin is lost": (HALF_BEGUN, "if not commits:"),
    "the oldest snapshot is used": ("for commit in reversed(commits):", "for commit in commits:"),
    "momentum is taken from the weights": ("outer=snapshot.outer", "outer=snapshot.tensors"),
    "the scheduler's state is lost": ('.get("scheduler", {})', '.get("nothing", {})'),
    "samples of the oldest epoch are unused": ("if span.epoch >= last.epoch", "if span.epoch > last.epoch"),
    "samples of rewound rounds are used": ("commits[: commit.round + 1], snapshot", "commits, snapshot"),
    "the last round is trained again": ("next_round=last.round + 1", "next_round=last.round"),
    "nothing is rewound": ("CommitLog(self.directory).set_aside(self.next_round)", "pass"),
    "a damaged newest record ends the run": ("CheckpointError:\n            damaged", "KeyError:\n            damaged"),
    "nobody says what was passed over": (SAYS, "lines = []"),
    "leftovers stay": ("        leftover.unlink(missing_ok=True)\n", ""),
}  # fmt: skip


@cache
def mutant(name: str) -> Any:
    """The store with that defect."""
    old, new = MUTANTS[name]
    modules = (disk, tensorfile, commits, snapshots, restore_point, commit_writer)
    sources = {module.__name__: Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules}
    assert sum(source.count(old) for source in sources.values()) == 1, f"{name}: its place is gone, or isn't unique"
    package = f"mutant_{len(sys.modules)}"
    for module, source in sources.items():
        _load(module.replace("hypha_ray.store", package), source.replace(old, new), package, [*sources])
    writer, point = (sys.modules[f"{package}.{module}"] for module in ("commit_writer", "restore_point"))
    return SimpleNamespace(CommitWriter=writer.CommitWriter, restart=point.restart)


def _load(name: str, source: str, package: str, family: list[str]) -> None:
    """Run a module that imports its defective neighbours instead of the real ones."""
    for member in family:
        source = source.replace(f"from {member} import", f"from {member.replace('hypha_ray.store', package)} import")
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
