"""Time to the same validation loss over a throttled link: a job's, against Ray Train's with a gradient exchange a step.

Model, seed, data, batch, inner optimizer and validation are the same, and so are the nodes; both evaluate as often.
Times begin with the first batch: neither pays for the start of its processes.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.wide_area.links import Link, missing
from benchmarks.wide_area.nodes import JOBS, SERVER_ON_HEAD, Cluster, flags, linked
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import layout_of

LINK = Link(mbit_s=100, delay_s=0.005)
"""Link of every site, the head's too. From site to site it is twice as far."""
WORKERS = 2
STEPS = 32
"""Batches of a worker in a round, and between two evaluations."""
ROUNDS = 10
BATCH = 8
TARGET = 2.2
"""Nats a byte, on samples that were held out."""
TIMEOUT_S = 900.0
Curve = list[tuple[float, float]]
"""Seconds, and validation loss."""


def time_to_loss() -> dict[str, dict[str, Any]]:
    """Seconds until a DiLoCo job is at the target ÷ seconds until DistributedDataParallel is."""
    if reason := missing() or _no_ray_train():
        print(f"time_to_loss: skipped, {reason}", file=sys.stderr)
        return {}
    with linked(LINK, WORKERS, seq_len=128) as (cluster, dataset):
        ours = _ours(cluster, dataset)
        theirs = _theirs(cluster, dataset)
        model = build_model(load(_flags(dataset)).job.model, 0)
        size = layout_of(model).bytes()
    if ours["s"] is None or theirs["s"] is None:
        print(f"time_to_loss: no figure, a loss of {TARGET} wasn't reached: {ours}, {theirs}", file=sys.stderr)
        return {}
    conditions = {
        "loss": TARGET,
        "mbit_s": LINK.mbit_s,
        "round_trip_ms": round(4e3 * LINK.delay_s),
        "workers": WORKERS,
        "parameter_bytes": size,
        "batch": BATCH,
        "steps_between_updates": STEPS,
        **{f"ours_{key}": value for key, value in ours.items()},
        **{f"ddp_{key}": value for key, value in theirs.items()},
    }
    return {"time_to_loss": {"value": ours["s"] / theirs["s"], "target": "< 1", **conditions}}


def seconds_to(target: float, curve: Curve) -> float | None:
    """Time at which a curve reached the target, by linear interpolation; None if it never did."""
    for (before_s, before), (at_s, loss) in pairwise([(0.0, float("inf")), *curve]):
        if loss <= target:
            return at_s - (at_s - before_s) * (target - loss) / (before - loss)
    return None


def _ours(cluster: Cluster, dataset: Path) -> dict[str, Any]:
    """Figures of a job's run: its curve, the time to the target, and the bytes that all sites have sent."""
    before = _sent(cluster)
    records = cluster.job("ours", [*_flags(dataset), *SERVER_ON_HEAD], TIMEOUT_S)
    curve = [(record["elapsed_s"], record["val_loss"]) for record in records if record["kind"] == "eval"]
    return _run(curve, _sent(cluster) - before)


def _theirs(cluster: Cluster, dataset: Path) -> dict[str, Any]:
    """The same of Ray Train's."""
    file = cluster.folder / "job.toml"
    curve = cluster.folder / "ddp.jsonl"
    file.write_text(resolved_toml(load(_flags(dataset)).job), encoding="utf-8")
    before = _sent(cluster)
    arguments: list[str | Path] = [file, curve, str(STEPS), str(STEPS * ROUNDS), str(TARGET)]
    cluster.run([sys.executable, Path(__file__).with_name("ddp.py"), *arguments], TIMEOUT_S)
    points = map(json.loads, curve.read_text(encoding="utf-8").splitlines())
    return _run([(point["elapsed_s"], point["val_loss"]) for point in points], _sent(cluster) - before)


def _run(curve: Curve, sent_bytes: int) -> dict[str, Any]:
    reached_s = seconds_to(TARGET, curve)
    points = [(round(at_s, 1), round(loss, 3)) for at_s, loss in curve]
    return {"s": None if reached_s is None else round(reached_s, 1), "bytes": sent_bytes, "curve": points}


def _flags(dataset: Path) -> list[str]:
    rounds = {"update_rounds": ROUNDS, "samples_between_updates": WORKERS * STEPS * BATCH, "max_batch_size": BATCH}
    optimizer = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 2e-3}
    machines = {"num_workers": WORKERS, "min_workers": WORKERS}
    tables: dict[str, dict[str, Any]] = {"rounds": rounds, "inner_optimizer": optimizer, "resources": machines}
    return ["@", str(JOBS / "configs" / "tiny.toml"), *flags(tables), "--dataset.path", str(dataset)]


def _sent(cluster: Cluster) -> int:
    """Bytes that all sites have sent so far."""
    return sum(site.bytes()[0] for site in cluster.sites)


def _no_ray_train() -> str | None:
    """Reason that there can be no comparison; None if there can."""
    try:
        import_module("ray.train.torch")
    except ImportError as error:
        return f"Ray Train isn't installed: {error}; pip install 'ray[train]'"
    return None
