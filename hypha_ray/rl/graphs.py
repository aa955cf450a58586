"""Graphs of model function calls: of a training step by the job's settings, and of validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hypha_ray.config.tables.rl import RL
from hypha_ray.rl.dataflow.graph import Call, Graph
from hypha_ray.rl.dataflow.requests import Hook, Reallocate

_DATASET = ("prompts", "keys", "reward_data")
"""Keys of samples before the first call."""
_RESPONSES = ("prompts", "responses", "logprobs", "ended")
_GRADIENT = ("gradients", "losses")
_REWARD = Call("rew_inf", "reward", "inference", (*_RESPONSES, "reward_data"), ("rewards",))
ROLLOUT: Final = Call("rollout", "rollout", "generate", _DATASET, (*_RESPONSES[1:], "rewards"))
"""Call of rollout workers, by which samples of a stream have more keys than those of a dataset."""


def step_graph(rl: RL) -> Graph:
    """Return the graph of a training step: reference, critic and proximal policy only where they are used."""
    return Graph.of(_calls(rl), (*_DATASET, *(ROLLOUT.gives if rl.is_asynchronous else ())))


def step_text(rl: RL) -> str:
    """Return the graph of a training step as text, and before it the call whose results a stream brings."""
    text = step_graph(rl).text()
    return (
        f"up to {rl.staleness} ahead  {Graph.of([ROLLOUT], _DATASET).text()[3:]}\n{text}"
        if rl.is_asynchronous
        else text
    )


def validation_graph(model_workers: int = 1) -> Graph:
    """Return the graph of validation: generation and reward."""
    return Graph.of([_generation(model_workers), _REWARD], _DATASET)


def generation_hooks(model_workers: int) -> tuple[Hook, ...]:
    """Return hooks before generation: workers that don't train get the weights of the one that does."""
    return (Reallocate("actor", "generator"),) if model_workers > 1 else ()


def _generation(model_workers: int) -> Call:
    role = "generator" if model_workers > 1 else "actor"
    return Call("actor_gen", role, "generate", ("prompts", "keys"), _RESPONSES[1:])


def _calls(rl: RL) -> Iterator[Call]:
    if not rl.is_asynchronous:
        yield _generation(rl.model_workers)
        yield _REWARD
    known: tuple[str, ...] = ()
    if rl.reference != "none":
        known += ("reference_logprobs",)
        yield Call("ref_inf", "reference", "inference", _RESPONSES, known[-1:])
    if rl.scores_again:
        known += ("proximal_logprobs",)
        yield Call("actor_inf", "actor", "inference", _RESPONSES, known[-1:])
    values: tuple[str, ...] = ()
    if rl.has_critic:
        values = ("values",)
        yield Call("critic_inf", "critic", "inference", _RESPONSES, values)
    made = ("advantages", "kept", *(["returns"] if rl.has_critic else []))
    yield Call("advantage_inf", "advantage", "inference", (*_RESPONSES, "rewards", *known, *values), made)
    learned = (*_RESPONSES, "advantages", "kept", *known)
    if rl.data_parallel:
        yield Call("actor_grad", "learner", "inference", learned, _GRADIENT)
    yield Call("actor_train", "actor", "train_step", _GRADIENT if rl.data_parallel else learned)
    if rl.has_critic:
        yield Call("critic_train", "critic", "train_step", (*_RESPONSES, "values", "returns", "kept"))
