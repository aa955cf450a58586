"""Role of the reward functions, and of a reward model among them: one number for each response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.failpoints import failpoint
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.packing import packed_numbers, prompts_of, responses_of
from hypha_ray.rl.roles.role import Outcome, Role
from hypha_ray.rl.rollout_records import rollout_records
from hypha_ray.rl.scoring import Scored, Scorer
from hypha_ray.types import Sums


class Reward(Role):
    """Reward functions of a job.

    Args:
        scorer: the functions.
        shown: number of responses of a batch to training prompts that replies have records of.

    """

    def __init__(self, scorer: Scorer, shown: int = 0) -> None:
        self._scorer = scorer
        self._shown = shown

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> Outcome:
        """Compute the reward of each response, NaN if absent; with `evaluation` also the shares of right ones."""
        ids, mask = prompts_of(sample)
        prompts = {"input_ids": ids, "attention_mask": mask, "reward_data": sample.data["reward_data"]}
        responses = responses_of(sample, torch.device("cpu"))
        scored = self._scorer.score(prompts, responses)
        failpoint("rl.reward")
        sums = scored.sums() | _lengths(responses)
        if arguments.get("evaluation"):
            sums |= _passed(scored)
        facts = {"shown": rollout_records(sample.ids, scored, self._shown)}
        return Outcome(packed_numbers(sample, {"rewards": scored.total}), sums, facts)


def _passed(scored: Scored) -> Sums:
    passed = scored.passed[scored.verified]
    prompts, samples = passed.shape
    if not prompts:
        return {}
    found = {"pass@1": (float(passed.mean(1).sum()), float(prompts))}
    if samples > 1:
        found[f"pass@{samples}"] = float(passed.any(1).sum()), float(prompts)
    return found


def _lengths(responses: Responses) -> Sums:
    count = float(len(responses.ended))
    return {
        "response_tokens": (float(responses.mask.sum()), count),
        "truncated": (count - float(responses.ended.sum()), count),
    }
