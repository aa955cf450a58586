"""Generation by transformers' continuous batching: tokens and probabilities are those of the model."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from hypha_ray.config.load import load
from hypha_ray.config.rl import RL
from hypha_ray.driver.preflight.trials import check_generation
from hypha_ray.errors import ConfigError
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.native import Responses, Sampling, draw, generate
from hypha_ray.rl.island import Island
from hypha_ray.rl.policy import Policy
from hypha_ray.types import Samples
from tests.support.rl import BATCH, END, EPISODES, PAD, job, policy_model, prompts, settings, tokenizer

PROMPTS = prompts(["1=", "2345=", "67=", "98765432="], ["1", "2", "3", "4"])


LONG = prompts(["12345678901234567=", "12345678901234567=", "9876543210987654321="], ["1", "2", "3"])
"""Prompts that fill pages of a cache, two of them equal."""


def respond(
    model: Any,
    sampling: Sampling,
    ends: tuple[int, ...] = (END,),
    seed: int = 0,
    engine: ContinuousEngine | None = None,
    batch: Samples = PROMPTS,
) -> Responses:
    ids, mask = (torch.from_numpy(batch.arrays[name]).long() for name in ("input_ids", "attention_mask"))
    engine = engine or ContinuousEngine(seed, short=0)
    return engine.generate(model, ids, mask, batch.keys, sampling, ends)


def tokens_of(responses: Responses) -> list[list[int]]:
    """Token ids of each response."""
    rows = zip(responses.ids[:, responses.prompt_width :], responses.mask.bool(), strict=True)
    return [row[mask].tolist() for row, mask in rows]


@pytest.mark.parametrize("ends", [(END,), (END, 8), (4, 10)])
def test_the_most_probable_tokens_are_those_of_generate_up_to_an_end_token_or_the_limit(ends: tuple[int, ...]) -> None:
    model = policy_model()
    model.generation_config.repetition_penalty = 5.0
    found = respond(model, Sampling(1, 7, temperature=0.0), ends)

    model.generation_config.repetition_penalty = None
    for row, tokens in enumerate(tokens_of(found)):
        prompt = torch.from_numpy(PROMPTS.arrays["input_ids"][row][PROMPTS.arrays["attention_mask"][row] == 1]).long()
        expected = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            do_sample=False,
            max_new_tokens=7,
            eos_token_id=list(ends),
            pad_token_id=PAD,
        )
        assert tokens == expected[0, len(prompt) :].tolist()
        assert bool(found.ended[row]) == (tokens[-1] in ends)
        assert found.attention_mask[row].sum() == len(prompt) + len(tokens)
    assert any(found.ended) or ends == (END,)


@pytest.mark.slow
def test_sampled_tokens_have_the_policys_probabilities_at_the_temperature() -> None:
    model = policy_model()
    torch.manual_seed(5)
    state, attention = torch.random.get_rng_state(), model.config._attn_implementation
    found = respond(model, Sampling(6, 9, temperature=0.7))

    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config._attn_implementation == attention
    own = Policy(model, 0.7, None).logprobs(found)
    assert torch.allclose(own * found.mask, found.logprobs, atol=1e-5)
    assert found.ids.shape[0] == 24 and len({tuple(one) for one in tokens_of(found)}) > 15
    for row, ids in enumerate(found.ids[:, : found.prompt_width].tolist()):
        assert ids == PROMPTS.arrays["input_ids"][row // 6].tolist()
    assert found.ended.tolist() == [one[-1] == END for one in tokens_of(found)]
    assert tokens_of(respond(model, Sampling(6, 9, temperature=0.7))) == tokens_of(found)
    assert tokens_of(respond(model, Sampling(6, 9, temperature=0.7), seed=1)) != tokens_of(found)


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    model = policy_model()
    first = torch.tensor([one[0] for one in tokens_of(respond(model, Sampling(500, 1)))]).view(4, 500)
    few = torch.tensor([one[0] for one in tokens_of(respond(model, Sampling(500, 1, top_k=3)))]).view(4, 500)
    for row in range(4):
        prompt = torch.from_numpy(PROMPTS.arrays["input_ids"][row][PROMPTS.arrays["attention_mask"][row] == 1]).long()
        with torch.no_grad():
            probabilities = model(prompt[None]).logits[0, -1].softmax(0)
        shares = torch.bincount(first[row], minlength=14) / 500
        assert float((shares - probabilities).abs().max()) < 0.07
        assert set(few[row].tolist()) == set(probabilities.topk(3).indices.tolist())


def test_weights_of_16_bits_generate_as_they_are() -> None:
    model = policy_model().bfloat16()
    found = respond(model, Sampling(4, 9))
    gap = (Policy(model, 1.0, None).logprobs(found) - found.logprobs).abs() * found.mask

    assert found.logprobs.dtype == torch.float32
    assert float(gap.sum() / found.mask.sum()) < 0.02


@pytest.mark.parametrize(
    ("family", "sizes", "told"),
    [
        ("llama", {}, None),
        ("qwen2", {}, None),
        ("mistral", {"sliding_window": 4}, None),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "num_key_value_heads": 4}, None),
        ("mamba", {"state_size": 4}, "RL026.*MambaForCausalLM can't generate by continuous batching.*to native"),
    ],
)
def test_models_that_it_knows_are_accepted_and_others_refused(
    family: str, sizes: dict[str, Any], told: str | None
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**settings(), **sizes})).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=parameter[0].numel() ** -0.5)
    rl = RL.model_validate({"generation": {"engine": "continuous", "max_response_tokens": 6}})
    if told is None:
        check_generation(model, rl, tokenizer(), PROMPTS)
    else:
        with pytest.raises(ConfigError, match=told):
            check_generation(model, rl, tokenizer(), PROMPTS)


@pytest.mark.parametrize("flags", [(), EPISODES])
def test_an_island_generates_with_the_weights_of_each_step(flags: tuple[str, ...]) -> None:
    settings = {"generation.engine": "continuous", "generation.max_response_tokens": 18, "behaviour_cap": 2.0}
    island = Island(job(*flags, **settings), tokenizer())
    before = [one.detach().clone() for one in island.model.parameters()]
    for _ in range(2):
        gap, tokens = island.step(BATCH).sums["logprob_gap"]
        assert gap / tokens < 1e-6
    assert any(not torch.equal(one, old) for one, old in zip(island.model.parameters(), before, strict=True))


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Managers that transformers has set up."""
    made: list[Any] = []
    set_up = LlamaForCausalLM.init_continuous_batching

    def counted(*arguments: Any) -> Any:
        made.append(set_up(*arguments))
        return made[-1]

    monkeypatch.setattr(LlamaForCausalLM, "init_continuous_batching", counted)
    return made


def assert_equal(responses: Responses, others: Responses) -> None:
    for name in ("ids", "logprobs", "mask", "ended"):
        assert torch.equal(getattr(responses, name), getattr(others, name)), name


@pytest.mark.slow
def test_calls_after_a_change_of_weights_share_a_cache_and_respond_as_a_new_engine(managers: list[Any]) -> None:
    engine, model, threads = ContinuousEngine(0, short=0), policy_model(), threading.enumerate()
    training, greedy = Sampling(6, 9, temperature=0.7), Sampling(1, 9, temperature=0.0)
    for seed in range(3):
        model.load_state_dict(policy_model(seed).state_dict())
        for sampling in (training, greedy, replace(training, max_tokens=4)):
            shared = respond(model, sampling, engine=engine, batch=LONG)
            assert_equal(shared, respond(policy_model(seed), sampling, batch=LONG))
            assert threading.enumerate() == threads
    assert len([manager for manager in managers if manager.model is model]) == 2


@pytest.mark.parametrize("change", ["more", "moved", "other settings"])
def test_caches_that_no_longer_fit_are_set_up_anew(managers: list[Any], change: str) -> None:
    engine, model, sampling = ContinuousEngine(0, short=0), policy_model(), Sampling(2, 9)
    respond(model, sampling, engine=engine)
    match change:
        case "more":
            sampling = replace(sampling, max_tokens=20)
        case "moved":
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
        case "other settings":
            sampling = replace(sampling, top_k=3)

    found = respond(model, sampling, engine=engine)

    assert len(managers) == 2
    assert_equal(found, respond(policy_model(), sampling))


@pytest.mark.slow
def test_an_error_ends_the_cache_and_the_next_call_responds_again() -> None:
    engine, model, sampling = ContinuousEngine(0, short=0), policy_model(), Sampling(3, 9)
    respond(model, sampling, engine=engine)
    hook = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match=r"RL026.*LlamaForCausalLM can't.*ZeroDivisionError: division by zero"):
        respond(model, sampling, engine=engine)
    hook.remove()

    assert_equal(respond(model, sampling, engine=engine), respond(model, sampling))


def test_short_responses_are_those_of_the_models_own_loop(managers: list[Any]) -> None:
    model, sampling = policy_model(), Sampling(3, 16, temperature=0.7)
    ids, mask = (torch.from_numpy(PROMPTS.arrays[name]).long() for name in ("input_ids", "attention_mask"))

    found = respond(model, sampling, engine=ContinuousEngine(4))

    assert_equal(found, generate(model, ids, mask, draw(4, PROMPTS.keys, sampling), sampling, (END,)))
    assert not managers
    respond(model, replace(sampling, max_tokens=17), engine=ContinuousEngine(4))
    assert len(managers) == 1


@pytest.mark.parametrize(("flag", "told"), [("run.mode=replay", "replay"), ("worker.autocast=bf16", "16 bits")])
def test_what_continuous_batching_does_not_do_is_refused(flag: str, told: str) -> None:
    flags = ["--dataset.path", "unused", "--rl.algorithm=grpo", "--rl.generation.engine=continuous"]
    with pytest.raises(ConfigError, match=rf"CFG011.*engine = \"continuous\".*{told}"):
        load([*flags, f"--{flag}"])
