"""Traces of machines, their mistakes, and the models that stand for them."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.simulation.failures import FailureSchedule, TraceEvent, read_trace
from hypha_ray.simulation.scenario import BatchTimes, Machine, MachineGroup, MachinePool, Stragglers, machines_of
from hypha_ray.simulation.world import VirtualClock
from tests.support.scenarios import EXACT, read_text

ROWS = [TraceEvent(0.0, 1, "join"), TraceEvent(2.5, 0, "kill"), TraceEvent(7.0, 1, "leave")]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_json_lines_and_csv_say_the_same(tmp_path: Path) -> None:
    csv = written(tmp_path, "t.csv", "at_s,machine,event\n7,1,leave\n0,1,join\n2.5,0,kill\n")
    lines = [f'{{"at_s": {row.at_s}, "machine": {row.machine}, "event": "{row.event}"}}' for row in reversed(ROWS)]
    jsonl = written(tmp_path, "t.jsonl", "\n\n".join(lines))
    assert read_trace(csv, 2) == ROWS
    assert read_trace(jsonl, 2) == ROWS


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("at_s,machine,event\n1,0,kil\n", 2, "did you mean kill?"),
        ("at_s,machine,event\n1,0,kill\n1,2,kill\n", 3, "got 2, allowed 0 … 1"),
        ("at_s,machine,event\n-1,0,kill\n", 2, "at_s is out of range"),
        ("at_s,machine,event\nsoon,0,kill\n", 2, "'soon'"),
        ("at_s,machin,event\n1,0,kill\n", 1, "did you mean machine?"),
        ("at_s,machine\n1,0\n", 1, "event is missing"),
        ("600,1,leave\n700,1,join\n", 1, "has no names of columns"),
        ("at_s,machine,event\n1,0,kill,4\n", 2, "got 4, allowed 3"),
        ("at_s,machine,event\n1,0\n", 2, "got 2, allowed 3"),
        ("at_s,at_s,machine,event\n1,2,0,kill\n", 1, "at_s stands there twice"),
        ("at_s,machine,event\n1e300,0,kill\n", 2, "at_s is out of range"),
        (f"at_s,machine,event\n{'9' * 400},0,kill\n", 2, "at_s is out of range"),
        (f"at_s,machine,event\n{'9' * 200_000},0,kill\n", 2, "is no line of CSV"),
        ("\n\nat_s,machine,event\n\n1,0,kil\n", 5, "did you mean kill?"),
    ],
)
def test_mistake_in_a_trace_is_named_with_its_line(tmp_path: Path, text: str, line: int, part: str) -> None:
    csv.field_size_limit(131_072)  # Python's own; whatever read a table in this process has raised it.
    with pytest.raises(ConfigError) as raised:
        read_trace(written(tmp_path, "t.csv", text), 2)
    assert f"t.csv:{line}" in str(raised.value)
    assert part in str(raised.value)


def test_trace_of_a_spreadsheet_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    csv = written(tmp_path, "t.csv", "\ufeffat_s,machine,event\n7,1,leave\n0,1,join\n2.5,0,kill\n")
    assert read_trace(csv, 2) == ROWS


def test_blank_lines_of_a_table_are_no_rows(tmp_path: Path) -> None:
    csv = written(tmp_path, "t.csv", " \nevent, machine ,at_s\n\nleave,1,7\n   \n join , 1 , 0 \n,,\nkill,0,2.5\n\t\n")
    assert read_trace(csv, 2) == ROWS


@pytest.mark.parametrize("text", ["", "at_s,machine,event\n"])
def test_trace_without_an_event_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"the trace .*t\.csv has no event"):
        read_trace(written(tmp_path, "t.csv", text), 2)


def test_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"t\.jsonl:2 is no JSON object"):
        read_trace(written(tmp_path, "t.jsonl", '{"at_s": 1, "machine": 0, "event": "kill"}\nkill\n'), 2)


def test_missing_trace_is_found_when_the_scenario_is_read(tmp_path: Path) -> None:
    text = EXACT.replace("price = 3.6", 'price = 3.6\navailable = "absent.csv"')
    with pytest.raises(ConfigError, match=r"CFG015.*absent\.csv"):
        read_text(tmp_path, text)


class Market:
    """Machines without workers: each may be there or not."""

    def __init__(self, clock: VirtualClock, pool: MachinePool) -> None:
        self.clock = clock
        self.pool = pool

    @property
    def now(self) -> float:
        return self.clock.now

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.clock.later(seconds, action)

    def kill(self, machine: Machine) -> None:
        raise AssertionError("nothing fails")

    hang = kill

    def partition(self, machine: Machine, seconds: float) -> None:
        raise AssertionError("nothing fails")

    def preempt(self, machine: Machine, notice_s: float, reason: str) -> None:
        self.pool.take_away(machine, reason)

    def leave(self, machine: Machine, reason: str) -> None:
        self.pool.take_away(machine, reason)

    def join(self, machine: Machine, reason: str) -> None:
        self.pool.give_back(machine, reason)


def test_half_of_the_machines_are_there_at_the_worst_hour(tmp_path: Path) -> None:
    text = EXACT.replace("count = 2", "count = 100").replace("price = 3.6", "diurnal = { least = 0.5, peak_hour = 12 }")
    (scenario,) = read_text(tmp_path, text)
    clock = VirtualClock()
    pool = MachinePool(machines_of(scenario))
    FailureSchedule(scenario, pool.machines, Market(clock, pool)).start()
    assert pool.free_count() == 50
    for hour in range(2, 48, 2):
        while clock.advance(hour * 3600.0):
            pass
        share = 0.5 + 0.5 * (1 + math.cos(2 * math.pi * (hour - 12) / 24)) / 2
        assert pool.free_count() == pytest.approx(100 * share, abs=1.01), hour


def machine_of(**tables: object) -> Machine:
    group = MachineGroup.model_validate({"count": 1, "batch_s": BatchTimes(median=2.0), **tables})
    return Machine(0, 0, group, seed=3)


def test_exact_times_are_the_median() -> None:
    machine = machine_of()
    assert [machine.batch_s(now) for now in (0.0, 5.0, 9.0)] == [2.0, 2.0, 2.0]


def test_jitter_has_its_spread_and_its_median() -> None:
    machine = machine_of(batch_s=BatchTimes(median=2.0, jitter=0.2))
    logs = sorted(math.log(machine.batch_s(0.0) / 2.0) for _ in range(4000))
    mean = sum(logs) / len(logs)
    assert logs[2000] == pytest.approx(0.0, abs=0.02)
    assert math.sqrt(sum((value - mean) ** 2 for value in logs) / len(logs)) == pytest.approx(0.2, rel=0.05)


def test_drift_swings_between_its_bounds_with_its_period() -> None:
    machine = machine_of(batch_s=BatchTimes(median=2.0, drift=0.25, drift_period_s=100.0))
    times = [machine.batch_s(float(now)) for now in range(100)]
    assert min(times) == pytest.approx(1.5, abs=0.01)
    assert max(times) == pytest.approx(2.5, abs=0.01)
    assert machine.batch_s(137.0) == pytest.approx(machine.batch_s(37.0))


def test_straggler_is_slow_for_its_share_of_the_time() -> None:
    machine = machine_of(stragglers=Stragglers(share=0.25, factor=4.0, for_s=10.0))
    times = [machine.batch_s(float(now)) for now in range(40_000)]
    assert set(times) == {2.0, 8.0}
    assert times.count(8.0) / len(times) == pytest.approx(0.25, abs=0.03)


def test_straggler_forgets_its_turns_in_a_long_time_without_passing_each_of_them() -> None:
    """Slow again 5 s later: 1/4 + 3/4 · exp(−5 · (1/10 + 1/30)) of the slow ones, as in a chain of two states."""
    machine = machine_of(stragglers=Stragglers(share=0.25, factor=4.0, for_s=10.0))
    pairs = [(machine.batch_s(now), machine.batch_s(now + 5.0)) for now in (1e11 * n for n in range(1, 8_000))]
    of_slow = [later for earlier, later in pairs if earlier == 8.0]
    assert len(of_slow) / len(pairs) == pytest.approx(0.25, abs=0.03)
    assert of_slow.count(8.0) / len(of_slow) == pytest.approx(0.6351, abs=0.05)
