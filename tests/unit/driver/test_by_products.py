"""By-products of a run: one that fails is told, and the run is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypha_ray.driver.forks import draw_plots
from tests.support.fleet import fleet_records


@pytest.mark.parametrize("rounds", [True, False])
def test_plots_that_cannot_be_drawn_are_told_and_end_no_run(rounds: bool, tmp_path: Path) -> None:
    records = fleet_records() if rounds else []
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    (tmp_path / "plots").touch()

    (note,) = draw_plots(tmp_path)

    assert note.startswith("the plots were not drawn: error[DATA044]")
