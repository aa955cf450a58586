"""Rollout workers that respond ahead of the training: the same numbers whatever dies, and every prompt once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hypha_ray.failpoints import arm, hits
from hypha_ray.rl.engines.native import draw, generate, training_sampling
from hypha_ray.rl.island import Island
from hypha_ray.types import Samples
from tests.cluster.test_islands import epochs_used, islands, problems
from tests.support.faults import events
from tests.support.jobs import run_job
from tests.support.rl import END, EPISODES, job, place_rewards, prompts, tokenizer

pytestmark = pytest.mark.usefixtures("local_ray")
__all__ = ["problems"]

ANSWERS = ["21", "543", "7", "89"]
BATCHES = [prompts(["12=", "345=", "7=", "98="], ANSWERS, epoch) for epoch in range(5)]
SGD = ("--inner_optimizer.name=sgd", "--inner_optimizer.learning_rate=0.5")
"""Plain steps, in which rounding stays as small as it is; they are long, so that weights of a step ago differ."""


@pytest.fixture
def disarmed() -> Iterator[None]:
    """No failpoints outlive the test in this process."""
    yield
    arm([], None)


def train(island: Island, batches: list[Samples]) -> list[Any]:
    """Results of steps on batches, each of which is told before its turn."""
    found = []
    for place, batch in enumerate(batches):
        island.announce(iter(batches[place + 1 :]))
        found.append(island.step(batch))
    return found


def test_steps_are_those_of_the_decoupled_loss_on_responses_of_older_weights() -> None:
    cap = 1.2
    island = Island(job(*SGD, model_workers=3, staleness=1, behaviour_cap=cap), tokenizer())
    try:
        plain = Island(job(*SGD), tokenizer()).model
        sampling, weights_before, dropped = training_sampling(job().rl), [], 0
        for place, batch in enumerate(BATCHES[:3]):
            weights_before.append({name: one.detach().clone() for name, one in plain.state_dict().items()})
            older = Island(job(*SGD), tokenizer()).model
            older.load_state_dict(weights_before[max(0, place - 1)])
            ids, mask = (torch.from_numpy(batch.arrays[name]) for name in ("input_ids", "attention_mask"))
            responses = generate(older, ids, mask, draw(job().run.seed, batch.keys, sampling), sampling, {END})
            losses, texts, rewards = [], [], torch.empty(0)
            for row in range(16):
                kept, size = responses.attention_mask[row].bool(), int(responses.mask[row].sum())
                tokens = responses.ids[row][kept]
                texts.append("".join("_.0123456789=?"[one] for one in tokens[-size:].tolist()))
                logprobs = plain(input_ids=tokens[None]).logits[0, -size - 1 : -1].log_softmax(-1)
                own = logprobs.gather(1, tokens[-size:, None])[:, 0]
                weight = (own.detach() - responses.logprobs[row, :size]).exp()
                dropped += int((weight > cap).sum())
                losses.append(-(torch.where(weight > cap, 0, weight) * own).mean())
            rewards = place_rewards(texts, [one for one in ANSWERS for _ in range(4)]).view(4, 4)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
            optimizer = torch.optim.SGD(plain.parameters(), 0.5)
            optimizer.zero_grad()
            (torch.stack(losses) * advantages.flatten()).mean().backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), job().inner_optimizer.clip_norm or float("inf"))
            optimizer.step()

        results = train(island, BATCHES[:3])

        assert dropped > 0
        assert [one.sums["staleness"][0] / one.sums["staleness"][1] for one in results] == [0, 1, 1]
        for name, tensor in plain.named_parameters():
            torch.testing.assert_close(dict(island.model.named_parameters())[name], tensor, atol=2e-4, rtol=1e-3)
    finally:
        island.close()


@pytest.mark.parametrize(("staleness", "flags"), [(1, ()), (2, EPISODES)])
def test_a_rollout_worker_that_is_killed_changes_no_bit(
    staleness: int, flags: tuple[str, ...], tmp_path: Path, disarmed: None
) -> None:
    log = tmp_path / "hits.jsonl"
    settings = {"algorithm": "ppo", "reference": "average", "kl": 0.3, "model_workers": 3, "staleness": staleness}
    unharmed = Island(job(*flags, **settings), tokenizer())
    expected = train(unharmed, BATCHES)
    specs = '--testing.failpoints=["rl.generate=kill@3", "rl.reward=kill@7"]'
    harmed = Island(job(specs, f"--testing.failpoint_log={log}", *flags, **settings), tokenizer())
    try:
        found = train(harmed, BATCHES)
        assert hits(log, "rl.generate") == hits(log, "rl.reward") == 1
        lags = [one.sums["staleness"][0] / one.sums["staleness"][1] for one in found]
        assert lags == [min(step, staleness) for step in range(5)]
        assert [one.sums for one in found] == [one.sums for one in expected]
        for name, tensor in unharmed.model.named_parameters():
            assert torch.equal(dict(harmed.model.named_parameters())[name], tensor)
    finally:
        unharmed.close()
        harmed.close()


def test_merged_weights_begin_an_empty_stream() -> None:
    island = Island(job(model_workers=2, staleness=2), tokenizer())
    try:
        train(island, BATCHES[:2])
        island.announce(iter(BATCHES[3:]))
        island.step(BATCHES[2])
        island.merged(1)
        lags = [one.sums["staleness"][0] for one in train(island, [BATCHES[3], BATCHES[2], BATCHES[3]])]
        assert lags[0] == 0 and min(lags[1:]) > 0
    finally:
        island.close()


@pytest.mark.long
def test_islands_whose_rollout_workers_are_killed_learn_on_and_count_every_prompt_once(
    problems: Path, tmp_path: Path
) -> None:
    log = tmp_path / "hits.jsonl"
    specs = [
        f"{call}=kill@{at}" for call, at in zip(("rl.generate", "rl.reward", "rl.train"), (20, 45, 60), strict=True)
    ]
    keys = {
        "testing.failpoints": "[" + ", ".join(f'"{spec}"' for spec in specs) + "]",
        "testing.failpoint_log": log,
        "rounds.update_rounds": 28,
        "rl.model_workers": 2,
        "rl.staleness": 2,
    }
    run = run_job(islands("streams", problems, **keys), tmp_path, problems)

    assert [hits(log, spec.partition("=")[0]) for spec in specs] == [1] * len(specs)
    assert [commit["round"] for commit in run.commits()] == list(range(28))
    assert epochs_used(run, problems) >= 2
    assert len(events(run, "loss")) == 1
    assert [event["role"].partition(" of ")[0] for event in events(run, "revive")] == ["model worker 1"] * 2
    steps = run.of_kind("step")
    assert max(step["staleness"] for step in steps) > 0 and all(step["staleness"] <= 2 for step in steps)
    rewards = [record["reward"] for record in run.of_kind("round")]
    assert rewards[0] < 0.1 and min(rewards[-3:]) > 0.6
