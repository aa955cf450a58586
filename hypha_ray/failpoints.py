"""Named points where tests make a process fail. They are compiled in, and do nothing unless a job file arms them.

    [testing]
    failpoints = ["store.before_record=kill@2", "worker.payload:3=nan@1,4"]
    failpoint_log = "/tmp/hits.jsonl"

reads: the second time that any process of the run comes to ``store.before_record`` it is killed; worker 3's first and
fourth payloads are damaged. Hits are counted over all processes and restarts, in a log that every hit adds a line to
before it acts. So a process that takes over isn't killed again, and a test can assert what really fired. A point may
be named several times, for other actions at other hits.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hypha_ray.errors import ConfigError

POINTS = {
    "worker.start": "before the model is built",
    "worker.step": "after an inner step",
    "worker.process": "another process of a worker has its part of a batch, and has computed nothing",
    "worker.before_delta": "the round's last step is done, nothing handed over",
    "worker.mid_delta": "the delta is announced, its payload isn't there yet",
    "worker.after_delta": "everything of the round is handed over",
    "worker.before_done": "the final plan is done, and an external trainer hasn't heard so",
    "worker.payload": "the payload is about to be handed over; the site damages it",
    "rl.generate": "responses are generated, and not rewarded; the site makes that take three times as long",
    "rl.reward": "responses are rewarded, and not trained on",
    "rl.train": "the optimizer steps on a batch of prompts are taken, nothing is told of them",
    "generator.answer": "a generator has responded to a piece of a batch and rewarded it, and not answered",
    "rl.merge": "new global weights are in the policy, the reference is still the old one",
    "server.before_reduce": "the deltas are there, nothing is computed",
    "server.after_reduce": "the step is computed, and not yet returned",
    "shard.read": "before a slice is read",
    "scheduler.start": "before anything is asked or started",
    "scheduler.before_fetch": "a worker has handed over, and only its own node has the payload",
    "scheduler.before_reduce": "the deltas are in, the server isn't asked yet",
    "scheduler.after_reduce": "the verdict is in, nothing follows from it yet",
    "scheduler.before_persist": "before the store is asked to commit",
    "scheduler.mid_broadcast": "the first worker has been sent the new weights, the others haven't",
    "scheduler.after_commit": "the store has answered",
    "store.before_snapshot": "nothing of the round is written",
    "store.after_weights": "the weights' file is there, the momentum's isn't",
    "store.before_publish": "the snapshot is whole under its temporary name",
    "store.before_record": "the snapshot is there, the record isn't",
    "store.before_link": "the record is there under its temporary name",
    "store.after_record": "the record is there, no actor knows yet",
    "store.write": "before any file is written",
    "resume.before_read": "before the log is read",
    "resume.after_read": "the log is read and cut, nothing is started",
    "resume.before_begin": "the weights are loaded, the store hasn't taken them over",
    "telemetry.write": "before records are written",
}
"""Every point, and when a process is there."""

HOLD_S = 30
"""Seconds that ``hold`` keeps the interpreter's lock."""
PAUSE_S = 1
"""Seconds that ``pause`` takes."""
_Actions: TypeAlias = dict[int | None, str]
"""Action of a point, and the hit at which it happens; None: every one."""

_SPEC = re.compile(r"(?P<name>[a-z_.]+)(?::(?P<key>\w+))?=(?P<action>\w+)@(?P<hits>\d+(?:,\d+)*|\*)")
_armed: dict[tuple[str, str | None], _Actions] = {}
_log: list[Path] = []


def arm(specs: Sequence[str], log: str | None) -> None:
    """Arm points in this process, and disarm all others; see the module's text for the form of a spec.

    Actions: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``hold`` (the interpreter's lock, for 30 s), ``pause`` (1 s),
    ``exit``, ``error``, ``nospace`` (a full disk). Any other word is handed to the place, which acts it out itself.

    Raises:
        ConfigError: a spec can't be read, there is no such point, or there is no log to count in.

    """
    _armed.clear()
    _log[:] = [Path(log)] if log else []
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None or match["name"] not in POINTS or not _log:
            allowed = "NAME[:KEY]=ACTION@HITS with a name of hypha_ray/failpoints.py, and testing.failpoint_log"
            raise ConfigError("CFG003", "testing.failpoints is out of range", spec, allowed)
        actions = _armed.setdefault((match["name"], match["key"]), {})
        if match["hits"] == "*":
            actions[None] = match["action"]
        else:
            actions.update(dict.fromkeys(map(int, match["hits"].split(",")), match["action"]))


def failpoint(name: str, key: object = None) -> str | None:
    """A named point: fails if it is armed for this hit. Returns an action that the caller must act out.

    Args:
        name: one of `POINTS`.
        key: number or name that distinguishes points of one name, such as a worker's number; None: there is one.

    """
    if not _armed:
        return None
    actions = _armed.get((name, str(key))) or _armed.get((name, None))
    if actions is None:
        return None
    action = _count(name, key, actions)
    if action not in _ACTIONS:
        return action
    _ACTIONS[action]()
    return None


def hits(log: str | Path, name: str, fired: bool = True) -> int:
    """Number of hits of a point, or only of those that fired, over all processes."""
    if not Path(log).exists():
        return 0
    lines = Path(log).read_text(encoding="utf-8").splitlines()
    count = 0
    for line in lines:
        hit = json.loads(line)
        if hit["name"] == name and (hit["fired"] or not fired):
            count += 1
    return count


def _count(name: str, key: object, actions: _Actions) -> str | None:
    """Add this hit to the log; returns its action, None if it does nothing."""
    key_text = None if key is None else str(key)
    is_counted_by_key = (name, key_text) in _armed
    with _log[0].open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        hit_number = 1
        for hit in map(json.loads, file):
            if hit["name"] == name and (not is_counted_by_key or hit["key"] == key_text):
                hit_number += 1
        action = actions.get(hit_number, actions.get(None))
        record = {"name": name, "key": key_text, "action": action, "fired": action is not None}
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return action


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold() -> None:
    ctypes.PyDLL(None).sleep(HOLD_S)


def _pause() -> None:
    time.sleep(PAUSE_S)


def _exit() -> None:
    os._exit(1)


def _error() -> None:
    raise RuntimeError("a failpoint")


def _nospace() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "stop": _stop,
    "hold": _hold,
    "pause": _pause,
    "exit": _exit,
    "error": _error,
    "nospace": _nospace,
}
