"""Model function calls of a step and of validation, their order, and their division among workers.

A call waits for the calls that make its keys, after the dataflow graph of ReaLHF (arXiv:2406.14088, section 3): edges
come from the names of inputs and outputs alone. The workers of a model have ranks. A batch is divided among the copies
of the model, and shards of samples move to the workers that need them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Final, Literal, TypeAlias

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.rl.dataflow.requests import Hook, Reallocate, Shard
from hypha_ray.texts import counted

Operation: TypeAlias = Literal["generate", "inference", "train_step"]
_DATASET = ("prompts", "keys", "reward_data")
"""Keys of samples before the first call."""
_RESPONSES = ("prompts", "responses", "logprobs", "ended")
"""Keys of responses with their prompts."""
_EPISODES = ("contexts", "sampled")
"""Keys that responses have beside these if they are conversations with an environment."""
_OUTCOMES = ("episode_rewards", "turns")
"""Keys of what an environment has made of them."""
ROLLOUT: Final = "rollout"
"""Name of the call of rollout workers."""
_GENERATION = "actor_gen"
_REWARD = "rew_inf"
GENERATING: Final = (_GENERATION, _REWARD, ROLLOUT)
"""Names of the calls that make responses with their rewards."""
_GRADIENT = ("gradients", "losses")
_GENERATED = ("responses", "logprobs", "ended")
Locations: TypeAlias = Mapping[str, Mapping[str, Shard]]
"""Shard of each id under each key: `locations[key][id]`."""


@dataclass(frozen=True)
class Call:
    """One model function call."""

    name: str
    """Name of the call, such as ``actor_gen``."""
    role: str
    """Role of the model, such as ``actor``."""
    op: Operation
    """Operation of the model's interface."""
    takes: tuple[str, ...]
    """Keys that the call needs."""
    gives: tuple[str, ...] = ()
    """Keys that the call makes; empty for training."""


@dataclass(frozen=True)
class Graph:
    """Calls of a step, checked; made by `Graph.of`."""

    calls: tuple[Call, ...]
    """Calls in the order in which they were given."""
    levels: tuple[tuple[Call, ...], ...]
    """Calls by level; the calls of one level don't depend on each other and may run at once."""

    @classmethod
    def of(cls, calls: Iterable[Call], dataset_keys: Iterable[str]) -> Graph:
        """Check calls and order them.

        Args:
            calls: the calls, each with a name of its own.
            dataset_keys: keys that samples have before the first call.

        Raises:
            ConfigError: RL010 the calls wait for each other in a circle. RL011 a key is made twice, or two calls have
                one name. RL012 a key is made by no call and isn't in the dataset.

        """
        ordered = tuple(calls)
        first_keys = tuple(dataset_keys)
        makers = _makers(ordered, first_keys)
        all_keys = {*makers, *first_keys}
        for call in ordered:
            for key in call.takes:
                if key not in all_keys:
                    allowed = ", ".join(sorted(all_keys))
                    raise ConfigError("RL012", f"call {call.name} needs a key that no call makes", key, allowed)
        return cls(ordered, _levels(ordered, makers))

    def text(self) -> str:
        """Return the graph as text: a line for each call, with its level and its keys."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for number, level in enumerate(self.levels):
            for call in level:
                line = f"{number}  {call.name} ({call.role}.{call.op}): " + ", ".join(call.takes)
                if call.gives:
                    line += " -> " + ", ".join(call.gives)
                yield line


def _makers(calls: tuple[Call, ...], dataset_keys: tuple[str, ...]) -> dict[str, Call]:
    for name, times in Counter(call.name for call in calls).items():
        if times > 1:
            raise ConfigError("RL011", f"{times} calls have one name", name, "names that differ")
    makers: dict[str, Call] = {}
    for call in calls:
        for key in call.gives:
            if key in makers or key in dataset_keys:
                maker = f"call {makers[key].name}" if key in makers else "the dataset"
                raise ConfigError("RL011", f"call {call.name} makes a key that {maker} has made", key)
            makers[key] = call
    return makers


def _levels(calls: tuple[Call, ...], makers: dict[str, Call]) -> tuple[tuple[Call, ...], ...]:
    order: TopologicalSorter[str] = TopologicalSorter()
    for call in calls:
        makers_of_call = [makers[key].name for key in call.takes if key in makers]
        order.add(call.name, *makers_of_call)
    try:
        order.prepare()
    except CycleError as error:
        raise ConfigError("RL010", "calls wait for each other", " -> ".join(error.args[1])) from None
    levels: list[tuple[Call, ...]] = []
    while order.is_active():
        names = order.get_ready()
        level = [call for call in calls if call.name in names]
        levels.append(tuple(level))
        order.done(*names)
    return tuple(levels)


def step_graph(rl: RL) -> Graph:
    """Return the graph of a training step: reference, critic and proximal policy only where they are used."""
    keys: tuple[str, ...] = _DATASET
    if rl.responds_before:
        keys += rollout_call(rl).gives
    return Graph.of(_calls(rl), keys)


def step_text(rl: RL) -> str:
    """Return the graph of a training step as text, and before it the calls that have answered when it begins."""
    text = step_graph(rl).text()
    if rl.refill:
        rollout = rollout_graph(rl).text().replace("\n", f"\nup to {rl.refill + 1} times  ")
        return f"up to {rl.refill + 1} times  {rollout}\n{text}"
    if not rl.responds_before:
        return text
    rollout = Graph.of([rollout_call(rl)], _DATASET).text().removeprefix("0  ")
    ahead = f"up to {rl.staleness} ahead" if rl.is_asynchronous else "before"
    responders_text = f", by up to {counted(rl.generators, 'generator')}" if rl.generators else ""
    return f"{ahead}{responders_text}  {rollout}\n{text}"


def rollout_graph(rl: RL) -> Graph:
    """Return the graph of validation, and of draws that refill a batch: generation and reward."""
    return Graph.of([_generation(rl), _reward(rl)], _DATASET)


def rollout_call(rl: RL) -> Call:
    """Return the call of rollout workers, whose keys the samples of a stream have beside those of the dataset."""
    return Call(ROLLOUT, "rollout", "generate", _DATASET, (*_generated(rl), "rewards"))


def generation_hooks(model_workers: int) -> tuple[Hook, ...]:
    """Return hooks before generation: workers that don't train get the weights of the actor."""
    return (Reallocate("actor", "generator"),) if model_workers > 1 else ()


def _generation(rl: RL) -> Call:
    role = "generator" if rl.model_workers > 1 else "actor"
    prompt_keys = ("prompts", "keys") if rl.environment is None else _DATASET
    return Call(_GENERATION, role, "generate", prompt_keys, _generated(rl))


def _generated(rl: RL) -> tuple[str, ...]:
    """Return the keys that generation makes."""
    return _GENERATED if rl.environment is None else (*_GENERATED, *_EPISODES, *_OUTCOMES)


def _responses(rl: RL) -> tuple[str, ...]:
    """Return the keys of responses with what is before them."""
    return _RESPONSES if rl.environment is None else (*_RESPONSES, *_EPISODES)


def _reward(rl: RL) -> Call:
    outcomes = () if rl.environment is None else _OUTCOMES
    return Call(_REWARD, "reward", "inference", (*_responses(rl), *outcomes, "reward_data"), ("rewards",))


def _calls(rl: RL) -> Iterator[Call]:
    responses = _responses(rl)
    if not rl.responds_before:
        yield _generation(rl)
        yield _reward(rl)
    logprobs: tuple[str, ...] = ()
    if rl.reference != "none":
        yield Call("ref_inf", "reference", "inference", responses, ("reference_logprobs",))
        logprobs += ("reference_logprobs",)
    if rl.scores_again:
        yield Call("actor_inf", "actor", "inference", responses, ("proximal_logprobs",))
        logprobs += ("proximal_logprobs",)
    values: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    if rl.has_critic:
        values = ("values",)
        returns = ("returns",)
        yield Call("critic_inf", "critic", "inference", responses, values)
    rewarded = (*responses, "rewards", *logprobs, *values)
    yield Call("advantage_inf", "advantage", "inference", rewarded, ("advantages", "kept", *returns))
    with_advantages = (*responses, "advantages", "kept", *logprobs)
    if rl.data_parallel:
        yield Call("actor_grad", "learner", "inference", with_advantages, _GRADIENT)
        yield Call("actor_train", "actor", "train_step", _GRADIENT)
    else:
        yield Call("actor_train", "actor", "train_step", with_advantages)
    if rl.has_critic:
        yield Call("critic_train", "critic", "train_step", (*responses, "values", "returns", "kept"))


@dataclass(frozen=True)
class Mesh:
    """Model workers that share the copies of one model.

    Tensor ranks are next to each other, then data ranks, then pipeline stages, as in Megatron-LM (arXiv:2104.04473).

    Raises:
        ConfigError: RL013 the workers can't be divided in this way.

    """

    workers: tuple[int, ...]
    """Numbers of the model workers, each once."""
    tensor: int = 1
    """Number of workers that share a layer."""
    pipeline: int = 1
    """Number of stages."""

    def __post_init__(self) -> None:
        copy_size = self.tensor * self.pipeline
        worker_count = len(self.workers)
        if not worker_count or len(set(self.workers)) != worker_count or worker_count % copy_size:
            problem = "model workers can't be divided into copies of the model"
            raise ConfigError("RL013", problem, str(self.workers), f"a multiple of {copy_size} workers, each once")

    @property
    def data(self) -> int:
        """Number of copies of the model, each of which gets another part of a batch."""
        return len(self.workers) // (self.tensor * self.pipeline)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Worker of each copy that holds its inputs and outputs: the last stage, tensor rank 0."""
        last_start = len(self.workers) - self.data * self.tensor
        return self.workers[last_start :: self.tensor]

    def copy(self, rank: int) -> tuple[int, ...]:
        """Return the workers of the copy with this data rank."""
        stage_size = self.data * self.tensor
        workers: list[int] = []
        for start in range(rank * self.tensor, len(self.workers), stage_size):
            workers += self.workers[start : start + self.tensor]
        return tuple(workers)


@dataclass(frozen=True)
class Moves:
    """Shards that workers need before a call, and the collectives that would move them."""

    shards: Mapping[int, tuple[Shard, ...]]
    """Shards of other workers that each worker lacks, each once."""
    gathers: int
    """Number of workers that get shards of more than one other worker."""
    scatters: int
    """Number of shards from which workers get different ids."""
    broadcasts: int
    """Number of shards from which several workers get the same ids."""

    @property
    def counts(self) -> Counter[str]:
        """Number of collectives of each kind."""
        return Counter(gathers=self.gathers, scatters=self.scatters, broadcasts=self.broadcasts)


def windows(samples: int, parts: int) -> tuple[range, ...]:
    """Divide samples into ranges one after the other, whose sizes differ by one at most."""
    bounds = [samples * part // parts for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def balanced(tokens: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Divide samples so that parts have about as many tokens, and each at least one sample if there are enough.

    The longest sample goes to the part with the fewest tokens (Graham 1969, longest processing time first); ties go to
    the part with the fewest samples.

    Args:
        tokens: tokens of each sample.
        parts: number of parts.

    Returns:
        Indices of the samples of each part, in ascending order.

    """
    members: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        total, count, part = heapq.heappop(heap)
        members[part].append(index)
        heapq.heappush(heap, (total + tokens[index], count + 1, part))
    return tuple(tuple(sorted(part)) for part in members)


def moves(
    locations: Locations,
    ids_of_workers: Mapping[int, Sequence[str]],
    keys: Sequence[str],
    transferred: Collection[tuple[int, Shard]] = (),
) -> Moves:
    """Plan the transfers before a call.

    Args:
        locations: shard of every id under every key.
        ids_of_workers: ids that each worker needs.
        keys: keys that the call takes.
        transferred: pairs of a worker and a shard that it got before another call.

    """
    targets: dict[Shard, dict[int, set[str]]] = {}  # Ids that each worker gets from a shard.
    for worker, ids in ids_of_workers.items():
        for key in keys:
            for name in ids:
                shard = locations[key][name]
                if shard.worker != worker and (worker, shard) not in transferred:
                    targets.setdefault(shard, {}).setdefault(worker, set()).add(name)
    incoming: dict[int, list[Shard]] = {worker: [] for worker in ids_of_workers}
    scatters = 0
    broadcasts = 0
    for shard in sorted(targets):
        for worker in targets[shard]:
            incoming[worker].append(shard)
        ids_of_targets = {frozenset(ids) for ids in targets[shard].values()}
        if len(ids_of_targets) > 1:
            scatters += 1
        elif len(targets[shard]) > 1:
            broadcasts += 1
    gathers = 0
    for shards in incoming.values():
        sources = {shard.worker for shard in shards}
        gathers += len(sources) > 1
    return Moves({worker: tuple(shards) for worker, shards in incoming.items()}, gathers, scatters, broadcasts)
