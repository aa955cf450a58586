"""One plot with the curves of several runs, by samples and by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from typing import TYPE_CHECKING

from hypha_ray.telemetry.plots import PALETTE, by_progress, marker_for, panels, place_panels, style
from hypha_ray.telemetry.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BETWEEN_ROWS_IN = 0.95
"""Space between rows of panels, each with its own axes and titles, in inches."""


def draw_curves(series_by_run: Mapping[str, Series], runs_by_figure: Mapping[str, Sequence[str]]) -> bytes:
    """Draw the training figures and evaluations of runs, a colour for each run.

    Args:
        series_by_run: rounds and evaluations by the names of the runs.
        runs_by_figure: names of the runs that have a training figure, by that; each figure has two panels.

    Returns:
        A PNG.

    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    colours = dict(zip(series_by_run, cycle(PALETTE), strict=False))
    with style():
        figure, axes = panels("Runs side by side", rows=len(runs_by_figure), columns=2, height=4)
        for row, (name, runs) in enumerate(runs_by_figure.items()):
            pair = axes[2 * row], axes[2 * row + 1]
            for run in runs:
                draw_run(pair, series_by_run[run], name, run, colours[run])
            by_progress(*pair, name)
        canvas = FigureCanvasAgg(figure)
        place_panels(canvas, BETWEEN_ROWS_IN)
        picture = BytesIO()
        figure.savefig(picture, format="png")
    return picture.getvalue()


def draw_run(pair: tuple[Axes, Axes], series: Series, name: str, run: str, colour: str) -> None:
    """Draw a run's training dashed and its evaluations solid, by samples and by time.

    Labels don't begin with the run's name, since matplotlib leaves out those that begin with an underscore.
    """
    samples = series.column("samples_total")
    values = [float(record[series.objective.name]) for record in series.evaluations]
    for axes, totals in zip(pair, (samples, series.seconds), strict=True):
        mark = marker_for(len(totals))
        axes.plot(
            totals, series.column(name), color=colour, marker=mark, ms=4, ls="--", lw=1, label=f"training of {run}"
        )
        if values:
            progress = [series.total_after(totals, int(record["round"])) for record in series.evaluations]
            axes.plot(
                progress, values, color=colour, marker=marker_for(len(values)), ms=4, label=f"validation of {run}"
            )
