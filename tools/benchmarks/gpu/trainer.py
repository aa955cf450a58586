"""The Trainer of transformers beside a worker's loop: the same model, samples, optimizer and settings."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.gpu.loops import BETAS, CLIP, DECAY, EPSILON, VALIDATION, train
from benchmarks.gpu.size import Size, now_s, texts
from hypha_ray.config.automatic import OFF, Value
from hypha_ray.model.lora import build_trained

SETTINGS: dict[str, Value] = OFF | {"autocast": "bf16", "attention": "sdpa"}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Clock of a Trainer, from the end of the first steps on.

    Args:
        size: size of the training.

    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self._began_s = 0.0
        self.step_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Look at the clock after the first steps, and after the last one."""
        if state.global_step == self._size.warm:
            self._began_s = now_s(self._size)
        elif state.global_step == self._size.steps:
            self.step_s = (now_s(self._size) - self._began_s) / (self._size.steps - self._size.warm)


def trainer(size: Size) -> dict[str, dict[str, Any]]:
    """Seconds of a step of the Trainer ÷ those of the worker's loop."""
    ids = texts(size, size.steps + VALIDATION)
    job = size.job(SETTINGS)
    theirs_s = _theirs(size, ids)
    ours_s = train(size, job, ids).step_s
    shown = {"trainer_ms": round(1e3 * theirs_s, 2), "ours_ms": round(1e3 * ours_s, 2)}
    return {"gpu_trainer": {"value": theirs_s / ours_s, "target": ">= 1", **shown, **SETTINGS}}


def _theirs(size: Size, ids: Any) -> float:
    size.forget()
    rows = torch.from_numpy(np.array(ids[: size.batch * size.steps]))
    samples = [{"input_ids": row, "labels": row} for row in rows]
    clock = Clock(size)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=size.steps,
            per_device_train_batch_size=size.batch,
            learning_rate=4e-4,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPSILON,
            weight_decay=DECAY,
            max_grad_norm=CLIP,
            bf16=True,
            optim="adamw_torch_fused" if size.device == "cuda" else "adamw_torch",
            use_cpu=size.device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        Trainer(build_trained(size.job(SETTINGS)), arguments, train_dataset=samples, callbacks=[clock]).train()
    return clock.step_s
