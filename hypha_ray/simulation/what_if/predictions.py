"""Predictions of a run from its own records: as it was, and with other settings.

Each setting is simulated with several seeds. The figures are those of the simulation with the median time. A figure's
uncertainty has two parts: the standard deviation over the seeds, and the error of the prediction of the run itself. It
is the root of the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import pstdev
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.load import CONFIG, load
from hypha_ray.simulation.calibration import ActualRound, Calibration
from hypha_ray.simulation.result import SimulationResult
from hypha_ray.simulation.scenario_checks import check_scenario
from hypha_ray.simulation.what_if.run_scenario import (
    DataSize,
    RecordedScenario,
    require_told,
    scenario_notes,
    scenario_of,
    simulate_recorded,
)
from hypha_ray.simulation.what_if.trials import Trial, with_scenario_keys

SEEDS = 5
"""Number of simulations of each setting; odd, so that one of them has the median time."""
FIGURES = ("time_s", "bytes_up", "bytes_down", "idle_fraction", "cost")
"""Figures with an uncertainty."""
SUMMED = ("bytes_up", "bytes_down", "idle_fraction")
"""Figures of rounds that are compared as sums, or as a mean of fractions."""
AS_RECORDED = "as recorded"
"""Label of the prediction of the run itself."""

SizesOf = Callable[[Job], DataSize]
"""Gives the sizes of model and data under a job."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of the run as it was predicted and as it took place."""

    name: str
    predicted: float
    actual: float

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if the actual figure is 0 and the predicted one isn't."""
        if self.predicted == self.actual:
            return 0.0
        return (self.predicted - self.actual) / self.actual if self.actual else None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of a run with some settings."""

    label: str
    """The settings as they were written."""
    result: SimulationResult
    """The simulation with the median time."""
    spread: Mapping[str, float]
    """Standard deviation of each of `FIGURES` over the seeds."""
    notes: tuple[str, ...] = ()
    """Assumptions of the figures beside the records."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error of each of `FIGURES` in the prediction of the run itself, as far as it is known."""

    def value(self, figure: str) -> float:
        """A figure of the run."""
        number: float = getattr(self.result, figure)
        return number

    @property
    def has_prices(self) -> bool:
        """Whether a machine has a price, so that a cost means something."""
        return any(group.get("price") for group in self.result.settings["machines"])

    def keeps(self, deadline_s: float | None, budget: float | None) -> bool:
        """Whether the run comes to its end within a time and a cost; None without a limit."""
        if self.result.failure is not None:
            return False
        in_time = deadline_s is None or self.result.time_s <= deadline_s
        within_budget = budget is None or (self.has_prices and self.result.cost <= budget)
        return in_time and within_budget

    def uncertainty(self, figure: str) -> float:
        """Uncertainty of a figure, in its own unit."""
        return hypot(self.spread[figure], self.errors.get(figure, 0.0) * self.value(figure))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Predictions that start from one run."""

    fit: Calibration
    recorded: Prediction
    """The run as it was."""
    rounds: tuple[Compared, ...]
    """Time of each round."""
    totals: tuple[Compared, ...]
    """Figures of all rounds that took place."""
    trials: tuple[Prediction, ...]

    @property
    def all(self) -> tuple[Prediction, ...]:
        """The prediction of the run itself, and those of the trials."""
        return (self.recorded, *self.trials)


def predict(
    fit: Calibration,
    folder: Path,
    trials: Sequence[Trial],
    sizes_of: SizesOf,
    on_setting: Callable[[str], None] | None = None,
) -> WhatIf:
    """Simulate a run as it was and with each trial's settings.

    Args:
        fit: the run.
        folder: its directory.
        trials: other settings.
        sizes_of: gives sizes that the records lack.
        on_setting: called with the label of each setting before it is simulated.

    Raises:
        ConfigError: a trial names no key of the job file or the scenario, has a wrong value, or can't be told.

    """
    scenarios = list(_scenarios(fit, folder, trials, sizes_of))
    """Checked as a whole before the first simulation begins."""
    predictions: list[Prediction] = []
    for label, of_seeds, notes in scenarios:
        if on_setting is not None:
            on_setting(label)
        results = list(map(simulate_recorded, of_seeds))
        predictions.append(_prediction(label, results, notes))
    totals = _totals(fit, predictions[0].result)
    errors: dict[str, float] = {}
    for row in totals:
        if row.error is not None:
            errors[row.name] = abs(row.error)
    recorded, *of_trials = [replace(prediction, errors=errors) for prediction in predictions]
    return WhatIf(
        fit=fit,
        recorded=recorded,
        rounds=_rounds(fit, recorded.result),
        totals=totals,
        trials=tuple(of_trials),
    )


def _scenarios(
    fit: Calibration, folder: Path, trials: Sequence[Trial], sizes_of: SizesOf
) -> Iterator[tuple[str, list[RecordedScenario], list[str]]]:
    """Label, scenarios of all seeds, and notes of the run itself and of each trial."""
    for trial in (Trial(AS_RECORDED), *trials):
        job = fit.job
        if trial.job:
            job = load([f"@{folder / CONFIG}", *trial.flags], option="--try").job
        require_told(trial.job)
        sizes = sizes_of(job)
        of_seeds: list[RecordedScenario] = []
        for seed in range(SEEDS):
            scenario = scenario_of(fit, job, sizes, seed)
            scenario = with_scenario_keys(scenario, trial.scenario)
            check_scenario(scenario, folder, ".".join)
            of_seeds.append(scenario)
        yield trial.text, of_seeds, scenario_notes(fit, job, sizes)


def _prediction(label: str, results: Sequence[SimulationResult], notes: Sequence[str]) -> Prediction:
    by_time = sorted(map(_with_recorded_bytes, results), key=attrgetter("time_s"))
    middle = by_time[len(by_time) // 2]
    spread: dict[str, float] = {}
    for figure in FIGURES:
        spread[figure] = pstdev(map(attrgetter(figure), by_time))
    return Prediction(label, middle, spread, (*notes, *middle.notes))


def _with_recorded_bytes(result: SimulationResult) -> SimulationResult:
    """The result with bytes as a run's records count them: the first weights of a worker are in no round."""
    up = sum(map(itemgetter("bytes_up"), result.round_metrics))
    down = sum(map(itemgetter("bytes_down"), result.round_metrics))
    return replace(result, bytes_up=up, bytes_down=down)


# ── against what took place ───────────────────────────────────────────────────────────────────────────────────────────


def _rounds(fit: Calibration, result: SimulationResult) -> tuple[Compared, ...]:
    """Time of each round that is in both."""
    rows: list[Compared] = []
    for actual, record in _in_both(fit, result):
        rows.append(Compared(str(actual.number + 1), record["time_s"], actual.time_s))
    return tuple(rows)


def _totals(fit: Calibration, result: SimulationResult) -> tuple[Compared, ...]:
    """Figures of the rounds that took place; cost only if the run had prices and has ended."""
    pairs = list(_in_both(fit, result))
    if not pairs:
        return ()
    last_record = pairs[-1][1]
    rows = [Compared("time_s", last_record["elapsed_s"], fit.seconds)]
    for figure in SUMMED:
        predicted = 0.0
        actual = 0.0
        for actual_round, record in pairs:
            predicted += record[figure]
            actual += getattr(actual_round, figure)
        count = len(pairs) if figure == "idle_fraction" else 1
        rows.append(Compared(figure, predicted / count, actual / count))
    if fit.cost is not None and len(fit.rounds) == fit.job.rounds.update_rounds:
        rows.append(Compared("cost", result.cost, fit.cost))
    return tuple(rows)


def _in_both(fit: Calibration, result: SimulationResult) -> Iterator[tuple[ActualRound, Mapping[str, Any]]]:
    """Rounds that took place, each with its record of the simulation."""
    predicted: dict[int, Mapping[str, Any]] = {}
    for record in result.round_metrics:
        predicted[record["round"]] = record
    for actual in fit.rounds:
        if actual.number in predicted:
            yield actual, predicted[actual.number]


# ── the choice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def best(predictions: Sequence[Prediction], deadline_s: float | None, budget: float | None) -> Prediction | None:
    """The fastest prediction within the limits, or with a deadline and prices the cheapest; None if none is within."""
    within: list[Prediction] = []
    for prediction in predictions:
        if prediction.keeps(deadline_s, budget):
            within.append(prediction)
    if not within:
        return None
    fastest = min(within, key=attrgetter("result.time_s"))
    if deadline_s is None or not all(map(attrgetter("has_prices"), within)):
        return fastest
    return min(within, key=attrgetter("result.cost", "result.time_s"))
