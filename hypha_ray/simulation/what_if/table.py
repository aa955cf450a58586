"""Predictions of a run as text for a console, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

from hypha_ray.simulation.result import DIGITS, HEADLINE
from hypha_ray.simulation.what_if.predictions import FIGURES, SEEDS, Compared, Prediction, WhatIf, best
from hypha_ray.texts import counted

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


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


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
        rounds = counted(len(errors), "round")
        yield f"median error of a round's time: {median(errors):.1%}, largest: {max(errors):.1%} ({rounds})"


def _some(rows: Sequence[Compared]) -> Sequence[Compared]:
    """All rows, or as many as are shown, at even distances."""
    if len(rows) <= SHOWN_ROUNDS:
        return rows
    shown: list[Compared] = []
    for number in range(SHOWN_ROUNDS):
        index = round((len(rows) - 1) * number / (SHOWN_ROUNDS - 1))
        shown.append(rows[index])
    return shown


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
    errors = ", ".join(shown_errors)
    return (
        f"±: standard deviation over {SEEDS} seeds, and the error of the prediction of the run itself ({errors}), "
        "as the root of the sum of squares; time is from the start of the workers to the last commit"
    )


def _choice(what_if: WhatIf, deadline_s: float | None, budget: float | None) -> str:
    limits: list[str] = []
    if deadline_s is not None:
        limits.append(f"within {_text('time_s', deadline_s)}")
    if budget is not None:
        limits.append(f"for at most {_text('cost', budget)}")
    chosen = best(what_if.all, deadline_s, budget)
    if chosen is None:
        return f"best: none of these ends {' and '.join(limits)}" if limits else "best: none of these comes to its end"
    reason = " and ".join(limits) or "the fastest"
    return f"best: {chosen.label} ({reason}): {_with_uncertainty(chosen, 'time_s')}"


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
