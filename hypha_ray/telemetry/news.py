"""Events that the console reports during a run; many of one kind share a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import counted, printable, ranges

WINDOW_S = 5.0
"""Seconds between two lines of one kind; the second one covers all events in between."""
START_S = 30.0
"""Longest time in seconds that joins are held back before the first round, to report a starting fleet in one line."""
LONGEST = 200
"""Most characters of a reason; events.jsonl has all of it."""
PROBLEMS = 5
"""Largest number of problems reported within a window; further problems are only counted."""
REMEMBERED = 1000
"""Number of problems that are remembered, to report each only once."""
NAMES = 8
"""Most actors, or ranges of worker numbers, named in a line."""
ALERT_WORDS = {"alert": "alert", "alert_over": "alert over"}
"""Beginnings of the lines about alerts, by the kind of event; each has a line of its own."""


class Sentence(NamedTuple):
    """Text for a kind of event: for one, and for several."""

    singular: str
    plural: str


SENTENCES = {
    "join": Sentence("worker {} joined", "{} workers joined"),
    "loss": Sentence("worker {} was lost", "{} workers were lost"),
    "leaving": Sentence("worker {} is leaving", "{} workers are leaving"),
    "leave": Sentence("worker {} left", "{} workers left"),
    "exclude": Sentence("worker {} is excluded from here on", "{} workers are excluded from here on"),
    "revive": Sentence("{} was replaced", "{} actors were replaced"),
}
"""Words for kinds of events, to which the reason is added."""
KINDS = frozenset({*SENTENCES, "waiting", "machine_loss", "stop", "problem", "alert", "alert_over"})
"""The kinds of events that are news."""


class News:
    """Turns a run's events into lines of text, at most a few per second.

    The first event of a kind is reported at once. Further ones wait for `WINDOW_S`, and are then reported in one line;
    so are joins before the first round. A problem is reported once. If a round begins with fewer workers than the job
    wants, that is a line, once for each number of workers.

    Args:
        job_workers: number of workers that the job wants; None: unknown.

    """

    def __init__(self, job_workers: int | None = None) -> None:
        self._job_workers = job_workers
        self._present: set[int] = set()
        self._reported_count = job_workers
        """Number of workers that was reported last, or that is wanted."""
        self._shortage: str | None = None
        """Line about too few workers, not returned yet; None without one."""
        self._waiting: dict[str, list[Record]] = {}
        """Events that aren't reported yet, by kind."""
        self._not_before: dict[str, float] = {}
        """Earliest time of the next line, by kind, in monotonic seconds."""
        self._excluded: set[int] = set()
        self._problems = Problems()
        self._alerts: list[str] = []
        """Lines about alerts that aren't returned yet."""
        self._begun = False
        """Whether the first round has begun."""

    def add_event(self, event: Record) -> None:
        """Add an event of events.jsonl; its time is `monotonic_s`."""
        kind = event["kind"]
        self._count_workers(event)
        if kind == "plan" and not self._begun:
            self._begun = True
            self._not_before.pop("join", None)
        elif kind == "problem":
            self._problems.add(_line(event["text"]))
        elif kind in ALERT_WORDS:
            self._alerts.append(f"{ALERT_WORDS[kind]}: {_line(event['text'])}")
        elif kind in KINDS and not (kind == "loss" and event["worker"] in self._excluded):
            if kind == "exclude":  # The loss that follows isn't reported again.
                self._excluded.add(event["worker"])
            if kind == "join" and not self._begun:
                self._not_before.setdefault(kind, event["monotonic_s"] + START_S)
            self._waiting.setdefault(kind, []).append(event)

    def lines(self, now: float, everything: bool = False) -> list[str]:
        """Return the lines that are due; with `everything`, of all events.

        If one kind is due, all events that wait are reported with it, so lines are in the order of the events.
        """
        lines = self._problems.lines(now, everything) + self._alerts
        self._alerts = []
        if any(everything or now >= self._not_before.get(kind, now) for kind in self._waiting):
            events_by_kind = self._waiting
            self._waiting = {}
            self._not_before |= dict.fromkeys(events_by_kind, now + WINDOW_S)
            lines += [line_about(kind, events) for kind, events in events_by_kind.items()]
        if self._shortage is not None:
            lines.append(self._shortage)
            self._shortage = None
        return lines

    def _count_workers(self, event: Record) -> None:
        """Keep the number of workers, and notice a round that begins with another number than the last one."""
        match event["kind"]:
            case "join":
                self._present.add(event["worker"])
            case "loss" | "leave" | "exclude":
                self._present.discard(event["worker"])
            case "plan" if self._job_workers is not None and len(self._present) != self._reported_count:
                count = len(self._present)
                self._reported_count = count
                if count < self._job_workers:
                    joining_note = "further ones join when there are machines for them"
                    self._shortage = f"trains with {count} of {counted(self._job_workers, 'worker')}; {joining_note}"


class Problems:
    """Problems as text: each is reported once, and of many at a time only the number."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self._waiting: list[str] = []
        self._reported_count = 0
        """Number of problems reported in the current window."""
        self._window_end_s = float("-inf")
        """End of the current window, in monotonic seconds."""

    def add(self, text: str) -> None:
        """Add a problem, unless it is known."""
        if text not in self._known:
            self._known[text] = None
            self._waiting.append(text)
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]

    def lines(self, now: float, everything: bool) -> list[str]:
        """Return the problems that are due."""
        if now >= self._window_end_s:
            if len(self._waiting) > PROBLEMS:
                everything = True
            self._reported_count = 0
        free = PROBLEMS - self._reported_count
        lines = self._waiting[:free]
        self._waiting = self._waiting[free:]
        if lines:
            if not self._reported_count:
                self._window_end_s = now + WINDOW_S
            self._reported_count += len(lines)
        if everything and self._waiting:
            lines.append(f"{counted(len(self._waiting), 'more problem')}, see events.jsonl")
            self._waiting.clear()
        return lines


def line_about(kind: str, events: Sequence[Record]) -> str:
    """One line about events of one kind."""
    if kind == "waiting":
        return "waiting for workers: {workers} of the {needed} that are needed are there".format_map(events[-1])
    if kind == "stop":
        return f"ended early: {events[-1]['reason']}"
    if kind == "machine_loss":
        return "; ".join(map(_machine_loss, events))
    field = "role" if kind == "revive" else "worker"
    subjects = sorted({event[field] for event in events})
    sentence = SENTENCES[kind]
    text = sentence.singular.format(subjects[0])
    if len(subjects) > 1:
        names = subjects if kind == "revive" else ranges(subjects)
        if len(names) > NAMES:
            names = [*names[:NAMES], "…"]
        text = f"{sentence.plural.format(len(subjects))} ({', '.join(names)})"
    elif len(events) > 1:
        text += f" {len(events)} times"
    distinct_reasons = dict.fromkeys(map(_reason, events))
    reasons = [reason for reason in distinct_reasons if reason]
    if not reasons:
        return text
    if len(reasons) == 1:
        return f"{text}: {reasons[0]}"
    return f"{text}, the first: {reasons[0]}"


def _machine_loss(event: Record) -> str:
    """Text about a machine that is gone, with the workers that were on it."""
    workers = sorted(event["workers"])
    if workers:
        names = ", ".join(ranges(workers))
        verb = "was" if len(workers) == 1 else "were"
        subject = f"{counted(len(workers), 'worker')} ({names}) {verb}"
    else:
        subject = "no worker of this run was"
    return f"machine {event['machine']} is gone: {subject} on it"


def _reason(event: Record) -> str:
    """Reason of an event."""
    reason = event.get("reason", "")
    match event["kind"]:
        case "join":
            reason = event["device"]
        case "leave":
            reason = ""  # Already reported with "leaving".
        case "exclude" if not reason:
            reason = f"{event['strikes']} of its deltas were rejected"
    text = _line(reason)
    if len(text) > LONGEST:
        return f"{text[: LONGEST - 1]}…"
    return text


def _line(text: object) -> str:
    """Text on one line and without control characters: trainers and servers outside of Ray may have written it."""
    return " ".join(printable(str(text)).split())
