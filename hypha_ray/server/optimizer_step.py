"""The outer step of synchronous training: one step of the inner optimizer on the workers' mean gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hypha_ray.config import Job
from hypha_ray.errors import guarded
from hypha_ray.model.layout import gather, scatter, view
from hypha_ray.model.lora import ActorCritic, build_trained
from hypha_ray.optim.optimizers import Inner, build_optimizer
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.step import export_state, load_state
from hypha_ray.plugins import is_own
from hypha_ray.rl.learner import Joint, critic_settings
from hypha_ray.types import Entry, Flat, Layout
from hypha_ray.types.data import is_trained


class ModelOptimizerStep:
    """A torch optimizer on a model of one fragment, whose values are all replaced before each step.

    So a step is a function of its arguments, and a server that took no earlier step can take it. Weights of 16 bits are
    updated in 32 bits; the workers narrow them.

    Raises:
        HyphaError: the model or the optimizer can't be built.

    """

    def __init__(self, job: Job, layout: Layout) -> None:
        self._layout = layout
        self._model = build_trained(job)
        for parameter in self._model.parameters():
            if parameter.is_floating_point() and parameter.element_size() < 4:
                parameter.data = parameter.data.float()
        self._optimizer = _trained_optimizer(job, self._model)
        self._step: Callable[[], None] = self._optimizer.step
        inner = job.inner_optimizer.name
        if is_own("inner_optimizers", inner):
            self._step = guarded(f"inner optimizer {inner}", self._optimizer.step)
        parameters = dict(self._model.named_parameters())
        self._trained: list[tuple[Entry, torch.nn.Parameter]] = []
        """Entries of the layout with their parameters."""
        for entry in layout.entries:
            if is_trained(entry.group):
                self._trained.append((entry, parameters[entry.name]))

    def step(self, round: int, theta: Flat, state: Flat, out: Flat) -> Flat:
        """Clip the mean gradient by its norm, and take this round's step of the schedule.

        Args:
            round: number of the round, which is the number of the step.
            theta: global weights, never written to.
            state: state of the optimizer, returned by the previous step; empty before the first.
            out: the mean gradient in the groups of parameters, and merged buffers; overwritten by new weights.

        Returns:
            The optimizer's new state.

        """
        weights = dict(out)
        for group in out:
            if is_trained(group):
                weights[group] = theta[group]
        scatter(self._model, self._layout, 0, weights)
        for entry, parameter in self._trained:
            parameter.grad = torch.from_numpy(view(entry, out))
        load_state(self._optimizer, state)
        self._optimizer.seek(round)
        self._step()
        gather(self._model, self._layout, 0, out)
        return export_state(self._optimizer)


def _trained_optimizer(job: Job, model: torch.nn.Module) -> Inner:
    """Build the inner optimizer of all modules from `build_trained`.

    Raises:
        ConfigError: any error of `build_optimizer`.

    """
    steps = inner_steps(job)
    if not isinstance(model, ActorCritic):
        return build_optimizer(model, job.inner_optimizer, steps)
    actor = build_optimizer(model.actor, job.inner_optimizer, steps)
    critic = build_optimizer(model.critic, critic_settings(job), steps)
    return Joint([actor, critic])
