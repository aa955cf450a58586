"""Part of their time that workers train, if an exchange over a throttled link takes half as long as that or longer.

Workers' batches last a fixed time, for the most part asleep: no worker waits for a core, and all loss is the link's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.wide_area.links import Link, missing
from benchmarks.wide_area.nodes import JOBS, SERVER_ON_HEAD, Cluster, flags, linked
from hypha_ray.config.load import load
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import layout_of

LINK = Link(mbit_s=50, delay_s=0.005)
"""Link of every site, the head's too. From site to site it is twice as far."""
WORKERS = 2
BATCH_S = 0.1
ROUNDS = 8
"""In which all weights are exchanged; with fragments a round is so many times shorter, and there are more of them."""
WARM_UP_ROUNDS = 2
"""Rounds that don't count: in the first one the planner knows no batch times."""
OVERLAP = {"fragments": 4, "delay_steps": 14, "mixing": 0.5}
"""A quarter of the weights is under way for up to 14 of a round's batches; in all, as many bytes as without."""
LONG = {"fragments": 4, "delay_steps": 5, "mixing": 0.5}
"""The same where an exchange takes longer than a round."""
ROWS: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    ("overlap_none", "<= 0.67", 0.5, {}),
    ("overlap", ">= 0.95", 0.5, OVERLAP),
    ("overlap_one_in_flight", "-", 1.5, {**LONG, "in_flight": 1}),
    ("overlap_three_in_flight", ">= 0.95", 1.5, {**LONG, "in_flight": 3}),
)
"""Name, target, time of an exchange over that of a round's batches, and keys of the job's sync."""
TIMEOUT_S = 300.0
MODEL = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 32}
"""1.4 million parameters: 5.6 MB in fp32."""


def overlap() -> dict[str, dict[str, Any]]:
    """Time in which workers train ÷ time: with waiting for the exchange, and with training meanwhile."""
    if reason := missing():
        print(f"overlap: skipped, {reason}", file=sys.stderr)
        return {}
    with linked(LINK, WORKERS, seq_len=32) as (cluster, dataset):
        return {row: _measured(cluster, row, dataset, target, part, sync) for row, target, part, sync in ROWS}


def exchange_s(size: int) -> float:
    """Seconds that results of `size` bytes take, from all workers through the head's link, and back again."""
    return 2 * WORKERS * size * 8 / (LINK.mbit_s * 1e6)


def utilisation(rounds: list[dict[str, Any]], batch_s: float) -> float:
    """Batches × the time that one is to take ÷ (workers × time), from the end of the first of these rounds on.

    Where a batch takes longer, since others want the processor, that counts as lost.
    """
    batches = sum(sum(record["batches"].values()) for record in rounds[1:])
    seconds = rounds[-1]["elapsed_s"] - rounds[0]["elapsed_s"]
    return float(batches * batch_s / (WORKERS * seconds))


def _measured(
    cluster: Cluster, name: str, dataset: Path, target: str, part: float, sync: dict[str, Any]
) -> dict[str, Any]:
    """Run a job with these keys; the value of its row, and the conditions."""
    fragments = sync.get("fragments", 1)
    model = build_model(load(job_flags(dataset)).job.model, 0)
    size = layout_of(model).bytes()
    batches = round(exchange_s(size) / part / BATCH_S / fragments)
    length = {"update_rounds": ROUNDS * fragments, "samples_between_updates": WORKERS * batches}
    before = cluster.sites[0].bytes()
    records = cluster.job(name, [*job_flags(dataset), *flags({"sync": sync, "rounds": length})], TIMEOUT_S)
    sent, received = (after - first for after, first in zip(cluster.sites[0].bytes(), before, strict=True))
    # The last one is left out, too: there all fragments are exchanged at once.
    all_rounds = [record for record in records if record["kind"] == "round"]
    rounds = all_rounds[WARM_UP_ROUNDS * fragments - 1 : -1]
    batch_times_s: list[float] = []
    for record in rounds[1:]:
        batch_times_s += record["batch_s"].values()
    return {
        "value": utilisation(rounds, BATCH_S),
        "target": target,
        "mbit_s": LINK.mbit_s,
        "round_trip_ms": round(4e3 * LINK.delay_s),
        "workers": WORKERS,
        "parameter_bytes": size,
        **{"fragments": 1, "delay_steps": 0, "mixing": 0.0, "in_flight": 1, **sync},
        "batch_s": BATCH_S,
        "measured_batch_s": round(mean(batch_times_s), 4),
        "batches": batches,
        "rounds": len(rounds) - 1,
        "sync_s": round(mean(record["sync_s"] for record in rounds[1:]), 3),
        "idle_fraction": round(mean(record["idle_fraction"] for record in rounds[1:]), 4),
        "head_sent_bytes": sent,
        "head_received_bytes": received,
    }


def job_flags(dataset: Path) -> list[str]:
    """Flags of all jobs."""
    machines = {"num_workers": WORKERS, "min_workers": WORKERS}
    tables = {"model.config": MODEL, "rounds": {"max_batch_size": 1, "evaluate_every": 0}, "resources": machines}
    pace = ["--testing.batch_s", str(BATCH_S), "--dataset.path", str(dataset)]
    return ["@", str(JOBS / "configs" / "tiny.toml"), *flags(tables), *SERVER_ON_HEAD, *pace]
