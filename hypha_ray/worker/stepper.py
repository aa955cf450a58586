"""A model and its inner optimizer on one device: the steps of a worker, wherever it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from hypha_ray.config import Job
from hypha_ray.model.build import build_model, task_of
from hypha_ray.model.evaluation import Sums, evaluate, loss_of
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.worker.feeder import Arrays


class Stepper:
    """Builds the job's model, and trains it batch by batch.

    Args:
        job: the job file.

    """

    def __init__(self, job: Job) -> None:
        self._accumulation = job.rounds.accumulation
        self.device = torch.device(_device(job.worker.device))
        self.model = build_model(job.model, job.run.seed).to(self.device).train()
        self.optimizer = build_optimizer(self.model, job.inner_optimizer, inner_steps(job), job.resources.num_workers)
        self._task = task_of(job.model, self.model)
        self._forward = torch.compile(self.model) if job.worker.compile else self.model
        self._autocast = torch.bfloat16 if job.worker.autocast == "bf16" else None
        self._generator = torch.Generator()

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The parameters' gradients, of those that have one."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def seed(self, *entropy: int) -> None:
        """Let dropout and masking depend on these numbers alone from here on."""
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        torch.manual_seed(seed)
        self._generator.manual_seed(seed)

    def step(self, batch: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        """One inner step: mean loss of the batch, norm of the gradient before clipping. No wait for the device."""
        self.optimizer.zero_grad()
        return self.backward(batch), self.optimizer.step()

    def backward(self, batch: Arrays, weight: float = 1.0) -> torch.Tensor:
        """Add the gradient of a batch's mean loss, times a weight, to the gradients that are there; returns that loss.

        Micro-batches count by their scored positions, so that accumulation doesn't change what is minimised.
        """
        parts = _split(_tensors(batch), self._accumulation)
        micro_batches = [self._task.inputs(part, self._generator) for part in parts]
        counts = [self._task.count(inputs) for inputs in micro_batches]
        total = torch.zeros((), device=self.device)
        for inputs, count in zip(micro_batches, counts, strict=True):
            if count:
                loss = self._loss(inputs) * (count / sum(counts))
                (loss * weight).backward()
                total += loss.detach()
        return total

    def evaluate(self, batches: Iterable[Arrays]) -> Sums:
        """The model's loss, and what it got right, over these batches."""
        tensors = (_tensors(batch) for batch in batches)
        return evaluate(self.model, self._task, tensors, self.device, self._autocast)

    def _loss(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            return loss_of(self._forward(**inputs))


def _device(wish: str) -> str:
    if wish == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wish


def _tensors(batch: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def _split(tensors: dict[str, torch.Tensor], parts: int) -> Iterator[dict[str, torch.Tensor]]:
    """Cut a batch into that many micro-batches, or fewer if it has fewer samples."""
    samples = len(next(iter(tensors.values())))
    size = -(-samples // parts)
    for start in range(0, samples, size):
        yield {name: tensor[start : start + size] for name, tensor in tensors.items()}
