"""Predictions of a run from its own records, as it was and with other settings; as text for a console, and as JSON.

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
from statistics import median, pstdev
from typing import Any, Final

from hypha_ray.config import Job
from hypha_ray.config.load import CONFIG, load
from hypha_ray.config.no_effect import require_told
from hypha_ray.simulation.calibration import ActualRound, Calibration
from hypha_ray.simulation.options import Trial, with_scenario_keys
from hypha_ray.simulation.result import DIGITS, HEADLINE, SimulationResult
from hypha_ray.simulation.run_scenario import (
    DataSize,
    RecordedScenario,
    scenario_notes,
    scenario_of,
    simulate_recorded,
)
from hypha_ray.simulation.scenario_file import check_scenario
from hypha_ray.texts import counted

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
SHOWN_ROUNDS: Final = 12
"""Most rounds with a line of their own; of more, so many at even distances are shown."""
LONGEST_LABEL: Final = 48
"""Most characters of settings in a table's row."""
_TIMES: Final = ((3 * 3600.0, "h", 3600.0), (600.0, "min", 60.0), (0.0, "s", 1.0))
"""Units of times: the least time in seconds for which they are used, their name and their seconds."""
_SIZES: Final = ((1e9, "GB", 1e9), (1e6, "MB", 1e6), (1e3, "kB", 1e3), (0.0, "B", 1.0))
"""Units of sizes: the least size in bytes for which they are used, their name and their bytes."""
_NAMES: Final = {"time_s": "time", "bytes_up": "up", "bytes_down": "down", "idle_fraction": "idle", "cost": "cost"}
"""Titles of figures."""


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
    recorded_prediction, *of_trials = [replace(prediction, errors=errors) for prediction in predictions]
    return WhatIf(
        fit=fit,
        recorded=recorded_prediction,
        rounds=_rounds(fit, recorded_prediction.result),
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
        require_told(trial.job, job)
        sizes = sizes_of(job)
        of_seeds: list[RecordedScenario] = []
        for seed in range(SEEDS):
            scenario = scenario_of(fit, job, sizes, seed)
            scenario = with_scenario_keys(scenario, trial.scenario)
            of_seeds.append(check_scenario(scenario, Path(), ".".join))
        yield trial.text, of_seeds, scenario_notes(fit, job, sizes)


def _prediction(label: str, results: Sequence[SimulationResult], notes: Sequence[str]) -> Prediction:
    by_time = sorted(map(_with_recorded_bytes, results), key=attrgetter("time_s"))
    median_result = by_time[len(by_time) // 2]
    spread: dict[str, float] = {}
    for figure in FIGURES:
        spread[figure] = pstdev(map(attrgetter(figure), by_time))
    return Prediction(label, median_result, spread, (*notes, *median_result.notes))


def _with_recorded_bytes(result: SimulationResult) -> SimulationResult:
    """The result with bytes as a run's records count them: the first weights of a worker are in no round."""
    up_bytes = sum(map(itemgetter("bytes_up"), result.round_metrics))
    down_bytes = sum(map(itemgetter("bytes_down"), result.round_metrics))
    return replace(result, bytes_up=up_bytes, bytes_down=down_bytes)


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
    if fit.cost is not None and len(fit.rounds) == result.rounds:
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
    """The fastest prediction within the limits, or with a deadline and prices the cheapest; None if all exceed them."""
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


def lines(what_if: WhatIf, deadline_s: float | None, budget: float | None) -> Iterator[str]:
    """Lines for a console.

    Args:
        what_if: the predictions.
        deadline_s: longest time in seconds; None without a limit.
        budget: highest cost; None without a limit.

    """
    yield HEADLINE
    yield from _comparison(what_if)
    yield ""
    yield from _table(what_if)
    yield ""
    yield _meaning(what_if)
    yield _choice(what_if, deadline_s, budget)
    for prediction in what_if.all:
        for note in prediction.notes:
            yield f"{prediction.label}: {note}"


def as_json(what_if: WhatIf) -> list[dict[str, Any]]:
    """Results with their uncertainties; that of the run itself comes first, and has the actual figures beside it."""
    rows: list[dict[str, Any]] = []
    for prediction in what_if.all:
        row = prediction.result.as_json()
        del row["bytes_slices"]  # No record has them.
        row["try"] = prediction.label
        row["uncertainty"] = {figure: _rounded(prediction.uncertainty(figure)) for figure in FIGURES}
        row["notes"] = list(prediction.notes)
        if not prediction.has_prices:
            row["cost"] = row["uncertainty"]["cost"] = None
        rows.append(row)
    rows[0]["compared"] = {row.name: _compared(row) for row in what_if.totals}
    rows[0]["compared_round_s"] = [_compared(row) for row in what_if.rounds]
    return rows


def _compared(row: Compared) -> dict[str, Any]:
    error = None if row.error is None else _rounded(row.error)
    return {"predicted": _rounded(row.predicted), "actual": _rounded(row.actual), "error": error}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# ── what took place ───────────────────────────────────────────────────────────────────────────────────────────────────


def _comparison(what_if: WhatIf) -> Iterator[str]:
    """Predicted and actual figures, by round and in total."""
    rows = [("round", "predicted", "actual", "error")]
    for row in _some(what_if.rounds):
        rows.append(_row(row.name, row, "time_s"))
    for row in what_if.totals:
        rows.append(_row(f"total {_NAMES[row.name]}", row, row.name))
    yield from _aligned(rows)
    errors: list[float] = []
    for row in what_if.rounds:
        if row.error is not None:
            errors.append(abs(row.error))
    if errors:
        rounds_text = counted(len(errors), "round")
        yield f"median error of a round's time: {median(errors):.1%}, largest: {max(errors):.1%} ({rounds_text})"


def _some(rows: Sequence[Compared]) -> Sequence[Compared]:
    """All rows, or as many as are shown, at even distances."""
    if len(rows) <= SHOWN_ROUNDS:
        return rows
    shown_rounds: list[Compared] = []
    for round_number in range(SHOWN_ROUNDS):
        index = round((len(rows) - 1) * round_number / (SHOWN_ROUNDS - 1))
        shown_rounds.append(rows[index])
    return shown_rounds


def _row(label: str, row: Compared, figure: str) -> tuple[str, str, str, str]:
    error = "" if row.error is None else f"{row.error:+.1%}"
    return label, _text(figure, row.predicted), _text(figure, row.actual), error


# ── the trials ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _table(what_if: WhatIf) -> Iterator[str]:
    """Predicted figures of the run and of all trials, with their uncertainties."""
    rows = [["settings", *map(_NAMES.__getitem__, FIGURES), "rounds"]]
    for prediction in what_if.all:
        row = [_short(prediction.label)]
        for figure in FIGURES:
            row.append(_with_uncertainty(prediction, figure))
        row.append(str(prediction.result.rounds))
        rows.append(row)
    yield from _aligned(rows)
    for prediction in what_if.all:
        if prediction.result.failure is not None:
            yield f"{prediction.label}: ends early: {prediction.result.failure}"


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def _with_uncertainty(prediction: Prediction, figure: str) -> str:
    if figure == "cost" and not prediction.has_prices:
        return "-"
    return _text(figure, prediction.value(figure), prediction.uncertainty(figure))


def _meaning(what_if: WhatIf) -> str:
    shown_errors: list[str] = []
    for row in what_if.totals:
        if row.error is not None:
            shown_errors.append(f"{_NAMES[row.name]} {abs(row.error):.1%}")
    errors_text = ", ".join(shown_errors)
    return (
        f"±: standard deviation over {SEEDS} seeds, and the error of the prediction of the run itself ({errors_text}), "
        "as the root of the sum of squares; time is from the start of the workers to the last commit"
    )


def _choice(what_if: WhatIf, deadline_s: float | None, budget: float | None) -> str:
    limits: list[str] = []
    if deadline_s is not None:
        limits.append(f"within {_text('time_s', deadline_s)}")
    if budget is not None:
        limits.append(f"for at most {_text('cost', budget)}")
    best_prediction = best(what_if.all, deadline_s, budget)
    if best_prediction is None:
        return f"best: none of these ends {' and '.join(limits)}" if limits else "best: none of these comes to its end"
    reason = " and ".join(limits) or "the fastest"
    return f"best: {best_prediction.label} ({reason}): {_with_uncertainty(best_prediction, 'time_s')}"


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(figure: str, value: float, uncertainty: float | None = None) -> str:
    """A figure with its unit, and its uncertainty in the same unit."""
    digits = 2
    if figure == "time_s":
        unit, scale = _unit(_TIMES, value)
    elif figure.startswith("bytes"):
        unit, scale = _unit(_SIZES, value)
    elif figure == "idle_fraction":
        unit = "%"
        scale = 0.01
        digits = 1
    else:
        unit = ""
        scale = 1.0
        if 0 < value < 1:
            digits = 4
    text = f"{value / scale:.{digits}f}"
    if uncertainty is not None:
        text += f" ± {uncertainty / scale:.{digits}f}"
    return f"{text} {unit}".rstrip()


def _unit(units: Sequence[tuple[float, str, float]], value: float) -> tuple[str, float]:
    """Name and size of the first unit that a value isn't too small for."""
    for least, name, scale in units:
        if value >= least:
            return name, scale
    raise ValueError(f"{value} is less than 0")


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with columns of equal width: the first to the left, the others to the right."""
    widths = [0] * len(rows[0])
    for row in rows:
        widths = list(map(max, widths, map(len, row)))
    for first, *figures in rows:
        cells = map(str.rjust, figures, widths[1:])
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
