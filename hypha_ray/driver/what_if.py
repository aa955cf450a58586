"""Command `simulate --from RUN`: a run as its own records predict it, and with other settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hypha_ray.config.cli.output import Phases
from hypha_ray.driver.run_sizes import RunSizes
from hypha_ray.errors import ConfigError
from hypha_ray.history.find import existing_run
from hypha_ray.simulation.calibration import Calibration, calibrate
from hypha_ray.simulation.result import write_rows
from hypha_ray.simulation.what_if.predictions import predict
from hypha_ray.simulation.what_if.table import as_json, lines
from hypha_ray.simulation.what_if.trials import Trial, parse_duration_s, parse_trials


def answers(
    run: str,
    tries: Sequence[str] = (),
    deadline: str | None = None,
    budget: float | None = None,
    file: Path | None = None,
) -> Iterator[str]:
    """Lines for a console; the JSON file is written before the first of them.

    Args:
        run: name or directory of the run.
        tries: settings as KEY=VALUE[,KEY=VALUE…], one text for each row.
        deadline: longest time, such as 6h; None without a limit.
        budget: highest cost; None without a limit.
        file: JSON file for the results; None: none is written.

    Raises:
        CheckpointError: CKPT001, there is no such run; SIM001, it is too short.
        ConfigError: a setting or a limit is wrong, or the run can't tell its effect.

    """
    trials = parse_trials(tries)
    deadline_s = None if deadline is None else parse_duration_s(deadline)
    folder = existing_run(run, None)
    fit = calibrate(folder)
    _check_budget(budget, fit, trials)
    phases = Phases()
    what_if = predict(fit, folder, trials, RunSizes(folder), lambda label: phases.begin(f"simulating: {label}"))
    phases.end()
    if file is not None:
        write_rows(as_json(what_if), file)
    yield from lines(what_if, deadline_s, budget)


def _check_budget(budget: float | None, fit: Calibration, trials: Sequence[Trial]) -> None:
    """Refuse a budget that no cost can be held against.

    Raises:
        ConfigError: CFG003, it isn't above 0; CFG011, no machine has a price.

    """
    if budget is None:
        return
    if not budget > 0:
        raise ConfigError("CFG003", "--budget is out of range", str(budget), "a number above 0", "give a price")
    priced_keys = [key for trial in trials for key, _ in trial.scenario if key.endswith(".price")]
    if not priced_keys and not any(worker.price for worker in fit.workers):
        problem = "--budget needs prices, and no lease of the run has one"
        raise ConfigError("CFG011", problem, fix="give prices per hour, as --try machines.price=2.5, or leave it out")
