"""Asynchronous training against rounds with a barrier, on workers as unequal as those of the paper (arXiv 2401.09135).

Four workers take 0.58, 0.75, 1.51 and 3.33 s a step there, and a fifth of that here. They sleep for most of a step, so
they are equally unequal on any machine. All runs use equally many samples, but for a few batches at the end of rounds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.launch import records
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.store.directory import RunDirectory

BATCH_S = (0.116, 0.15, 0.302, 0.666)
ROUNDS = 40
STEPS = 12
BATCH_SIZE = 8
SEQ_LEN = 64
"""`STEPS` is of each worker in a round, where all have equally many."""
SEEDS = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "barrier": {"dynamic_local_steps": False},
    "planned": {},
    "naive": {"strategy": "async", "dynamic_local_steps": False, "delayed_nesterov": False},
    "delayed": {"strategy": "async"},
}
"""Equal batches and a barrier; batches by the planner and a barrier; neither barrier nor anything else; all of it."""
_TARGETS = {"": ("< 0.6", "<= 1.01"), "_naive": ("-", "-"), "_planned": ("-", "-")}
_RUNS = {"": "delayed", "_naive": "naive", "_planned": "planned"}
ROWS = tuple(f"asynchrony{kind}{figure}" for kind in _TARGETS for figure in ("", "_loss"))
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


def asynchrony() -> dict[str, dict[str, Any]]:
    """Time and validation loss of asynchronous runs, over those of runs with a barrier and equal batches."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = Path(scratch) / "corpus"
        prepare(PrepareOptions("stdlib", str(dataset), seq_len=SEQ_LEN, max_samples=40_000), lambda kind, count: None)
        for seed in range(SEEDS):
            for name, sync in VARIANTS.items():
                job = _job(f"{name}-{seed}", seed, dataset, sync)
                runs[name].append(_run(job, Path(scratch), dataset))
    times = {name: mean(seconds for seconds, _ in runs_of_seeds) for name, runs_of_seeds in runs.items()}
    losses = {name: mean(loss for _, loss in runs_of_seeds) for name, runs_of_seeds in runs.items()}
    conditions = {"workers": len(BATCH_S), "rounds": ROUNDS, "steps": STEPS, "seeds": SEEDS}
    rows: dict[str, dict[str, Any]] = {}
    for kind, (time, loss) in _TARGETS.items():
        row = f"asynchrony{kind}"
        name = _RUNS[kind]
        seconds = {"seconds": round(times[name], 1), "barrier": round(times["barrier"], 1)}
        rows[row] = {"value": times[name] / times["barrier"], "target": time, **seconds, **conditions}
        spread = {f"seed_{seed}": round(seed_loss, 4) for seed, (_, seed_loss) in enumerate(runs[name])}
        figures = {"loss": round(losses[name], 4), "barrier": round(losses["barrier"], 4), **spread}
        rows[f"{row}_loss"] = {"value": losses[name] / losses["barrier"], "target": loss, **figures, **conditions}
    return rows


def _job(name: str, seed: int, dataset: Path, sync: dict[str, Any]) -> Job:
    samples = len(BATCH_S) * STEPS * BATCH_SIZE
    rounds = {"update_rounds": ROUNDS, "samples_between_updates": samples, "max_batch_size": BATCH_SIZE}
    tables = {
        "run": {"name": name, "seed": seed},
        "model": {"config": _MODEL},
        "dataset": {"path": str(dataset)},
        "rounds": {**rounds, "evaluate_every": 0},
        "inner_optimizer": {"learning_rate": 3e-3, "schedule": "cosine-with-warmup", "warmup_steps": 20},
        "outer_optimizer": {"learning_rate": 0.7, "momentum": 0.8},
        "sync": sync,
        "resources": {
            "num_workers": len(BATCH_S),
            "min_workers": len(BATCH_S),
            "worker": {"cpu": 0.25},
            "start_deadline_s": 600.0,
        },
        "worker": {"report_every_s": 0.5},
        "telemetry": {"sinks": ["jsonl"]},
        "testing": {"batch_times_s": list(BATCH_S)},
    }
    return Job.model_validate(tables)


def _run(job: Job, parent: Path, dataset: Path) -> tuple[float, float]:
    """Seconds of training, and the validation loss at its end."""
    name = str(job.run.name)
    directory = RunDirectory.create(parent, name, resolved_toml(job))
    run_records = list(records(job, name, directory, in_folder(dataset)))
    rounds = [record for record in run_records if record["kind"] == "round"]
    (loss,) = (record["val_loss"] for record in run_records if record["kind"] == "eval")
    return rounds[-1]["elapsed_s"], loss
