"""Trial of a batch size: the memory that a step takes, and that of what a worker keeps besides."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from hypha_ray.batch_size import TOO_LARGE, Trial
from hypha_ray.config import Job
from hypha_ray.types import Samples
from tests.support.worker_bench import CONFIG

WEIGHTS_BYTES = 115e6
"""Size of the model's weights, nearly all of them in a table of tokens."""


@pytest.mark.slow
def test_copies_of_the_weights_that_a_worker_keeps_count() -> None:
    """The trial takes four times the weights, building the model included; three copies are kept besides."""
    model = {**CONFIG, "vocab_size": 50_000, "n_embd": 512, "n_positions": 4}
    optimizer = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0, "clip_norm": None}
    job = Job.model_validate({"model": {"config": model}, "inner_optimizer": optimizer, "worker": {"device": "cpu"}})
    ids = np.full((1, 4), 7)
    samples = Samples({"input_ids": ids, "attention_mask": np.ones_like(ids)}, np.zeros((1, 3), int))
    trials = [Trial(job, None, samples, 1, copies * WEIGHTS_BYTES, 1.0, 1) for copies in (5.5, 9.0)]
    command = [sys.executable, "-m", "hypha_ray.members.batch_trial"]
    told = b"".join(map(pickle.dumps, trials))
    lines = subprocess.run(command, input=told, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    assert [int(line) for line in lines[1::2]] == [TOO_LARGE, 0]
    assert len({int(line) for line in lines[::2]}) == 2, "each has a process of its own"
