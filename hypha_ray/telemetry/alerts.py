"""Alerts of a run: conditions on its metrics, each told once until its metric was well again.

    records, events, the clock ──► AlertBook ──► notices ──► events `alert` and `alert_over`

The scheduler keeps the book, so that a notice becomes an event and a line of the console like all others. Webhooks and
programs are told by the telemetry actor, as sinks of that event.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import NamedTuple

from hypha_ray.config.training import COMMIT_AGE, MEDIANS, WORKERS, Alert, Metric, find_metric
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, Record, read_jsonl

ALERT = "alert"
ALERT_OVER = "alert_over"
"""Kinds of the two events."""
CLOCK_S = 1.0
"""Seconds between two looks at the clock."""
WINDOW = 20
"""Number of earlier values that a median is taken of."""
FEWEST = 5
"""Fewest values that have a median to compare with."""
_WORDS = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}
_WORDS_OF_MEDIANS = {"above_median_times": "above", "below_median_times": "below"}


class Notice(NamedTuple):
    """Notice of an alert: its condition has held for long enough, or its metric is well again."""

    alert: Alert
    is_over: bool
    value: float
    """Value of the metric."""
    limit: float
    """Number that the value was compared with."""
    round: int | None
    """Last round with a record; None before the first."""
    worker: int | None
    """Worker whose report it is about; None if it is about no report."""

    @property
    def text(self) -> str:
        """One line of text, which counts rounds from one."""
        subject = str(self.alert.metric)
        if self.worker is not None:
            subject += f" of worker {self.worker}"
        condition = f"{subject} is {self.value:.6g}"
        if not self.is_over and not math.isnan(self.value):
            condition += f", {_comparison(self.alert, self.limit)}"
        if self.round is not None:
            condition += f", after round {self.round + 1}"
        parts = [self.alert.name, self.alert.message, condition]
        return ": ".join(part for part in parts if part)


def _comparison(alert: Alert, limit: float) -> str:
    word = _WORDS.get(str(alert.op))
    if word is not None:
        return f"{word} {limit:.6g}"
    return f"{_WORDS_OF_MEDIANS[str(alert.op)]} {limit:.6g}, {alert.value:g} times the median"


@dataclass(slots=True)
class Streak:
    """Values of one source in a row that meet a condition."""

    since_s: float
    """Monotonic time of the first of them, in seconds."""
    value: float
    """The last of them."""
    limit: float
    rounds: int = 0
    """Rounds that have ended in the meantime."""


class AlertWatch:
    """Watches the metric of one alert.

    Values of reports belong to their workers: the condition holds as long as it does for one of them.
    """

    def __init__(self, alert: Alert) -> None:
        metric = find_metric(str(alert.metric))
        assert metric is not None and alert.value is not None
        self.alert = alert
        self.metric: Metric = metric
        self.is_firing = False
        self._value = alert.value
        self._streaks: dict[int | None, Streak] = {}
        """Streaks by worker; that of a metric of the whole run under None."""
        self._earlier: dict[int | None, deque[float]] = {}
        """Last finite values that were well, by worker."""
        self._last_well: tuple[int | None, float, float] | None = None
        """Worker, value and limit of the last value that was well; None if the metric isn't well."""

    def observe(self, worker: int | None, value: float, now: float) -> None:
        """Take a value of the metric; one that is no number meets every condition."""
        limit = self._limit(worker)
        shown_limit = self._value
        if limit is not None:
            shown_limit = limit
        if math.isnan(value) or (limit is not None and self.meets(value, limit)):
            streak = self._streaks.setdefault(worker, Streak(now, value, shown_limit))
            streak.value = value
            streak.limit = shown_limit
            return
        self._streaks.pop(worker, None)
        if math.isfinite(value):
            self._earlier.setdefault(worker, deque(maxlen=WINDOW)).append(value)
        if not self._streaks:
            self._last_well = (worker, value, shown_limit)

    def resume(self, is_firing: bool) -> None:
        """Take the state of an earlier attempt; its values make nothing well, since files keep no NaN."""
        self.is_firing = is_firing
        self._last_well = None

    def forget(self, worker: int) -> None:
        """Drop the values of a worker that is gone."""
        self._streaks.pop(worker, None)
        self._earlier.pop(worker, None)

    def end_round(self) -> None:
        """Count a round for all streaks."""
        for streak in self._streaks.values():
            streak.rounds += 1

    def meets(self, value: float, limit: float) -> bool:
        """Whether a value meets the condition."""
        match self.alert.op:
            case ">" | "above_median_times":
                return value > limit
            case ">=":
                return value >= limit
            case "<" | "below_median_times":
                return value < limit
            case _:
                return value <= limit

    def notice(self, now: float, round: int | None) -> Notice | None:
        """Return the notice that is due, once; None without one."""
        if self.is_firing and not self._streaks and self._last_well is not None:
            self.is_firing = False
            worker, value, limit = self._last_well
            return Notice(self.alert, True, value, limit, round, worker)
        for worker, streak in self._streaks.items():
            if not self.is_firing and self._is_long_enough(streak, now):
                self.is_firing = True
                self._last_well = None
                return Notice(self.alert, False, streak.value, streak.limit, round, worker)
        return None

    def _is_long_enough(self, streak: Streak, now: float) -> bool:
        if self.alert.for_rounds is not None:
            return streak.rounds >= self.alert.for_rounds
        return now - streak.since_s >= (self.alert.for_s or 0.0)

    def _limit(self, worker: int | None) -> float | None:
        """Number to compare with; None while there is no median, or none above 0."""
        if self.alert.op not in MEDIANS:
            return self._value
        earlier = self._earlier.get(worker, ())
        if len(earlier) < FEWEST:
            return None
        median = statistics.median(earlier)
        return self._value * median if median > 0 else None


class AlertBook:
    """Alerts of a job, in the scheduler of a run.

    Args:
        alerts: alerts of the job file.
        now: monotonic time at which the attempt begins, in seconds.

    """

    def __init__(self, alerts: Sequence[Alert], now: float) -> None:
        self._watches = [AlertWatch(alert) for alert in alerts]
        self._last_commit_s = now
        """Monotonic time of the last commit; before the first one, of the attempt's beginning."""
        self._has_commit = False
        self._round: int | None = None
        self._workers: set[int] = set()
        self._has_begun = False
        """Whether a round was planned: before that, workers are still awaited."""

    def __bool__(self) -> bool:
        return bool(self._watches)

    def recall(self, directory: Path, now: float) -> None:
        """Go on from the files of earlier attempts: no alert is told twice because a scheduler was replaced."""
        for record in read_jsonl(directory / METRICS, kinds=("round", "eval")):
            self._observe_record(record, now)
        watches = {watch.alert.title: watch for watch in self._watches}
        for event in read_jsonl(directory / EVENTS, kinds=(ALERT, ALERT_OVER)):
            watch = watches.get(str(event.get("alert")))
            if watch is not None:
                watch.resume(is_firing=event["kind"] == ALERT)

    def add_record(self, record: Record, now: float) -> list[Notice]:
        """Take a record; return the notices that are due."""
        self._observe_record(record, now)
        return list(self._notices(now))

    def add_event(self, event: Record, now: float) -> list[Notice]:
        """Take an event; return the notices that are due."""
        match event["kind"]:
            case "commit":
                self._last_commit_s = now
                self._has_commit = True
            case "join":
                self._workers.add(event["worker"])
            case "loss" | "leave" | "exclude":
                self._workers.discard(event["worker"])
                for watch in self._watches:
                    watch.forget(event["worker"])
            case "plan":
                self._has_begun = True
        return self.look(now)

    def look(self, now: float) -> list[Notice]:
        """Look at the clock, and at metrics that have no record; return the notices that are due."""
        for watch in self._of(COMMIT_AGE):
            age_s = now - self._last_commit_s
            # A new attempt has no age yet, which makes nothing well.
            if self._has_commit or watch.meets(age_s, watch.alert.value or 0.0):
                watch.observe(None, age_s, now)
        for watch in self._of(WORKERS):
            if self._has_begun:
                watch.observe(None, len(self._workers), now)
        return list(self._notices(now))

    def _of(self, derived: str) -> Iterator[AlertWatch]:
        return (watch for watch in self._watches if watch.metric == (None, derived))

    def _observe_record(self, record: Record, now: float) -> None:
        kind = record.get("kind")
        worker = record["worker"] if kind == "step" else None
        for watch in self._watches:
            if watch.metric.kind == kind:
                value = _number(record, watch.metric.field)
                if value is not None:
                    watch.observe(worker, value, now)
            if kind == "round":
                watch.end_round()
        if kind == "round":
            self._round = record["round"]

    def _notices(self, now: float) -> Iterable[Notice]:
        for watch in self._watches:
            notice = watch.notice(now, self._round)
            if notice is not None:
                yield notice


def _number(record: Record, field: str) -> float | None:
    """Value of a field, or of one in a table within the record; None if it has none."""
    table, _, name = field.partition("/")
    inner = record.get(table)
    value = inner.get(name) if isinstance(inner, dict) and name else record.get(field)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return float(value)
