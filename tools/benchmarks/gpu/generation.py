"""Responses by a policy on a device: the native engine beside `generate` of transformers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.size import Size, now_s, texts
from hypha_ray.config.automatic import OFF
from hypha_ray.model.lora import build_trained
from hypha_ray.rl.engines.native import Sampling, draw, generate

PROMPTS = 8
WIDTH = 16
"""Prompts of a batch, and tokens of each."""
NO_END = 299
"""Token that ends responses. It is drawn so rarely that nearly all are as long as they may be."""


def generation(size: Size) -> dict[str, dict[str, Any]]:
    """Tokens of responses in a second: the native engine's ÷ transformers'."""
    size.forget()
    model = build_trained(size.job(OFF)).to(size.device, torch.bfloat16).eval()
    text = torch.from_numpy(texts(size, PROMPTS * WIDTH // size.step_tokens + 1)).flatten()
    ids = text[: PROMPTS * WIDTH].clone().reshape(PROMPTS, WIDTH).to(size.device)
    mask = torch.ones_like(ids)
    keys = np.arange(3 * PROMPTS, dtype=np.int64).reshape(PROMPTS, 3)

    def native() -> int:
        sampling = Sampling(samples=1, max_tokens=size.respond)
        uniform = draw(0, keys, sampling).to(size.device)
        return int(generate(model, ids, mask, uniform, sampling, [NO_END]).mask.sum())

    def theirs() -> int:
        options = {"do_sample": True, "top_k": 0, "eos_token_id": NO_END, "pad_token_id": NO_END}
        responses = model.generate(ids, attention_mask=mask, max_new_tokens=size.respond, **options)
        return int((responses[:, WIDTH:] != NO_END).sum())

    turns = [(_speed(size, native), _speed(size, theirs)) for _ in range(1 + size.turns)][1:]
    native_speed, transformers_speed = (median(column) for column in zip(*turns, strict=True))
    shown = {
        "native_tokens_per_s": round(native_speed),
        "transformers_tokens_per_s": round(transformers_speed),
        "prompts": PROMPTS,
    }
    return {
        "gpu_generation": {
            "value": native_speed / transformers_speed,
            "target": ">= 1",
            **shown,
            "response": size.respond,
        }
    }


def _speed(size: Size, respond: Callable[[], int]) -> float:
    """Return tokens in a second."""
    began_s = now_s(size)
    count = respond()
    return count / (now_s(size) - began_s)
