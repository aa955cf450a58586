"""Failures and availability of machines: at random times, by day and night, or as a trace says.

Times in seconds. Each machine's failures are a Poisson process of its own, which its worker's life doesn't change.

A trace is JSON lines or CSV, with a time, a machine and an event:

    {"at_s": 120, "machine": 3, "event": "leave"}        at_s,machine,event
    {"at_s": 900, "machine": 3, "event": "join"}         120,3,leave

A machine whose first event is `join` isn't there before. Times are seconds since the beginning of the run, and needn't
be in order.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from hypha_ray.config.keys import shown
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.scenario import Diurnal, Failures, Machine, MachineGroup, Scenario, dice_of

if TYPE_CHECKING:
    from _csv import Reader as _CsvReader

EVENTS: Final = ("join", "leave", "kill", "hang", "preempt", "partition")
"""Events of a trace: `leave` is at once and for good until `join`, the others are those of `failures`."""
EXAMPLE: Final = '{"at_s": 0, "machine": 0, "event": "join"}'
FIELDS: Final = ("at_s", "machine", "event")
HOUR_S = 3600.0
LATEST_S = 1e12
DAY_S = 24 * HOUR_S
PREEMPTED = "preempted"
NIGHT = "night"
TRACE = "trace"
"""Reasons of absences."""
S = TypeVar("S", bound=Scenario)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of a trace."""

    at_s: float
    machine: int
    """Number of the machine within its group."""
    event: str


def read_trace(path: Path, count: int) -> list[TraceEvent]:
    """Read a trace for a group of so many machines, in order of time.

    Raises:
        ConfigError: CFG015, it can't be read; CFG012, it is empty; CFG001, CFG003, CFG005 or CFG012 with the line of a
            mistake.

    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        problem = f"the trace {path} can't be read"
        raise ConfigError("CFG015", problem, reason, fix="name a JSONL or CSV file beside the scenario") from None
    rows = _csv_rows(text, path) if path.suffix.lower() == ".csv" else _json_rows(text, path)
    events = [_event(fields, f"{path}:{line}", count) for line, fields in rows]
    if not events:
        raise ConfigError("CFG012", f"the trace {path} has no event", fix="give one, or leave available out")
    return sorted(events, key=lambda event: event.at_s)


def with_traces(scenario: S, folder: Path) -> S:
    """Read traces for mistakes, and name their files as seen from the working directory."""
    groups = []
    for group in scenario.machines:
        if group.available is None:
            groups.append(group)
            continue
        path = folder / Path(group.available).expanduser()
        read_trace(path, group.count)
        groups.append(group.model_copy(update={"available": str(path)}))
    return scenario.model_copy(update={"machines": tuple(groups)})


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows below the line of names, with their lines; numbers are read as such."""
    reader = csv.reader(text.splitlines())
    rows = _filled_rows(reader, path)
    names = [name.strip() for name in next(rows, [])]
    if names and not set(names) & set(FIELDS):
        problem = f"{path}:{reader.line_num} has no names of columns"
        raise ConfigError("CFG012", problem, shown(",".join(names)[:40]), ",".join(FIELDS), "begin with that line")
    if names:
        _check_names(names, f"{path}:{reader.line_num}")
    for values in rows:
        if len(values) != len(names):
            problem = f"{path}:{reader.line_num} has another number of fields than the first line"
            raise ConfigError(
                "CFG003", problem, str(len(values)), str(len(names)), "give each line a field for each name"
            )
        yield reader.line_num, dict(zip(names, map(_number, values), strict=True))


def _filled_rows(reader: _CsvReader, path: Path) -> Iterator[list[str]]:
    """Rows that aren't empty, nor blank."""
    try:
        for row in reader:
            if row != [] and "".join(row).strip() != "":
                yield row
    except csv.Error as error:
        problem = f"{path}:{reader.line_num} is no line of CSV"
        raise ConfigError("CFG005", problem, str(error), fix=f"write {','.join(FIELDS)}") from None


def _number(text: Any) -> Any:
    """Number that a text is; otherwise the text without blanks around it."""
    for number_type in (int, float):
        try:
            return number_type(text)
        except (TypeError, ValueError):
            pass
    return text.strip() if isinstance(text, str) else text


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            problem = f"{path}:{number} is no JSON object"
            raise ConfigError(
                "CFG005", problem, shown(line[:40]), fix='write {"at_s": 0, "machine": 0, "event": "join"}'
            )
        yield number, fields


def _event(fields: dict[str, Any], location: str, count: int) -> TraceEvent:
    _check_names(fields, location)
    at_s = fields["at_s"]
    machine = fields["machine"]
    event = fields["event"]
    if not isinstance(at_s, int | float) or isinstance(at_s, bool) or not 0 <= at_s <= LATEST_S:
        allowed = f"seconds from 0 to {LATEST_S:g}"
        raise ConfigError("CFG003", f"{location}: at_s is out of range", shown(at_s), allowed, "write such a number")
    if not isinstance(machine, int) or isinstance(machine, bool) or not 0 <= machine < count:
        allowed = f"0 … {count - 1}, machines of the group"
        raise ConfigError(
            "CFG003", f"{location}: machine is out of range", shown(machine), allowed, "write one of these"
        )
    if event not in EVENTS:
        matches = get_close_matches(str(event), EVENTS, n=1)
        fix = f"did you mean {matches[0]}?" if matches else "write one of these"
        raise ConfigError("CFG003", f"{location}: event is out of range", shown(event), ", ".join(EVENTS), fix)
    return TraceEvent(float(at_s), machine, event)


def _check_names(fields: Iterable[str], location: str) -> None:
    names = list(fields)
    for name in sorted(set(names).difference(FIELDS)):
        matches = get_close_matches(name, FIELDS, n=1)
        fix = f"did you mean {matches[0]}?" if matches else "leave it out"
        raise ConfigError("CFG001", f"{location}: unknown field {shown(name)}", allowed=", ".join(FIELDS), fix=fix)
    for name in FIELDS:
        if name not in names:
            raise ConfigError("CFG012", f"{location}: {name} is missing", allowed=", ".join(FIELDS), fix="give it")
        if names.count(name) > 1:
            raise ConfigError("CFG005", f"{location}: {name} stands there twice", fix="keep one column")


class MachineHost(Protocol):
    """World that carries out what happens to machines."""

    @property
    def now(self) -> float:
        """Present time in seconds."""

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action."""

    def kill(self, machine: Machine) -> None:
        """End the process of the machine's worker, if there is one."""

    def hang(self, machine: Machine) -> None:
        """Let the machine's worker fall silent, if there is one."""

    def partition(self, machine: Machine, seconds: float) -> None:
        """Cut the machine's link for a while."""

    def preempt(self, machine: Machine, notice_s: float, reason: str) -> None:
        """Announce the machine's end, and take it away after the notice."""

    def leave(self, machine: Machine, reason: str) -> None:
        """Take the machine away at once, and end its worker."""

    def join(self, machine: Machine, reason: str) -> None:
        """End the absence for a reason."""


class FailureSchedule:
    """Schedules what happens to the machines of a scenario.

    Args:
        scenario: gives models and traces.
        machines: machines in the order of their numbers.
        host: world that carries the events out.

    """

    def __init__(self, scenario: Scenario, machines: Sequence[Machine], host: MachineHost) -> None:
        self._host = host
        self._seed = scenario.seed
        first_machine = 0
        self._groups: list[tuple[MachineGroup, Sequence[Machine]]] = []
        for group in scenario.machines:
            self._groups.append((group, machines[first_machine : first_machine + group.count]))
            first_machine += group.count

    def start(self) -> None:
        """Say which machines are there at the beginning, and schedule the first events."""
        for number, (group, machines) in enumerate(self._groups):
            if group.failures.every_h is not None:
                for machine in machines:
                    self._expect_failure(machine, group.failures, dice_of(self._seed, machine.number, "failures"))
            if group.diurnal is not None:
                self._follow_day(group.diurnal, machines, dice_of(self._seed, number, "diurnal"))
            if group.available is not None:
                self._follow_trace(read_trace(Path(group.available), group.count), group, machines)

    # ── random failures ───────────────────────────────────────────────────────────────────────────────────────────

    def _expect_failure(self, machine: Machine, failures: Failures, dice: random.Random) -> None:
        assert failures.every_h is not None
        wait_s = dice.expovariate(1.0) * failures.every_h * HOUR_S
        self._host.later(wait_s, partial(self._fail, machine, failures, dice))

    def _fail(self, machine: Machine, failures: Failures, dice: random.Random) -> None:
        weights = failures.kinds.weights
        (event,) = dice.choices(list(weights), list(weights.values()))
        if machine.available:
            self._strike(machine, event, failures, dice)
        self._expect_failure(machine, failures, dice)

    def _strike(self, machine: Machine, event: str, failures: Failures, dice: random.Random) -> None:
        match event:
            case "kill":
                self._host.kill(machine)
            case "hang":
                self._host.hang(machine)
            case "partition":
                self._host.partition(machine, dice.expovariate(1.0) * failures.cut_s)
            case "preempt":
                self._host.preempt(machine, failures.notice_s, PREEMPTED)
                away_s = dice.expovariate(1.0) * failures.away_s
                self._host.later(failures.notice_s + away_s, partial(self._host.join, machine, PREEMPTED))

    # ── day and night ─────────────────────────────────────────────────────────────────────────────────────────────

    def _follow_day(self, diurnal: Diurnal, machines: Sequence[Machine], dice: random.Random) -> None:
        """Give each machine a rank, in random order; it is there while the part that can be had is above its rank."""
        ranks = [(index + 0.5) / len(machines) for index in range(len(machines))]
        dice.shuffle(ranks)
        for machine, rank in zip(machines, ranks, strict=True):
            if rank > diurnal.least:
                self._follow_rank(machine, diurnal, rank)

    def _follow_rank(self, machine: Machine, diurnal: Diurnal, rank: float) -> None:
        cosine = 2 * (rank - diurnal.least) / (1 - diurnal.least) - 1
        half_s = math.acos(max(-1.0, min(1.0, cosine))) * DAY_S / (2 * math.pi)
        """Seconds before and after the peak in which the machine is there."""
        since_peak_s = -diurnal.peak_hour * HOUR_S % DAY_S
        is_there = since_peak_s < half_s or since_peak_s > DAY_S - half_s
        if not is_there:
            self._host.leave(machine, NIGHT)
        join_in_s = (DAY_S - half_s - since_peak_s) % DAY_S
        leave_in_s = (half_s - since_peak_s) % DAY_S
        self._repeat_daily(join_in_s, partial(self._host.join, machine, NIGHT))
        notice_s = machine.group.failures.notice_s
        self._repeat_daily(leave_in_s, partial(self._host.preempt, machine, notice_s, NIGHT))

    def _repeat_daily(self, first_s: float, action: Callable[[], None]) -> None:
        def act() -> None:
            action()
            self._host.later(DAY_S, act)

        self._host.later(first_s, act)

    # ── traces ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow_trace(self, events: Iterable[TraceEvent], group: MachineGroup, machines: Sequence[Machine]) -> None:
        seen: set[int] = set()
        dice = dice_of(self._seed, machines[0].number, "trace")
        for event in events:
            machine = machines[event.machine]
            if event.event == "join" and event.machine not in seen:
                self._host.leave(machine, TRACE)
            seen.add(event.machine)
            self._host.later(event.at_s, self._action_of(event.event, machine, group.failures, dice))

    def _action_of(self, event: str, machine: Machine, failures: Failures, dice: random.Random) -> Callable[[], None]:
        match event:
            case "join":
                return partial(self._host.join, machine, TRACE)
            case "leave":
                return partial(self._host.leave, machine, TRACE)
            case _:
                return partial(self._strike, machine, event, failures, dice)
