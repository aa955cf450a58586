"""Facts of reinforcement learning for external trainers: the job as they are told it, and bounds of their figures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from hypha_ray.config.tables.rewards import MODEL
from hypha_ray.config.tables.rl import RL
from hypha_ray.model.loading.tokenizer import PackedTokenizer
from hypha_ray.redaction import redacted_tree
from hypha_ray.worker.bridged.told import Bounds, Contents


def told_of_policies(rl: RL, tokenizer: PackedTokenizer) -> dict[str, Any]:
    """Return the parts of a job's definition that trainers of policies need: the table, and the tokenizer's files."""
    table = rl.model_dump(mode="json", exclude={"generation": {"server"}, "reward": {"judge"}})
    files = {name: b64encode(content).decode() for name, content in tokenizer.files}
    return {"rl": redacted_tree(table), "tokenizer": files}


def figures_of(rl: RL) -> Mapping[str, Bounds] | None:
    """Return the figures that evaluations have, with their bounds; None without reinforcement learning.

    A reward model tells no right response, so where it is the first function, there is no share of them.
    """
    if rl.algorithm is None:
        return None
    samples = float(rl.evaluation.samples)
    found = {
        "reward": Bounds(samples),
        "response_tokens": Bounds(samples, 0.0, float(rl.generation.max_response_tokens)),
        "truncated": Bounds(samples, 0.0, 1.0),
    }
    first = {name for functions in (rl.reward.functions, *rl.reward.by_task.values()) for name in functions[:1]}
    if first <= {MODEL}:
        return found
    return found | {f"pass@{count}": Bounds(1.0, 0.0, 1.0) for count in (1, rl.evaluation.samples)}


def with_responses(rl: RL, prompt: Contents) -> Contents:
    """Return the contents of a sample with its responses, which a loss is a mean over; of other jobs they stay."""
    if rl.algorithm is None:
        return prompt
    longest = rl.generation.max_response_tokens
    return Contents(rl.group_size * (prompt.tokens + longest), max(prompt.positions, rl.group_size * longest))
