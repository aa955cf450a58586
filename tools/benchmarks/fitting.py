"""Settings with which models of several sizes can be trained on GPUs of several sizes, by the estimate of a dry run.

python -m tools.benchmarks.fitting        # prints the table of docs/configuration.md
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hypha_ray.config import Job
from hypha_ray.driver.preflight.memory import step_memory
from hypha_ray.model.build import task_of
from hypha_ray.model.lora import sketch_trained
from hypha_ray.types import Samples

GPUS_GIB = (16, 24, 48, 80)
USABLE = 0.9
"""Part of a GPU's memory that is left beside the driver's context and gaps of the allocator."""
TOKENS = 1024
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "head_dim": 128, "max_position_embeddings": TOKENS}
_LORA = {"model": {"lora": {"rank": 16}}}
_AGAIN = {"worker": {"autocast": "bf16", "gradient_checkpointing": True}}
_NARROW = {"config": {"dtype": "bfloat16"}}
_ROUNDED = {"model": _NARROW, "inner_optimizer": {"stochastic_rounding": True}}
SETTINGS: dict[str, Mapping[str, Any]] = {
    "all weights": {},
    "all weights, checkpointing": _AGAIN,
    "all weights of 16 bits": _ROUNDED,
    "all weights of 16 bits, checkpointing": {**_ROUNDED, **_AGAIN},
    "adapter": _LORA,
    "adapter, checkpointing": {**_LORA, **_AGAIN},
    "adapter on 16 bits": {"model": {**_LORA["model"], **_NARROW}},
    "adapter on 16 bits, checkpointing": {"model": {**_LORA["model"], **_NARROW}, **_AGAIN},
}
"""From the fastest to the most frugal."""


class Size(NamedTuple):
    """A model's name and its configuration of transformers."""

    name: str
    config: Mapping[str, Any]


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**_LLAMA, **shape, "num_attention_heads": heads, "num_key_value_heads": groups, **more}


SIZES = (
    Size("GPT-2, 0.12 billion", {"model_type": "gpt2", "n_positions": TOKENS}),
    Size(
        "SmolLM2, 0.36 billion",
        _llama(960, 2560, 32, 15, 5, head_dim=64, vocab_size=49152, tie_word_embeddings=True),
    ),
    Size("Llama 3.2, 1.2 billion", _llama(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True)),
    Size("Llama 3.2, 3.2 billion", _llama(3072, 8192, 28, 24, 8, tie_word_embeddings=True)),
)


def needed_bytes(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    """Memory of a step with one sample, and of the copy of trained parameters for the exchange; None if unknown."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        model = {"repository": folder, **settings.get("model", {})}
        worker = {"worker": {"autocast": "bf16"}, **settings, "model": model, "rounds": {"max_batch_size": 1}}
        job = Job.model_validate(worker)
        network = sketch_trained(job)
        trained_bytes = 0
        for parameter in network.parameters():
            if parameter.requires_grad:
                trained_bytes += parameter.numel() * parameter.element_size()
        ids = np.ones((1, TOKENS), np.int32)
        samples = Samples({"input_ids": ids, "attention_mask": ids}, np.zeros((1, 3), np.int64))
        memory = step_memory(job, task_of(job.model, network), samples)
    return None if memory is None else memory.total + trained_bytes


def needs_of(size: Size) -> dict[str, int | None]:
    """Bytes that a model needs by each settings; None if unknown."""
    return {name: needed_bytes(size.config, settings) for name, settings in SETTINGS.items()}


def row(size: Size, needed: Mapping[str, int | None]) -> str:
    """A line of the table: the fastest settings that fit into each GPU."""
    cells = [size.name]
    for gib in GPUS_GIB:
        usable_bytes = USABLE * gib * 2**30
        fits = [name for name, need_bytes in needed.items() if need_bytes is not None and need_bytes <= usable_bytes]
        cells.append(fits[0] if fits else "–")
    return f"| {' | '.join(cells)} |"


def table() -> Iterator[str]:
    """Lines of the table, in Markdown."""
    columns = [f"{gib} GiB" for gib in GPUS_GIB]
    yield f"| model | {' | '.join(columns)} |"
    yield "|---" * (len(GPUS_GIB) + 1) + "|"
    yield from (row(size, needs_of(size)) for size in SIZES)


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
