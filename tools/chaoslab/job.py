"""The job that is put under kills, its dataset, and the driver process that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from hypha_ray.data.options import PrepareOptions as Corpus
from hypha_ray.data.prepare import prepare

NAME = "chaos"
BATCH_SIZE = 8
SEQ_LEN = 32
BATCH_S = 0.1
"""Every batch takes so long: a worker computes for a few milliseconds and sleeps for the rest.

All workers share this machine's few cores. If they computed all the time, the survivors of a kill would get the dead
one's share of the processor, and its loss would cost nothing.
"""
SAMPLES = 30_000
"""Few enough for several epochs, so that their ends, where slices are shared, are under kills too."""
_MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_corpus(folder: Path) -> None:
    """Prepare a dataset of the standard library's text."""
    options = Corpus("stdlib", str(folder), seq_len=SEQ_LEN, samples_per_slice=1000, max_samples=SAMPLES)
    prepare(options, lambda kind, count: None)


def job_file(out: Path, corpus: Path, workers: int, rounds: int, round_s: float, seed: int) -> dict[str, Any]:
    """The job: a small model, as many samples as the workers use in `round_s`, and no evaluation before the end."""
    samples = round(round_s / BATCH_S) * workers * BATCH_SIZE
    return {
        "run": {"name": NAME, "dir": str(out), "seed": seed},
        "model": {"config": _MODEL},
        "dataset": {"path": str(corpus)},
        "rounds": {
            "update_rounds": rounds,
            "samples_between_updates": samples,
            "max_batch_size": BATCH_SIZE,
            "evaluate_every": 0,
        },
        "resources": {"num_workers": workers, "min_workers": 1},
        "telemetry": {"sinks": ["console", "jsonl"]},
        "testing": {"batch_s": BATCH_S},
    }


def write_job(out: Path, job: dict[str, Any]) -> Path:
    """Write the job file."""
    path = out / "job.toml"
    path.write_text(tomli_w.dumps(job), encoding="utf-8")
    return path


class Driver:
    """The process that a user starts, and starts again when it is gone. Its output is appended to ``driver.log``.

    Args:
        job: the job file.
        address: of the Ray cluster.

    """

    def __init__(self, job: Path, address: str) -> None:
        self._command = [sys.executable, str(Path(__file__).parents[2] / "jobs" / "diloco.py"), "@", str(job)]
        self._environment = os.environ | {"RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1"}
        self.log = job.parent / "driver.log"
        self.start()

    def start(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def last_line(self) -> str:
        """Its last output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else ""
