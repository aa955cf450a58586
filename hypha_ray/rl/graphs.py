"""Graphs of model function calls: of a training step by the job's settings, and of validation."""

from __future__ import annotations

from collections.abc import Iterator

from hypha_ray.config.tables.rl import RL
from hypha_ray.rl.dataflow.graph import Call, Graph

_DATASET = ("prompts", "keys", "reward_data")
"""Keys of samples before the first call."""
_RESPONSES = ("prompts", "responses", "logprobs", "ended")
_GENERATE = Call("actor_gen", "actor", "generate", ("prompts", "keys"), _RESPONSES[1:])
_REWARD = Call("rew_inf", "reward", "inference", (*_RESPONSES, "reward_data"), ("rewards",))


def step_graph(rl: RL) -> Graph:
    """Return the graph of a training step: reference, critic and proximal policy only where they are used."""
    return Graph.of(_calls(rl), _DATASET)


def validation_graph() -> Graph:
    """Return the graph of validation: generation and reward."""
    return Graph.of([_GENERATE, _REWARD], _DATASET)


def _calls(rl: RL) -> Iterator[Call]:
    yield _GENERATE
    yield _REWARD
    known: tuple[str, ...] = ()
    if rl.reference != "none":
        known += ("reference_logprobs",)
        yield Call("ref_inf", "reference", "inference", _RESPONSES, known[-1:])
    if rl.behaviour_cap is not None:
        known += ("proximal_logprobs",)
        yield Call("actor_inf", "actor", "inference", _RESPONSES, known[-1:])
    values: tuple[str, ...] = ()
    if rl.has_critic:
        values = ("values",)
        yield Call("critic_inf", "critic", "inference", _RESPONSES, values)
    made = ("advantages", "kept", *(["returns"] if rl.has_critic else []))
    yield Call("advantage_inf", "advantage", "inference", (*_RESPONSES, "rewards", *known, *values), made)
    yield Call("actor_train", "actor", "train_step", (*_RESPONSES, "advantages", "kept", *known))
    if rl.has_critic:
        yield Call("critic_train", "critic", "train_step", (*_RESPONSES, "values", "returns", "kept"))
