"""A trainer whose steps add one to every weight; or one that goes wrong in the way that it is told."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.client import Trainer
from hypha_ray.bridge.round import Round

WAY = sys.argv[1]
TENSORS = {
    "missing": lambda weights: {"n": weights["n"]},
    "foreign": lambda weights: weights | {"extra": np.zeros(1, np.float32)},
    "shape": lambda weights: weights | {"w": weights["w"].reshape(2, 2)},
    "dtype": lambda weights: weights | {"w": weights["w"].astype(np.float64)},
    "large": lambda weights: weights | {"extra": np.zeros(1 << 20, np.float32)},
}


ANNOUNCED: dict[str, tuple[str, bytes, dict[str, Any]]] = {
    "greedy": ("updates/x", b"x", {"samples": 10_000}),
    "elsewhere": ("token", b"x", {}),
    "absent": ("updates/absent", b"x", {}),
    "link": ("updates/x", b"x", {}),
    "fifo": ("updates/x", b"x", {}),
    "garbage": ("updates/x", b"garbage" * 100, {}),
    "header": ("updates/x", (10**9).to_bytes(8, "little") + b"{" + b" " * 100, {}),
    "changed": ("updates/x", b"x" * 100, {}),
}
"""Path and content that are announced, and further fields of the message."""


OBSTACLES: dict[str, Callable[[Path], None]] = {
    "obstacle": lambda work: (work / "parameters" / "round_000001.safetensors").mkdir(),
    "removed": lambda work: shutil.rmtree(work / "parameters"),
    "replaced": lambda work: shutil.rmtree(work / "parameters") or (work / "parameters").symlink_to("/tmp"),
}
"""Put in the way of the next round's weights."""


def announce(trainer: Trainer, number: int) -> None:
    """Say that there is an update, whatever there is."""
    path, content, fields = ANNOUNCED[WAY]
    file = trainer._directory.path / "updates" / "x"
    match WAY:
        case "link":
            file.symlink_to("/etc/hostname")
        case "fifo":
            os.mkfifo(file)
        case "changed":
            file.write_bytes(b"y" * len(content))
        case _:
            file.write_bytes(content)
    message = pb.Update(
        round=number,
        update=pb.WeightUpdate(model_path=path),
        content=pb.Content(size=len(content), sha256=hashlib.sha256(content).digest()),
        **{"samples": 8, "batches": 1, "loss": 1.0, **fields},
    )
    trainer._channel.send("update", message)


def go_wrong(trainer: Trainer, work: Round, weights: dict[str, Any]) -> None:
    match WAY:
        case "exit":
            os._exit(1)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leave":
            trainer._channel.send("left")
        case "nan":
            work.step(float("nan"))
        case "boast":
            message = pb.MetricSet(items={"loss": 1.0}, data_processed=10_000, local_round=work.number)
            trainer._channel.send("metrics", message)
        case way if way in TENSORS:
            work.step(1.0)
            work.hand_over(TENSORS[way](weights))
        case _:
            announce(trainer, work.number)
    time.sleep(5.0)


def main() -> None:
    if WAY == "early":
        sys.exit(3)
    with Trainer.connect("test-trainer") as trainer:
        trainer.ready("cpu", 4)
        for work in trainer.rounds():
            weights = work.parameters()
            time.sleep(0.5 if WAY == "late" else 0.0)
            work.merged()
            if work.evaluates:
                work.evaluated(sum(float(batch["x"].sum()) for batch in work.evaluation()), 1)
            if WAY in OBSTACLES:
                OBSTACLES[WAY](trainer._directory.path)
            for batch in work.batches():
                if WAY not in ("good", "slow", *OBSTACLES):
                    go_wrong(trainer, work, weights)
                weights["w"] += 1
                work.step(float(batch["x"].mean()))
                time.sleep(0.05 if WAY == "slow" else 0.0)
            work.hand_over(weights)


if __name__ == "__main__":
    main()
