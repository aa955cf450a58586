"""Plots are drawn in another process; whatever happens to that one, they are there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hypha_ray.driver import forks
from hypha_ray.driver.forks import PlotService
from tests.support.fleet import fleet_records


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with rounds to plot."""
    lines = "".join(f"{json.dumps(record)}\n" for record in fleet_records())
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlotService]:
    """A process; this one can't draw until it is undone."""
    monkeypatch.setattr(forks, "is_forkable", lambda: True)
    with closing(PlotService()) as process:
        yield process


def drawn(run: Path) -> set[str]:
    return {path.name for path in (run / "plots").iterdir()}


@pytest.mark.slow
def test_plots_are_drawn_by_the_other_process_once(
    run: Path, plots: PlotService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(forks, "draw_plots")
    plots.load()
    plots.draw(run)
    plots.draw(run)
    assert plots.notes(run) == []
    assert {"loss.png", "batches.png", "utilisation.png"} <= drawn(run)


@pytest.mark.slow
def test_plots_are_drawn_here_if_the_other_process_has_died(run: Path, plots: PlotService) -> None:
    assert plots.pid is not None
    os.kill(plots.pid, signal.SIGKILL)
    plots.load()
    assert plots.notes(run) == []
    assert "loss.png" in drawn(run)


@pytest.mark.slow
@pytest.mark.parametrize(("may_fork", "is_forkable"), [(True, False), (False, True)])
def test_plots_are_drawn_here_if_this_process_may_not_be_forked(
    run: Path, monkeypatch: pytest.MonkeyPatch, may_fork: bool, is_forkable: bool
) -> None:
    monkeypatch.setattr(forks, "is_forkable", lambda: is_forkable)
    with closing(PlotService(may_fork)) as plots:
        assert plots.pid is None
        plots.draw(run)
        assert not (run / "plots").exists()
        assert plots.notes(run) == []
    assert "loss.png" in drawn(run)


def test_note_of_the_other_process_is_returned(plots: PlotService, tmp_path: Path) -> None:
    (note,) = plots.notes(tmp_path)
    assert note.startswith("the plots were not drawn: error[DATA044]")


def test_process_ends_by_itself_once_its_driver_is_gone(plots: PlotService) -> None:
    assert plots.pid is not None and plots._socket is not None
    plots._socket.close()
    assert os.waitpid(plots.pid, 0) == (plots.pid, 0)


def test_closed_process_is_gone(plots: PlotService) -> None:
    pid = plots.pid
    plots.close()
    assert pid is not None and not Path(f"/proc/{pid}").exists()
