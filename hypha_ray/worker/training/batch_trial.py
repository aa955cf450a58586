"""Process that takes two steps of a size, to see whether they fit into a worker's lease.

    python -m hypha_ray.worker.training.batch_trial < pickled `Trial`

It ends with 0 if they fit, and with `TOO_LARGE` if they don't. Memory that runs out ends this process, and no worker.
"""

from __future__ import annotations

import ctypes
import pickle
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hypha_ray.config import Job
from hypha_ray.model.environment import device_of, use_threads
from hypha_ray.model.tasks.masking import SpecialTokens
from hypha_ray.types import Samples
from hypha_ray.worker.training.supervised import SupervisedTrainer

TOO_LARGE = 3
COPIES = 3
"""Copies of the trained weights that a worker keeps besides: new global weights, its result, and that encoded."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Size of a batch to try, and the memory that it may take.

    Attributes:
        samples: some samples of the dataset; they are repeated.
        size: number of samples of the batch.
        limit_bytes: memory for model, optimizer and step on a CPU.
        gpu_part: part of a GPU's memory that is the worker's.
        threads: number of CPU threads.

    """

    job: Job
    specials: SpecialTokens | None
    samples: Samples
    size: int
    limit_bytes: float
    gpu_part: float
    threads: int


def resident_bytes(name: str = "VmRSS", process: int | str = "self") -> int:
    """Physical memory of a process; with ``VmHWM``, the most that it has had. 0 after its end."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(encoding="utf-8"))
    return 0 if found is None else int(found[1]) * 1024


def fits(trial: Trial) -> bool:
    """Take two steps, the second of which has an optimizer with state, and compare the peak with the limit."""
    use_threads(trial.threads)
    if device_of(trial.job.worker.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(trial.gpu_part)
    before = resident_bytes()
    try:
        trainer = SupervisedTrainer(trial.job, trial.specials)
        batch = repeated(trial.samples, trial.size)
        for _ in range(2):
            trainer.step(batch)
    except (torch.OutOfMemoryError, MemoryError):
        return False
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return False
    trained = (one for one in trainer.model.parameters() if one.requires_grad)
    copies = COPIES * sum(one.numel() * one.element_size() for one in trained)
    return trainer.device.type == "cuda" or resident_bytes("VmHWM") - before + copies <= trial.limit_bytes


def repeated(samples: Samples, size: int) -> Samples:
    """As many samples as asked for, of these in turn."""
    rows = np.arange(size) % len(samples)
    return Samples({name: array[rows] for name, array in samples.arrays.items()}, samples.keys[rows])


def main() -> None:
    """Try the size that standard input asks for; end with the worker."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    sys.exit(0 if fits(pickle.load(sys.stdin.buffer)) else TOO_LARGE)


if __name__ == "__main__":
    main()
