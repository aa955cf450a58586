"""Error of predictions: one run of two workers is recorded, and runs with other settings are predicted from it.

Batches last a fixed time, for the most part asleep, so that workers don't wait for a core. Then each of the predicted
runs takes place, and its time and bytes are compared with the prediction.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hypha_ray.config.load import from_tables, load, resolved_toml
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.driver.launch import run_job
from hypha_ray.driver.what_if import RunSizes
from hypha_ray.simulation.calibration import Calibration, calibrate
from hypha_ray.simulation.options import parse_trial
from hypha_ray.simulation.predictions import Prediction, predict

BATCH_S = 0.4
ROUNDS = 24
"""Rounds of each run, most of which take two minutes."""
SAMPLES = 192
"""Samples of a round: 12 batches of each worker."""
BATCH_SIZE = 8
SEQ_LEN = 64
TRIALS: Mapping[str, str] = {
    "codec": "sync.codec=int4",
    "codecs": "sync.codec=int8,sync.downward_codec=int8",
    "unequal": f"testing.batch_times_s=[{BATCH_S}, {2 * BATCH_S}]",
    "short": f"rounds.samples_between_updates={SAMPLES // 2}",
    "fragments": "sync.fragments=2",
    "killed": 'testing.failpoints=["worker.step:1=kill@40"]',
    "evaluations": "rounds.evaluate_every=4",
}
"""Names of predicted runs, and their settings."""
TARGETS = {"time_s": 0.10, "bytes_up": 0.01, "bytes_down": 0.01}
"""Largest median error of each figure."""
ROWS = ("prediction", "prediction_bytes_up", "prediction_bytes_down")
_MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A predicted run, and the same run as it took place."""

    predicted: Prediction
    actual: Calibration

    def error(self, figure: str) -> float:
        """Relative error of a figure of all rounds, without its sign; times leave the start of the workers out."""
        if figure == "time_s":
            predicted = self.predicted.result.round_metrics[-1]["elapsed_s"]
            actual = self.actual.seconds
        else:
            predicted = self.predicted.value(figure)
            actual = sum(getattr(record, figure) for record in self.actual.rounds)
        return float(abs(predicted / actual - 1))


def prediction() -> dict[str, dict[str, Any]]:
    """Median relative error of time and bytes over the predicted runs."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = measured(Path(scratch))
    return rows_of(outcomes)


def measured(folder: Path) -> dict[str, Outcome]:
    """Run the job, predict all others from it, and run those."""
    dataset = folder / "corpus"
    prepare(PrepareOptions("stdlib", str(dataset), seq_len=SEQ_LEN, max_samples=8_000), lambda kind, count: None)
    base = _run(folder, dataset, "base", [])
    trials = {name: parse_trial(text) for name, text in TRIALS.items()}
    predicted = predict(calibrate(base), base, list(trials.values()), RunSizes(base))
    outcomes: dict[str, Outcome] = {}
    for (name, trial), guess in zip(trials.items(), predicted.trials, strict=True):
        actual = calibrate(_run(folder, dataset, name, trial.flags))
        outcomes[name] = Outcome(guess, actual)
        errors = ", ".join(f"{figure} {outcomes[name].error(figure):.1%}" for figure in TARGETS)
        print(f"{name}: {errors}", file=sys.stderr, flush=True)
    return outcomes


def rows_of(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Rows of the benchmark table."""
    rows: dict[str, dict[str, Any]] = {}
    for row, (figure, target) in zip(ROWS, TARGETS.items(), strict=True):
        errors = {name: outcome.error(figure) for name, outcome in outcomes.items()}
        shown = {name: f"{error:.1%}" for name, error in errors.items()}
        rows[row] = {"value": median(errors.values()), "target": f"<= {target}", **shown, "rounds": ROUNDS}
    return rows


def _run(folder: Path, dataset: Path, name: str, flags: list[str]) -> Path:
    """Run the job with other settings; return its directory."""
    file = folder / f"{name}.toml"
    file.write_text(resolved_toml(from_tables(_tables(folder, dataset, name))), encoding="utf-8")
    return run_job(load([f"@{file}", *flags]), "bench")


def _tables(folder: Path, dataset: Path, name: str) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": str(folder)},
        "model": {"config": _MODEL},
        "dataset": {"path": str(dataset)},
        "rounds": {"update_rounds": ROUNDS, "samples_between_updates": SAMPLES, "max_batch_size": BATCH_SIZE},
        "resources": {"num_workers": 2, "min_workers": 1, "worker": {"cpu": 0.5}},
        "telemetry": {"sinks": ["jsonl"], "plots": False},
        "testing": {"batch_times_s": [BATCH_S, BATCH_S], "failpoint_log": str(folder / f"{name}.hits")},
    }
