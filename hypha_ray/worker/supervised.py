"""Supervised training: a model of transformers on the loss of its task."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.config import Job
from hypha_ray.model.build import random_model, task_of
from hypha_ray.model.checks import token_counts
from hypha_ray.model.environment import compute_reproducibly, device_of, seed_all
from hypha_ray.model.execution import KnownMasks, require_compiler, resolved_job, set_execution
from hypha_ray.model.lora import build_trained, has_adapter
from hypha_ray.model.loss_check import check_loss_on_copy
from hypha_ray.model.losses import Losses, require_mean
from hypha_ray.model.metrics import evaluate, metrics_named, tensors_of
from hypha_ray.model.preferences.losses import (
    TRAINED_FIGURES,
    disable_dropout,
    named_sums,
    reference_of,
    with_preferences,
)
from hypha_ray.model.task import SpecialTokens
from hypha_ray.model.tasks import find_task, require_trainable
from hypha_ray.model.tokenizers import load_special_tokens
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.step import FinishedStep, PendingStep, ReadStep, Step, WholeModel, reading_from
from hypha_ray.optim.torch_extras import MIXED, add_gradients, scale_of
from hypha_ray.types import Arrays, Flat, Samples, Sums
from hypha_ray.worker.batches import Computation, InputCopies, Reduction, SingleProcess

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hypha_ray.worker.group.shards import Shards


@dataclass(frozen=True, slots=True)
class Backup:
    """Copies of gradients and buffers, made before a batch."""

    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]


class SupervisedTrainer(WholeModel):
    """Trainer of a job's model on the loss of its task, batch by batch.

    Args:
        job: the job file.
        specials: special tokens, of which a masked language model has to know; None: those of a tokenizer that the job
            names, if it does.
        mesh: processes that the model is sharded over, from `worker.group.shards`; None: it is whole.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None = None, mesh: DeviceMesh | None = None) -> None:
        job = resolved_job(job)
        self._accumulation = job.rounds.accumulation
        self._reduction: Reduction = SingleProcess()
        self._allows_quarantine = job.dataset.allow_quarantine
        self.device = device_of(job.worker.device)
        if job.run.mode == "replay":
            compute_reproducibly(self.device)
        require_trainable(find_task(job.model.type))
        self.model = build_trained(job, self.device).train()
        if mesh is None:
            self.model.to(self.device)
        set_execution(self.model, job.worker)
        require_compiler(job.worker, self.device)
        if specials is None and find_task(job.model.type).labels == "masked":
            specials = load_special_tokens(job.preprocessor, None, job.model)
        self._task = task_of(job.model, self.model, specials)
        if job.preference.loss is not None:
            disable_dropout(self.model)
            reference = reference_of(job.preference, self.model, has_adapter(job.model))
            self._task = with_preferences(self._task, job.preference, reference)
        self._figure_count = 0 if self._task.objective is None else len(TRAINED_FIGURES)
        self._masking_seed = job.run.seed
        require_mean(self._task, job.sync.traits)
        self._metrics = metrics_named(job.model.metrics)
        self.shards: Shards | None = None
        trained_module: torch.nn.Module = self.model
        if mesh is not None:
            self.shards = _shard(self.model, mesh)
            trained_module = self.shards.pieces
        inner = job.inner_optimizer
        fuses = job.run.mode != "replay"
        self.optimizer = build_optimizer(self.model, inner, inner_steps(job), job.num_workers, self.shards, fuses)
        self._build_copy = partial(random_model, job.model, self._task)
        self.loss_scale = scale_of(MIXED.get(job.worker.autocast), self.device)
        scale = None if self.loss_scale is None else self.loss_scale.scale
        # Copies of weights in 16 bits would outlive the shards' weights, which are freed.
        self._computation = Computation(job, self._task, self.model, self.shards is None, scale)
        saved_names = self.model.state_dict().keys()
        self._buffers = [buffer for name, buffer in self.model.named_buffers() if name in saved_names]
        self._trained = [parameter for parameter in trained_module.parameters() if parameter.requires_grad]
        self._statistics = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        self._input_copies = InputCopies(self.device)
        runs_ahead = mesh is None and job.run.mode != "replay" and self.optimizer.skips
        read_figures = reading_from(self.device)
        self._read_figures = read_figures if runs_ahead else None
        """Reader of a step's figures, meanwhile the host begins further steps; None: the host waits for each step."""
        is_compiled = job.worker.compile is True
        self._known_masks = None if read_figures is None else KnownMasks(self.model, is_compiled)

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Trained parameters, saved buffers and the scale of losses: all that training changes."""
        tensors = [*self._trained, *self._buffers]
        if self.loss_scale is not None:
            tensors.append(self.loss_scale.scale)
        return tensors

    def join(self, reduction: Reduction) -> None:
        """Share batches with other processes from here on; `reduction` sums over them."""
        self._reduction = reduction

    def check_loss(self, batch: Samples) -> None:
        """Refuse a model whose loss isn't that of its task; a small copy of it computes the loss on the CPU.

        Raises:
            ConfigError: the loss isn't the task's, or the model can't be run on the batch.

        """
        check_loss_on_copy(self._task, batch, copy.deepcopy(self.model.config), self._build_copy, self.parameters)

    def seed(self, *entropy: int) -> None:
        """Seed all random numbers that a model may draw, those of numpy and Python included."""
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
        """Begin one inner step, as `step`. A GPU skips a step without a finite gradient by itself.

        The host learns of that after it has begun later steps. Only then does it look for the damaged samples, and it
        trains on the batch's other ones.
        """
        if self._read_figures is None:
            return FinishedStep(self.step(batch))
        self.optimizer.zero_grad()
        buffers = [buffer.clone() for buffer in self._buffers]
        result = self._with_tokens_and_problems(self.add_gradient(batch, summed=False), batch)
        if result.scored == 0:
            return FinishedStep(_named(result))
        figures = self._figures(result)
        count = len(figures)
        rates = self.optimizer.rates
        is_finite = figures.isfinite().all()
        skipped = is_finite.logical_not().float()
        self.optimizer.step(result.norm, skipped)
        self.update_scale(figures)
        for buffer, saved_buffer in zip(self._buffers, buffers, strict=True):
            buffer.copy_(torch.where(is_finite, buffer, saved_buffer))

        def finish(numbers: torch.Tensor) -> Step:
            if numbers[:count].isfinite().all():
                read_figures = None if result.figures is None else numbers[count:].view(-1, 2)
                return _named(replace(result, loss=numbers[0], norm=numbers[1], figures=read_figures))
            if self._is_overflow(numbers[:count]):
                return replace(self._skipped(), tokens=result.tokens)
            return self.step_without_damage(batch, rates)

        if result.figures is not None:
            figures = torch.cat([figures, result.figures.flatten()])
        return ReadStep(self._read_figures(figures), finish)

    def step_without_damage(self, batch: Samples, rates: Sequence[Sequence[float]]) -> Step:
        """Find the damaged samples of a batch whose step was skipped; take a step on the others if the job says so.

        `rates` are the learning rates that the step had.
        """
        self.optimizer.zero_grad()
        result = self._add_undamaged(batch, self.back_up(), summed=False)
        result = _named(self._with_tokens_and_problems(result, batch))
        if result.scored:
            self.optimizer.set_rates(rates)
            self.optimizer.step(result.norm)
        return result

    def backward(self, batch: Samples, summed: bool = False) -> Step:
        """Add a batch's gradient to the gradients that are there, if it is finite.

        With `dataset.allow_quarantine` samples without a finite gradient are left out, and the others count. Otherwise
        the whole batch is left out. Batch statistics are restored, too.

        Args:
            batch: samples of slices.
            summed: whether to add the gradient of the sum over scored positions instead of the mean.

        """
        return _named(self._with_tokens_and_problems(self._add_finite_gradient(batch, summed), batch))

    def _with_tokens_and_problems(self, result: Step, batch: Samples) -> Step:
        problems, disabled = self._computation.problems, self._computation.disabled
        return replace(result, tokens=_tokens(batch.arrays), problems=problems, disabled=disabled)

    def _add_finite_gradient(self, batch: Samples, summed: bool) -> Step:
        """Add a batch's gradient if it is finite, or that of its undamaged samples; tokens aren't counted yet."""
        backup = self.back_up()
        result = self.add_gradient(batch, summed)
        if result.scored == 0:
            return result
        figures = self._figures(result)
        self.update_scale(figures)
        if figures.isfinite().all():
            return result
        self.undo_batch(backup)
        if self._is_overflow(figures):
            return self._skipped()
        return self._add_undamaged(batch, backup, summed)

    def _add_undamaged(self, batch: Samples, backup: Backup, summed: bool) -> Step:
        """Add the gradient of a batch's undamaged samples if the job allows it; otherwise skip the batch."""
        damaged = self.find_damaged(batch)
        self.undo_batch(backup)
        if self._allows_quarantine and not damaged.all():
            result = self.add_gradient(batch.part(~damaged), summed)
            if self._is_finite(result):
                return replace(result, bad=batch.keys[damaged])
            self.undo_batch(backup)
        return self._skipped(batch.keys[damaged])

    def add_gradient(self, batch: Samples, summed: bool) -> Step:
        """Add a batch's gradient. Micro-batches are weighted by their scored positions, so the result is the batch's.

        The gradient is that of the trained loss, which includes those of routers; the returned loss is the reported
        one. A model whose own loss is a sum is trained on the sum. Parts in other processes are weighted alike.
        """
        return self.add_parts(micro_batches(batch, self._accumulation), summed)

    def add_parts(self, parts: Sequence[Samples], summed: bool, idle_count: int = 0) -> Step:
        """Add the gradient of micro-batches, of which the last `idle_count` ones have no weight.

        Those are run nevertheless, because all processes of a sharded model have to run equally many.
        """
        all_inputs = [self._inputs(part) for part in parts]
        busy_count = len(all_inputs) - idle_count
        counts = [self._task.count(inputs) for inputs in all_inputs[:busy_count]] + [0] * idle_count
        summed |= self._task.summed
        scored = self._reduction.total(sum(counts))
        totals = torch.zeros(1 + 2 * self._figure_count, device=self.device)
        sums_losses = summed and self.loss_scale is None  # The sum of many losses would overflow.
        earlier_gradients = self._detach_gradients()
        for inputs, count in zip(all_inputs, counts, strict=True):
            if count or idle_count:
                losses = self._forward(inputs)
                weight = count if sums_losses else count / scored
                self._scale_loss(losses.trained * weight).backward()
                totals[0] += losses.reported.detach() * (count / scored)
                if count and losses.figures is not None:
                    totals[1:] += losses.figures.flatten()
        self._reduction.add_up(self._trained, totals)
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._trained, scored if summed else 1)
            add_gradients(self._trained, earlier_gradients)
        figures = totals[1:].view(-1, 2) if self._figure_count else None
        return Step(totals[0], scored, self._reduction.norm(self.optimizer), figures=figures)

    def count(self, part: Samples) -> int:
        """Return the number of scored positions of samples that are trained on."""
        return self._task.count(self._inputs(part))

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Sums of the model's loss and metrics over these batches."""
        autocast = self._computation.autocast
        head = self._computation.head
        return evaluate(self.model, self._task, batches, self.device, autocast, head, self._metrics)

    def announce(self, upcoming_batches: Iterator[Samples]) -> None:
        """Do nothing: a step depends on its own batch."""

    def merged(self, version: int) -> None:
        """Do nothing: no figure or step depends on which global weights were merged."""

    def state(self) -> Flat:
        """Return the scale of losses, if they are scaled."""
        if self.loss_scale is None:
            return {}
        return self.loss_scale.state()

    def restore(self, state: Flat) -> None:
        """Continue with the scale of losses that `state` returned."""
        if self.loss_scale is not None:
            self.loss_scale.restore(state)

    def close(self) -> None:
        """Do nothing: only memory is held."""

    def _is_finite(self, result: Step) -> bool:
        """Whether loss, gradient and batch statistics are finite; waits for the device."""
        figures = self._figures(result)
        return bool(figures.isfinite().all())

    def _figures(self, result: Step) -> torch.Tensor:
        """Figures of a step that are all finite if it is good.

        They are the loss, the norm of the gradient, that of batch statistics and the scale of losses, if there are any.
        """
        figures = [result.loss, result.norm]
        if self._statistics:
            statistics_norm = torch.nn.utils.get_total_norm(self._statistics)
            figures.append(statistics_norm)
        if self.loss_scale is not None:
            figures.append(self.loss_scale.scale)
        return torch.stack(figures)

    def _is_overflow(self, figures: torch.Tensor) -> bool:
        """Whether a gradient isn't finite because of the scale of losses, which is halved then.

        At a scale of 1 the reason is another one: the gradient itself isn't finite.
        """
        if self.loss_scale is None or figures[-1] <= 1:
            return False
        without_norm = torch.cat([figures[:1], figures[2:]])
        return bool(without_norm.isfinite().all())

    def update_scale(self, figures: torch.Tensor) -> None:
        """Change the scale of losses by the figures of a gradient."""
        if self.loss_scale is not None:
            is_finite = figures.isfinite().all()
            self.loss_scale.update(is_finite.logical_not().float())

    def _skipped(self, damaged_keys: npt.NDArray[np.int64] | None = None) -> Step:
        """Return the result of a batch that has changed nothing, with the keys of its damaged samples."""
        zero = torch.zeros((), device=self.device)
        skipped_step = Step(zero, 0, zero)
        return skipped_step if damaged_keys is None else replace(skipped_step, bad=damaged_keys)

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale of losses, if there is one."""
        if self.loss_scale is None:
            return loss
        return loss * self.loss_scale.scale

    def _detach_gradients(self) -> list[torch.Tensor | None]:
        """Remove and return the gradients of earlier batches, if the next ones are scaled."""
        if self.loss_scale is None:
            return []
        gradients: list[torch.Tensor | None] = []
        for parameter in self._trained:
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def find_damaged(self, batch: Samples) -> npt.NDArray[np.bool_]:
        """Return which samples have no finite gradient by themselves; if all gradients are finite, all samples."""
        damaged = np.zeros(len(batch), np.bool_)
        unscaled = nullcontext() if self.loss_scale is None else self.loss_scale.without()
        self.model.eval()
        try:
            with unscaled:
                for index in range(len(batch)):
                    self.optimizer.zero_grad()
                    result = self.add_gradient(batch.part(slice(index, index + 1)), summed=False)
                    damaged[index] = result.scored > 0 and not self._is_finite(result)
        finally:
            self.model.train()
        if not damaged.any():
            damaged[:] = True
        return damaged

    def back_up(self) -> Backup:
        """Copy the gradients that were added so far, and the buffers."""
        gradients = [_clone(parameter.grad) for parameter in self._trained]
        return Backup(gradients, [buffer.clone() for buffer in self._buffers])

    def undo_batch(self, backup: Backup) -> None:
        """Restore gradients and buffers to those before a batch."""
        for parameter, gradient in zip(self._trained, backup.gradients, strict=True):
            parameter.grad = _clone(gradient)
        for buffer, saved_buffer in zip(self._buffers, backup.buffers, strict=True):
            buffer.copy_(saved_buffer)

    def _inputs(self, part: Samples) -> dict[str, torch.Tensor]:
        return self._task.inputs(tensors_of(part), part.keys, self._masking_seed)

    def _forward(self, inputs: dict[str, torch.Tensor]) -> Losses:
        with nullcontext(inputs) if self._known_masks is None else self._known_masks.of(inputs) as needed_inputs:
            return self._computation(self._input_copies.to_device(needed_inputs), self.device)


def micro_batches(batch: Samples, parts: int) -> list[Samples]:
    """Cut a batch into that many micro-batches, or fewer if it has fewer samples."""
    part_samples = max(1, math.ceil(len(batch) / parts))
    return [batch.part(slice(start, start + part_samples)) for start in range(0, len(batch), part_samples)]


def _named(result: Step) -> Step:
    """Return a result with its figures by name, which waits for the device if they are there."""
    if result.figures is None:
        return result
    return replace(result, sums=named_sums(result.figures, TRAINED_FIGURES), figures=None)


def _clone(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _shard(model: torch.nn.Module, mesh: DeviceMesh) -> Shards:
    from hypha_ray.worker.group.shards import Shards  # Most workers need none of it.

    return Shards(model, mesh)


def _tokens(batch: Arrays) -> int | None:
    """Number of tokens that aren't padding; None for data without tokens."""
    if "input_ids" not in batch:
        return None
    return int(token_counts(batch).sum())
