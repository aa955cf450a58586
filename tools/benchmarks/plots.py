"""Plots of a benchmark table: each is drawn if its rows are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.telemetry.plots import BLUE, GREY, ORANGE, PALETTE, RED, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Mapping[str, Mapping[str, Any]]


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Write a picture for each group of rows that was measured; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, (plot, size) in _PLOTS.items():
        with matplotlib.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=size, layout="constrained")
            if plot(axes, rows):
                files.append(folder / f"{name}.svg")
                figure.savefig(files[-1], metadata={"Date": None})
            pyplot.close(figure)
    return files


def _quality(axes: Axes, rows: Rows) -> bool:
    """Validation loss over that of synchronous training, in percent above it."""
    names = {
        "quality": "DiLoCo ÷ AdamW",
        "quality_alone": "one worker ÷ AdamW",
        "quality_muon": "MuLoCo ÷ Muon",
        "quality_muon_alone": "one worker ÷ Muon",
    }
    measured = [row for row in reversed(names) if row in rows]
    for y, row in enumerate(measured):
        above = 100 * (rows[row]["value"] - 1)
        color = GREY if row.endswith("alone") else BLUE
        axes.barh(y, above, color=color, height=0.6)
        traffic = rows[row].get("traffic", "nothing sent")
        axes.annotate(f" {above:.1f} %, {traffic}", (max(above, 0.0), y), va="center")
    axes.axvline(2, color=RED, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(measured)), [names[row] for row in measured])
    axes.set_xlabel("validation loss above that of synchronous training, %; traffic over its traffic")
    axes.set_title("What rare and coded exchanges cost")
    axes.margins(x=0.3)
    axes.grid(axis="y", visible=False)
    return bool(measured)


def _exchange(axes: Axes, rows: Rows) -> bool:
    """Time of an exchange over that of other ways, by size."""
    sizes = []
    for row in rows:
        if row.startswith("sync_") and row.count("_") == 2:
            sizes.append(row.removeprefix("sync_"))
    if not sizes:
        return False
    labels = {"sync": "copying", "sync_gloo": "gloo", "sync_torchft": "torchft", "sync_hivemind": "hivemind"}
    for number, (method, label) in enumerate(labels.items()):
        positions = []
        ratios = []
        for position, size in enumerate(sizes):
            row = f"{method}_{size}"
            if row in rows:
                positions.append(position + (number - 1.5) * 0.2)
                ratios.append(rows[row]["value"])
        if not ratios:
            continue
        bars = axes.bar(positions, ratios, 0.18, color=PALETTE[number])
        bars.set_label(label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color=GREY, linewidth=1)
    ticks = []
    for size in sizes:
        text = size.replace("M_", " M parameters,\n")
        ticks.append(f"{text} workers")
    axes.set_xticks(range(len(sizes)), ticks)
    axes.set_ylabel("time of an exchange ÷ that of")
    axes.set_title("From the last delta to new weights in every worker")
    axes.legend(ncols=4, loc="upper left")
    axes.margins(y=0.25)
    axes.grid(axis="x", visible=False)
    return True


def _time_to_loss(axes: Axes, rows: Rows) -> bool:
    """Validation loss against time, on the throttled link."""
    row = rows.get("time_to_loss")
    if row is None:
        return False
    for key, label, color in (("ours_curve", "DiLoCo", BLUE), ("ddp_curve", "Ray Train, DDP over gloo", ORANGE)):
        seconds, losses = zip(*row[key], strict=True)
        axes.plot(seconds, losses, color=color, label=label, marker=".")
    axes.axhline(row["loss"], color=GREY, linewidth=1, linestyle="--")
    axes.set_xlabel(f"seconds, over links of {row['mbit_s']:g} Mbit/s")
    axes.set_ylabel("validation loss, nats a byte")
    axes.set_title("The same model and samples on the same workers")
    axes.legend()
    return True


def _asynchrony(axes: Axes, rows: Rows) -> bool:
    """Loss over that of a barrier, against time over its time: lower left is better."""
    names = {
        "asynchrony": ("asynchronous, delayed Nesterov", BLUE, "o"),
        "asynchrony_naive": ("asynchronous, plain", ORANGE, "s"),
        "asynchrony_planned": ("barrier, batches planned", GREY, "D"),
    }
    measured = [row for row in names if row in rows]
    for row in measured:
        label, color, marker = names[row]
        loss = rows[f"{row}_loss"]["value"]
        axes.plot(rows[row]["value"], loss, marker, color=color, markersize=8, label=label)
    axes.plot(1, 1, "x", color=RED, markersize=8, label="barrier, equal batches")
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("time over that of a barrier")
    axes.set_ylabel("loss over its loss")
    axes.set_title("Four workers that take 0.12 to 0.67 s a batch")
    axes.legend(loc="lower right")
    axes.margins(y=0.2)
    return bool(measured)


def _overlap(axes: Axes, rows: Rows) -> bool:
    """Part of the time in which workers train."""
    names = {
        "overlap_none": "wait for the exchange",
        "overlap": "fragments in turn, going on meanwhile",
        "overlap_one_in_flight": "the same, exchanges of 1.5 rounds",
        "overlap_three_in_flight": "up to three of these at a time",
    }
    measured = [row for row in reversed(names) if row in rows]
    ours = ("overlap", "overlap_three_in_flight")
    for y, row in enumerate(measured):
        part = rows[row]["value"]
        axes.barh(y, part, color=BLUE if row in ours else GREY, height=0.6)
        axes.annotate(f" {part:.3f}", (part, y), va="center")
    axes.set_yticks(range(len(measured)), [names[row] for row in measured])
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("part of the time in which workers train")
    axes.set_title("On a link on which an exchange takes half a round, or one and a half")
    axes.grid(axis="y", visible=False)
    return bool(measured)


_PLOTS: dict[str, tuple[Callable[[Axes, Rows], bool], tuple[float, float]]] = {
    "quality": (_quality, (7.5, 2.6)),
    "exchange": (_exchange, (7.5, 3.4)),
    "time_to_loss": (_time_to_loss, (7.5, 3.2)),
    "overlap": (_overlap, (7.5, 2.6)),
    "asynchrony": (_asynchrony, (7.5, 2.8)),
}
