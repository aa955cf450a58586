"""Processes that take two steps of a size, to see whether they fit into a worker's lease.

    python -m hypha_ray.members.batch_trial < pickled `Trial`s

The program loads the libraries once, and forks a process for each trial, so that memory that runs out ends no worker.
For each trial it prints a line with the process's id and, after its end, a line with its exit code: 0 if the steps
fit, `TOO_LARGE` or `NO_MEMORY` if they don't, −n after signal n, another one after an error.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from typing import NoReturn

import numpy as np
import torch

from hypha_ray.batch_size import NO_MEMORY, TOO_LARGE, Trial, resident_bytes
from hypha_ray.model.environment import device_of, use_threads
from hypha_ray.types import Samples
from hypha_ray.worker.supervised import SupervisedTrainer

COPIES = 3
"""Further copies of the trained weights in a worker: new global weights, its result, and the encoded result."""


def result(trial: Trial) -> int:
    """Take two steps, the second of which has an optimizer with state, and compare the peak with the limit.

    Returns:
        0 if they fit, `TOO_LARGE` beyond the worker's limit, `NO_MEMORY` if others have what it lacked.

    """
    use_threads(trial.threads)
    if device_of(trial.job.worker.device).type == "cuda":
        torch.cuda.set_per_process_memory_fraction(trial.gpu_part)
    bytes_before = resident_bytes()
    try:
        trainer = SupervisedTrainer(trial.job, trial.specials)
        batch = repeated(trial.samples, trial.size)
        for _ in range(2):
            trainer.step(batch)
    except torch.OutOfMemoryError:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return _out_of_memory_code(trial.gpu_part, free_bytes, total_bytes, torch.cuda.memory_reserved())
    except MemoryError:
        return NO_MEMORY
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return NO_MEMORY
    if trainer.device.type == "cuda":
        return 0
    trained_bytes = sum(weights.nbytes for weights in trainer.model.parameters() if weights.requires_grad)
    needed_bytes = resident_bytes("VmHWM") - bytes_before + COPIES * trained_bytes
    return 0 if needed_bytes <= trial.limit_bytes else TOO_LARGE


def _out_of_memory_code(part: float, free_bytes: int, total_bytes: int, own_bytes: int) -> int:
    """Exit code after a GPU's memory ran out: the batch is too large, or other processes use more than their part."""
    used_by_others = total_bytes - free_bytes - own_bytes
    return TOO_LARGE if used_by_others <= (1 - part) * total_bytes else NO_MEMORY


def repeated(samples: Samples, size: int) -> Samples:
    """Repeat samples in turn until there are `size` of them."""
    rows = np.arange(size) % len(samples)
    arrays = {name: array[rows] for name, array in samples.arrays.items()}
    return Samples(arrays, samples.keys[rows])


def main() -> None:
    """Run the trials that standard input asks for, one after the other; end with the worker."""
    _end_with_parent()
    while True:
        try:
            trial = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        process = os.fork()
        if process == 0:
            _run(trial)
        print(process, flush=True)
        status = os.waitpid(process, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(trial: Trial) -> NoReturn:
    """Run a trial in this process, and end it with the result."""
    code = 1
    try:
        _end_with_parent()
        code = result(trial)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
