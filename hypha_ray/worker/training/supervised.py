"""Supervised training: a model of transformers on the loss of its task."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.config import Job
from hypha_ray.model.checks.loss_check import check_loss_on_copy
from hypha_ray.model.checks.positions import token_counts
from hypha_ray.model.environment import compute_reproducibly, device_of, seed_all
from hypha_ray.model.evaluation import evaluate, tensors_of
from hypha_ray.model.execution import known_mask, resolved_job, set_execution
from hypha_ray.model.loading.build import random_model, task_of
from hypha_ray.model.loading.preprocess import load_special_tokens
from hypha_ray.model.losses import Losses, require_mean
from hypha_ray.model.metrics.metric import metrics_named
from hypha_ray.model.tasks.table import find_task, require_trainable
from hypha_ray.model.tasks.task import SpecialTokens
from hypha_ray.model.trained import build_trained
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.precision import LossScale
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.state import WholeModel
from hypha_ray.optim.step import FinishedStep, PendingStep, ReadStep, Step, reading_from
from hypha_ray.types import Arrays, Flat, Samples, Sums
from hypha_ray.worker.training.computation import Alone, Computation, InputCopies, Reduction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hypha_ray.worker.group.shards import Shards


Kept: TypeAlias = tuple[list[torch.Tensor | None], list[torch.Tensor]]
"""Gradients and buffers before a batch."""


class SupervisedTrainer(WholeModel):
    """Trainer of a job's model on the loss of its task, batch by batch.

    Args:
        job: the job file.
        specials: special tokens, of which a masked language model has to know; None: those of a tokenizer that the job
            names, if it does.
        mesh: processes that the model is sharded over, from `worker.group.mesh`; None: it is whole.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None = None, mesh: DeviceMesh | None = None) -> None:
        job = resolved_job(job)
        self._accumulation = job.rounds.accumulation
        self._reduction: Reduction = Alone()
        self._leaves_out = job.dataset.allow_quarantine
        self.device = device_of(job.worker.device)
        if job.run.mode == "replay":
            compute_reproducibly(self.device)
        require_trainable(find_task(job.model.type))
        self.model = build_trained(job, self.device).train()
        if mesh is None:
            self.model.to(self.device)
        set_execution(self.model, job.worker)
        if specials is None and find_task(job.model.type).labels == "masked":
            specials = load_special_tokens(job.preprocessor, None, job.model)
        self._task = task_of(job.model, self.model, specials)
        self._masking_seed = job.run.seed
        require_mean(self._task, job.sync.traits)
        self._metrics = metrics_named(job.model.metrics)
        self.shards = None if mesh is None else _sharded(self.model, mesh)
        trained = self.model if self.shards is None else self.shards.pieces
        inner = job.inner_optimizer
        fuses = job.run.mode != "replay"
        self.optimizer = build_optimizer(self.model, inner, inner_steps(job), job.num_workers, self.shards, fuses)
        self._build_copy = partial(random_model, job.model, self._task)
        # Copies of weights in 16 bits would outlive the shards' weights, which are freed.
        self._computation = Computation(job, self._task, self.model, keeps_copies=self.shards is None)
        self.loss_scale = LossScale(self.device) if self._computation.autocast == torch.float16 else None
        saved = self.model.state_dict().keys()
        self._buffers = [buffer for name, buffer in self.model.named_buffers() if name in saved]
        self._trained = [one for one in trained.parameters() if one.requires_grad]
        self._statistics = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._copies = InputCopies(self.device)
        goes_on = mesh is None and job.run.mode != "replay" and self.optimizer.skips
        self._reading = reading_from(self.device) if goes_on else None
        is_decoder = self._task.labels == "shifted"
        is_compiled = job.worker.compile is True
        self._tells_masks = self._reading is not None and is_decoder and not is_compiled

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Trained parameters, saved buffers and the scale of losses: all that training changes."""
        scales = [] if self.loss_scale is None else [self.loss_scale.scale]
        return [*self._trained, *self._buffers, *scales]

    def join(self, reduction: Reduction) -> None:
        """Share batches with other processes from here on, over which `reduction` sums up."""
        self._reduction = reduction

    def check_loss(self, batch: Samples) -> None:
        """Refuse a model whose loss isn't that of its task, by a small copy on the CPU.

        Raises:
            ConfigError: the loss isn't the task's, or the model can't be run on the batch.

        """
        check_loss_on_copy(self._task, batch, copy.deepcopy(self.model.config), self._build_copy, self.parameters)

    def seed(self, *entropy: int) -> None:
        """Let all that a model draws depend on these numbers alone from here on: some draw from numpy or Python."""
        seed_all(*entropy)

    def step(self, batch: Samples) -> Step:
        """Take one inner step; the norm is that of the gradient before clipping.

        A batch without a finite gradient, or with nothing to score, leaves weights and optimizer as they were.
        """
        self.optimizer.zero_grad()
        result = self.backward(batch)
        if result.scored:
            self.optimizer.step(result.norm)
        return result

    def begin_step(self, batch: Samples) -> PendingStep:
        """Begin one inner step, as `step`; on a GPU it is left out there, and the host learns of it later.

        So its damaged samples are looked for, and others of its batch trained on, when later steps have been begun.
        """
        if self._reading is None:
            return FinishedStep(self.step(batch))
        self.optimizer.zero_grad()
        buffers = [buffer.clone() for buffer in self._buffers]
        result = self._completed(self.add_gradient(batch, summed=False), batch)
        if result.scored == 0:
            return FinishedStep(result)
        figures = self._figures(result)
        rates = self.optimizer.rates
        finite = figures.isfinite().all()
        self.optimizer.step(result.norm, finite.logical_not().float())
        self.update_scale(figures)
        for buffer, before in zip(self._buffers, buffers, strict=True):
            buffer.copy_(torch.where(finite, buffer, before))

        def finish(numbers: torch.Tensor) -> Step:
            if numbers.isfinite().all():
                return replace(result, loss=numbers[0], norm=numbers[1])
            if self._overflows(numbers):
                return replace(self._nothing(), tokens=result.tokens)
            return self.step_without_damage(batch, rates)

        return ReadStep(self._reading(figures), finish)

    def step_without_damage(self, batch: Samples, rates: Sequence[Sequence[float]]) -> Step:
        """Name the damaged samples of a batch whose step was left out; take a step on the others if the job says so.

        Args:
            batch: samples of slices.
            rates: learning rates that the step had.

        """
        self.optimizer.zero_grad()
        result = self._completed(self._without_damage(batch, self.kept(), summed=False), batch)
        if result.scored:
            self.optimizer.set_rates(rates)
            self.optimizer.step(result.norm)
        return result

    def backward(self, batch: Samples, summed: bool = False) -> Step:
        """Add a batch's gradient to the gradients that are there, if it is finite.

        With `dataset.allow_quarantine` samples without a finite gradient are left out, and the others count; or else
        the whole batch is left out. Batch statistics are put back, too.

        Args:
            batch: samples of slices.
            summed: the gradient is that of the sum over scored positions, not of the mean.

        """
        return self._completed(self._finite(batch, summed), batch)

    def _completed(self, result: Step, batch: Samples) -> Step:
        """Return a step with the number of its tokens, and with what failed beside it."""
        return replace(result, tokens=_tokens(batch.arrays), problems=self._computation.problems)

    def _finite(self, batch: Samples, summed: bool) -> Step:
        """Add the finite gradients of a batch; its tokens aren't counted yet."""
        kept = self.kept()
        result = self.add_gradient(batch, summed)
        if result.scored == 0:
            return result
        figures = self._figures(result)
        self.update_scale(figures)
        if figures.isfinite().all():
            return result
        self.put_back(kept)
        if self._overflows(figures):
            return self._nothing()
        return self._without_damage(batch, kept, summed)

    def _without_damage(self, batch: Samples, kept: Kept, summed: bool) -> Step:
        """Add the gradient of a batch's other samples, if damaged ones are left out; otherwise add nothing."""
        damaged = self.damaged(batch)
        self.put_back(kept)
        if self._leaves_out and not damaged.all():
            others = self.add_gradient(batch.part(~damaged), summed)
            if self._is_finite(others):
                return replace(others, bad=batch.keys[damaged])
            self.put_back(kept)
        return self._nothing(batch.keys[damaged])

    def add_gradient(self, batch: Samples, summed: bool) -> Step:
        """Add a batch's gradient. Micro-batches count by their scored positions, so that they change nothing.

        The gradient is that of what is trained on, with the losses of routers; the loss is the one that is reported.
        A model whose own loss is a sum is trained on the sum. Parts of a batch in other processes count alike.
        """
        return self.add_parts(micro_batches(batch, self._accumulation), summed)

    def add_parts(self, parts: Sequence[Samples], summed: bool, idle: int = 0) -> Step:
        """Add the gradient of micro-batches, of which the last `idle` ones count nothing.

        Those are run all the same, because all processes of a sharded model have to run equally many.
        """
        made = [self._inputs(part) for part in parts]
        counts = [self._task.count(inputs) for inputs in made[: len(made) - idle]] + [0] * idle
        summed |= self._task.summed
        scored = self._reduction.total(sum(counts))
        total = torch.zeros((), device=self.device)
        sums = summed and self.loss_scale is None  # The sum of many losses would overflow.
        earlier = self._set_aside()
        for inputs, count in zip(made, counts, strict=True):
            if count or idle:
                found = self._forward(inputs)
                self._scaled(found.trained * (count if sums else count / scored)).backward()
                total += found.reported.detach() * (count / scored)
        self._reduction.add_up(self._trained, total)
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._trained, scored if summed else 1)
            _add(self._trained, earlier)
        return Step(total, scored, self._reduction.norm(self.optimizer))

    def count(self, part: Samples) -> int:
        """Return the number of scored positions of samples that are trained on."""
        return self._task.count(self._inputs(part))

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """The model's loss, and what it got right, over these batches."""
        computation = self._computation
        autocast = computation.autocast
        head = computation.head
        metrics = self._metrics
        return evaluate(self.model, self._task, batches, self.device, autocast, head, metrics)

    def announce(self, upcoming: Iterator[Samples]) -> None:
        """Do nothing: a step depends on its own batch."""

    def merged(self, version: int) -> None:
        """Do nothing: no figure or step depends on which global weights were merged."""

    def state(self) -> Flat:
        """Return the scale of losses, if they are scaled."""
        return {} if self.loss_scale is None else self.loss_scale.state()

    def restore(self, state: Flat) -> None:
        """Go on with the scale of losses that `state` gave."""
        if self.loss_scale is not None:
            self.loss_scale.restore(state)

    def close(self) -> None:
        """Do nothing: only memory is held."""

    def _is_finite(self, result: Step) -> bool:
        """Tell whether loss, gradient and batch statistics are finite; this waits for the device."""
        return bool(self._figures(result).isfinite().all())

    def _figures(self, result: Step) -> torch.Tensor:
        """Return loss, norm of the gradient, that of batch statistics if there are any, and the scale of losses, too.

        All of them are finite in a good step.
        """
        figures = [result.loss, result.norm]
        if self._statistics:
            figures.append(torch.nn.utils.get_total_norm(self._statistics))
        if self.loss_scale is not None:
            figures.append(self.loss_scale.scale)
        return torch.stack(figures)

    def _overflows(self, figures: torch.Tensor) -> bool:
        """Whether figures that aren't all finite are such for the scale of losses, which is halved then.

        At a scale of 1 it isn't that: the gradient itself can't be had.
        """
        if self.loss_scale is None:
            return False
        others = torch.cat([figures[:1], figures[2:]])
        return bool(others.isfinite().all()) and bool(figures[-1] > 1)

    def update_scale(self, figures: torch.Tensor) -> None:
        """Change the scale of losses by the figures of a gradient."""
        if self.loss_scale is not None:
            self.loss_scale.update(figures.isfinite().all().logical_not().float())

    def _nothing(self, bad: npt.NDArray[np.int64] | None = None) -> Step:
        """Return the result of a batch that has changed nothing, with the keys of its damaged samples."""
        zero = torch.zeros((), device=self.device)
        return Step(zero, 0, zero) if bad is None else Step(zero, 0, zero, bad=bad)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss times the scale of losses, if there is one."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def _set_aside(self) -> list[torch.Tensor | None]:
        """Remove and return the gradients that are there, if those to come are scaled."""
        if self.loss_scale is None:
            return []
        gradients = [parameter.grad for parameter in self._trained]
        self.optimizer.zero_grad()
        return gradients

    def damaged(self, batch: Samples) -> npt.NDArray[np.bool_]:
        """Return which samples have no finite gradient by themselves; all of them, if each one has."""
        found = np.zeros(len(batch), np.bool_)
        self.model.eval()
        try:
            with nullcontext() if self.loss_scale is None else self.loss_scale.without():
                for index in range(len(batch)):
                    self.optimizer.zero_grad()
                    alone = self.add_gradient(batch.part(slice(index, index + 1)), summed=False)
                    found[index] = alone.scored > 0 and not self._is_finite(alone)
        finally:
            self.model.train()
        return found if found.any() else ~found

    def kept(self) -> Kept:
        """Copy the gradients that were gathered so far, and the buffers."""
        gradients = [None if one.grad is None else one.grad.clone() for one in self._trained]
        return gradients, [buffer.clone() for buffer in self._buffers]

    def put_back(self, kept: Kept) -> None:
        """Undo a batch."""
        gradients, buffers = kept
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        for buffer, before in zip(self._buffers, buffers, strict=True):
            buffer.copy_(before)

    def _inputs(self, part: Samples) -> dict[str, torch.Tensor]:
        return self._task.inputs(tensors_of(part), part.keys, self._masking_seed)

    def _forward(self, inputs: dict[str, torch.Tensor]) -> Losses:
        with known_mask(inputs) if self._tells_masks else nullcontext():
            return self._computation(self._copies.of(inputs), self.device)


def micro_batches(batch: Samples, parts: int) -> list[Samples]:
    """Cut a batch into that many micro-batches, or fewer if it has fewer samples."""
    size = max(1, -(-len(batch) // parts))
    return [batch.part(slice(start, start + size)) for start in range(0, len(batch), size)]


def _add(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add earlier gradients to those of parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _sharded(model: torch.nn.Module, mesh: DeviceMesh) -> Shards:
    from hypha_ray.worker.group.shards import Shards  # Most workers need none of it.

    return Shards(model, mesh)


def _tokens(batch: Arrays) -> int | None:
    """Number of tokens that aren't padding; None for data without tokens."""
    if "input_ids" not in batch:
        return None
    return int(token_counts(batch).sum())
