"""Generation by the trained model, against plain transformers, and engines with other log-probabilities."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pydantic import ValidationError
from transformers import MistralConfig, MistralForCausalLM

from hypha_ray.config.rl import LOWEST_TEMPERATURE, RL
from hypha_ray.errors import ConfigError
from hypha_ray.rl.engines import native
from hypha_ray.rl.engines.native import ReservedLayer, Responses, Sampling, choose, draw, draws_on_host, generate
from hypha_ray.rl.policy import Policy, packed_responses, responses_of, sample_of
from hypha_ray.rl.policy_roles import Generator
from hypha_ray.types import Samples
from tests.support.rl import BATCH, END, PAD, job, policy_model, prompts, settings

TEXTS = ["12=", "3456=", "7=", "98=", "5=", "012="]
UNEVEN = prompts(TEXTS, [""] * len(TEXTS))


def _generated(rows: list[int], sampling: Sampling, model: Any) -> Responses:
    part = UNEVEN.part(np.array(rows))
    ids, mask = (torch.from_numpy(part.arrays[name]) for name in ("input_ids", "attention_mask"))
    return generate(model, ids, mask, draw(3, part.keys, sampling), sampling, {END})


def _texts(responses: Responses) -> list[list[int]]:
    rows = zip(responses.ids[:, responses.prompt_width :], responses.mask.bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def test_greedy_responses_are_those_of_transformers() -> None:
    model = policy_model()

    found = _texts(_generated([0, 1, 2, 3, 4, 5], Sampling(1, 8, temperature=0.0), model))

    for text, response in zip(TEXTS, found, strict=True):
        ids = torch.tensor([[2 + "0123456789=".index(one) for one in text]])
        with torch.no_grad():
            plain = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=END, pad_token_id=PAD)
        assert response == plain[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_those_of_one_forward_pass_of_each_response_alone(temperature: float) -> None:
    model = policy_model()
    responses = _generated([0, 1, 2, 3], Sampling(4, 6, temperature), model)

    for row in range(len(responses.ids)):
        ids = responses.ids[row][responses.attention_mask[row].bool()][None]
        count = int(responses.mask[row].sum())
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -count - 1 : -1] / temperature
        plain = logits.log_softmax(-1).gather(1, ids[0, -count:, None])[:, 0]
        torch.testing.assert_close(responses.logprobs[row][:count], plain, atol=1e-5, rtol=1e-5)


def test_scores_of_a_batch_equal_the_log_probabilities_of_its_generation() -> None:
    model = policy_model()
    responses = _generated([0, 1, 2, 3, 4, 5], Sampling(4, 6), model)

    scores = Policy(model, 1.0, None).score(responses)

    torch.testing.assert_close(scores.logprobs * responses.mask, responses.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [[5, 4, 3, 2, 1, 0], [1], [3, 1]])
def test_a_response_depends_on_its_prompt_alone_whatever_else_is_in_the_batch(rows: list[int]) -> None:
    model, sampling = policy_model(), Sampling(3, 8)
    whole = _texts(_generated([0, 1, 2, 3, 4, 5], sampling, model))

    found = _texts(_generated(rows, sampling, model))

    assert found == [whole[3 * row + place] for row in rows for place in range(3)]


def test_a_response_ends_with_the_end_token_or_is_cut() -> None:
    responses = _generated([0, 1, 2, 3, 4, 5], Sampling(8, 5), policy_model())

    for ids, ended in zip(_texts(responses), responses.ended.tolist(), strict=True):
        assert (ids[-1] == END) == ended
        assert END not in ids[:-1]
        assert len(ids) == 5 or ended
    assert {True, False} == set(responses.ended.tolist())


@pytest.mark.parametrize("prompt", [[3, 4, END, 5, 12], [END, 6, 12], [7, 12, END], [END]])
def test_an_end_token_in_a_prompt_ends_no_response_and_is_no_part_of_it(prompt: list[int]) -> None:
    model, sampling, texts = policy_model(), Sampling(1, 8, temperature=0.0), (prompt, [8, 9, 12])
    ids = torch.tensor([[PAD] * (6 - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (6 - len(text)) + [1] * len(text) for text in texts])
    part = UNEVEN.part(np.arange(2))
    responses = generate(model, ids, mask, draw(3, part.keys, sampling), sampling, {END})
    arrays = part.arrays | {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    sample = sample_of(Samples(arrays, part.keys))
    packed = sample.update(packed_responses(sample.ids, responses, 1))

    single = torch.tensor([prompt])
    plain = model.generate(single, max_new_tokens=8, do_sample=False, eos_token_id=END, pad_token_id=PAD)
    wanted = plain[0, len(prompt) :].tolist()
    for found in (responses, responses_of(packed, torch.device("cpu"))):
        assert _texts(found)[0] == wanted
        assert found.ids[0][found.attention_mask[0].bool()].tolist() == prompt + wanted
        assert found.ended[0] == (wanted[-1] == END)


def test_tokens_are_drawn_on_the_cpu_if_a_gpu_has_to_keep_the_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not draws_on_host(torch.device("cuda"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert draws_on_host(torch.device("cuda"))
    assert not draws_on_host(torch.device("cpu"))


def test_tokens_are_chosen_as_often_as_they_are_probable() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).repeat(20_000, 1)
    uniform = torch.from_numpy(np.random.default_rng(0).random(20_000))

    ids, logprobs = choose(logits, uniform, Sampling(1, 1, temperature=2.0))

    expected = (logits[0] / 2).softmax(-1)
    shares = torch.bincount(ids, minlength=4) / 20_000
    assert torch.allclose(shares, expected, atol=0.015)
    assert torch.allclose(logprobs.exp(), expected[ids])


def test_lowest_temperature_samples_what_none_does_and_lower_ones_are_refused() -> None:
    logits, uniform = torch.tensor([[80.0, 90.0, -60.0]]), torch.tensor([0.5], dtype=torch.float64)

    ids, logprobs = choose(logits, uniform, Sampling(1, 1, temperature=LOWEST_TEMPERATURE))

    assert (ids.item(), logprobs.item()) == (1, 0.0)
    for table in ("evaluation", "generation"):
        assert RL.model_validate({table: {"temperature": LOWEST_TEMPERATURE}})
        with pytest.raises(ValidationError):
            RL.model_validate({table: {"temperature": 1e-40}})


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [(Sampling(1, 1, top_k=2), {0, 2}), (Sampling(1, 1, top_p=0.6), {0}), (Sampling(1, 1, top_p=0.9), {0, 2, 1})],
)
def test_only_the_most_probable_tokens_are_sampled_from(sampling: Sampling, kept: set[int]) -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).repeat(5_000, 1)
    uniform = torch.from_numpy(np.random.default_rng(0).random(5_000))

    assert set(choose(logits, uniform, sampling)[0].tolist()) == kept


@pytest.mark.parametrize("window", [None, 6])
def test_memory_reserved_for_long_responses_changes_no_bit(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(initializer_range=0.3, sliding_window=window, **settings())).eval()
    layers: set[type] = set()
    model.register_forward_hook(lambda *run: layers.add(type(run[-1].past_key_values.layers[0])))
    sampling = Sampling(2, 40, temperature=0.9)

    reserved = _generated([0, 1, 2, 3, 4, 5], sampling, model)

    assert (ReservedLayer in layers) == (window is None)
    layers.clear()
    monkeypatch.setattr(native, "_LONG", 41)
    grown = _generated([0, 1, 2, 3, 4, 5], sampling, model)
    assert ReservedLayer not in layers
    assert reserved.mask.shape[1] > 20
    for name in ("ids", "logprobs", "mask"):
        assert torch.equal(getattr(reserved, name), getattr(grown, name))


class Off:
    """Engine that adds something to the policy's own log-probabilities."""

    name, remedy = "an engine", "mend it"

    def __init__(self, policy: Policy, added: float) -> None:
        self._policy, self._added = policy, added

    def generate(
        self,
        model: Any,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        keys: npt.NDArray[Any],
        sampling: Sampling,
        ends: Collection[int],
    ) -> Responses:
        """Respond with the policy's own responses."""
        own = self._policy.sample(ids, attention_mask, draw(0, keys, sampling), sampling, ends)
        return replace(own, logprobs=own.logprobs + self._added)

    def close(self) -> None:
        """Do nothing."""


def generator(added: float) -> Generator:
    policy = Policy(policy_model(), 1.0, None)
    return Generator(job().rl, 0, policy, {END}, Off(policy, added))


def test_engine_with_log_probabilities_that_are_no_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RL021.*an engine.*log-probability nan.*mend it"):
        generator(torch.nan).generate(sample_of(BATCH), {})


@pytest.mark.parametrize(("added", "fits"), [(-0.09, True), (-0.11, False)])
def test_engine_is_refused_by_the_mean_distance_of_its_log_probabilities(added: float, fits: bool) -> None:
    if fits:
        generator(added).generate(sample_of(BATCH), {})
        return
    with pytest.raises(ConfigError, match="RL024"):
        generator(added).generate(sample_of(BATCH), {})
