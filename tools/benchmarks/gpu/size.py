"""Model, batches and steps of the measurements on a device, and its clock and memory."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.config import Job
from hypha_ray.config.automatic import Value

LLAMA = {
    "model_type": "llama",
    "vocab_size": 50_257,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
"""The model of jobs/configs/pretrain.toml, with the bytes' end token."""
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Size:
    """Size of all measurements."""

    device: str
    """``cuda``, or ``cpu`` for a stand-in."""
    config: dict[str, Any]
    """Configuration of the model."""
    batch: int
    """Samples of a batch."""
    tokens: int
    """Tokens of a sample."""
    warm: int
    """Steps that aren't timed."""
    steps: int
    """Steps after which losses are compared, with those that aren't timed."""
    turns: int
    """Repetitions of short measurements, of which the median counts."""
    respond: int
    """Tokens of a response."""

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.tokens

    def job(self, settings: dict[str, Value], rounds: int = 2) -> Job:
        """Return a job with these settings, and with rounds of as many steps as are measured."""
        samples = self.batch * self.steps
        tables = {
            "model": {"config": self.config},
            "rounds": {"update_rounds": rounds, "samples_between_updates": samples, "max_batch_size": self.batch},
            "inner_optimizer": {"learning_rate": 4e-4},
            "resources": {"num_workers": 1, "worker": {"gpu": 1.0 if self.device == "cuda" else 0.0}},
            "worker": {"device": self.device, **settings},
        }
        return Job.model_validate(tables).with_sample_tokens(self.tokens)

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Free what an earlier measurement has left, compiled code too, and count memory anew."""
        gc.collect()
        torch.compiler.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def name(self) -> str:
        """Return the name of the device."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "CPU, a stand-in of tiny size"


WHOLE = Size("cuda", LLAMA, batch=16, tokens=1024, warm=20, steps=200, turns=9, respond=128)
TINY = Size("cpu", LLAMA | SMALL, batch=4, tokens=32, warm=2, steps=6, turns=2, respond=4)


def size_of(device: str) -> Size:
    """Return the size of measurements on a device."""
    return WHOLE if device == "cuda" else TINY


def now_s(size: Size) -> float:
    """Return the time once the device is idle."""
    size.wait()
    return time.perf_counter()


def texts(size: Size, batches: int) -> npt.NDArray[np.int64]:
    """Return so many batches of the standard library's source code as bytes, int64 [samples, tokens]."""
    needed = batches * size.step_tokens
    content = bytearray()
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    while len(content) < needed:
        content += b"".join(file.read_bytes() for file in files)
    ids = np.frombuffer(bytes(content[:needed]), np.uint8).astype(np.int64)
    return ids.reshape(-1, size.tokens)
