"""Checks of generation before a start, and rows of a model that stand for no token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hypha_ray.config.rl import RL
from hypha_ray.driver.preflight.trials import check_generation
from hypha_ray.errors import ConfigError
from hypha_ray.model.tokenizers import Vocabulary, vocabulary_of
from hypha_ray.rl.engines.continuous import ContinuousEngine
from hypha_ray.rl.engines.native import Responses, Sampling, choose, draw
from hypha_ray.rl.policy import Policy, end_tokens, sample_of
from hypha_ray.rl.roles import trained_roles, untrained_roles
from tests.support.rl import BATCH, END, job, policy_model, prompts, settings, tokenizer

PROMPTS = prompts(["1=", "2345=", "67="], ["1", "2", "3"])
RL_TABLE = RL.model_validate({"generation": {"max_response_tokens": 6}})
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "gpt_neox": {},
    "mistral": {},
    "gemma": {"head_dim": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mamba": {"state_size": 4},
}
IDS, MASK = (torch.from_numpy(BATCH.arrays[name]).long() for name in ("input_ids", "attention_mask"))
SIZE, ROWS, GAP = 14, 40, 6
SAMPLING = Sampling(samples=8, max_tokens=6, temperature=1.3)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_keep_padding_apart_are_accepted_and_others_are_named(family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**settings(), **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=parameter[0].numel() ** -0.5)
    alone = _differs_with_padding(model)

    if alone:
        with pytest.raises(ConfigError, match=rf"RL005.*{type(model).__name__}"):
            check_generation(model, RL_TABLE, tokenizer(), PROMPTS)
    else:
        check_generation(model, RL_TABLE, tokenizer(), PROMPTS)


def _differs_with_padding(model: Any) -> bool:
    """Whether plain transformers gives other logits after a padded prompt, with the mask that it should go by."""
    ids, mask = (torch.from_numpy(PROMPTS.arrays[name]).long() for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        places = (mask.cumsum(1) - 1).clamp(min=0)
        takes = inspect.signature(model.forward).parameters
        options = {"position_ids": places} if "position_ids" in takes else {}
        padded = model(input_ids=ids, attention_mask=mask, **options).logits[0, -1]
        alone = model(input_ids=ids[:1, mask[0].bool()]).logits[0, -1]
    return bool((padded.log_softmax(-1) - alone.log_softmax(-1)).abs().max() > 1e-3)


def _ignore_mask(model: Any) -> None:
    forward = model.forward
    model.forward = lambda input_ids, attention_mask=None, position_ids=None, **rest: forward(
        input_ids=input_ids, position_ids=position_ids, **rest
    )


def _forget_cache(model: Any) -> None:
    forward = model.forward
    model.forward = lambda past_key_values=None, position_ids=None, **rest: forward(**rest)


@pytest.mark.parametrize("spoil", [_ignore_mask, _forget_cache])
def test_a_model_whose_padding_or_cache_changes_probabilities_is_refused(spoil: Callable[[Any], None]) -> None:
    model = policy_model()
    spoil(model)

    with pytest.raises(ConfigError, match="RL005"):
        check_generation(model, RL_TABLE, tokenizer(), PROMPTS)


def test_end_tokens_are_those_of_tokenizer_and_model() -> None:
    model = policy_model()
    model.generation_config.eos_token_id = [5, 6]

    assert end_tokens(model, tokenizer()) == {END, 5, 6}


def test_without_an_end_token_there_is_no_generation() -> None:
    model, without = policy_model(), tokenizer()
    model.generation_config.eos_token_id = None
    without.eos_token = None

    with pytest.raises(ConfigError, match="RL004"):
        end_tokens(model, without)


def padded_model() -> LlamaForCausalLM:
    """A model with more rows than the tokenizer has tokens, which it prefers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **settings(vocab_size=ROWS))).eval()
    with torch.no_grad():
        model.lm_head.weight[SIZE:] *= 3
    return model


def native(model: Any, vocabulary: Vocabulary, sampling: Sampling) -> Responses:
    policy = Policy(model, sampling.temperature, None, vocabulary)
    return policy.sample(IDS, MASK, draw(0, BATCH.keys, sampling), sampling, {END})


def continuous(model: Any, vocabulary: Vocabulary, sampling: Sampling) -> Responses:
    known = Sampling(sampling.samples, sampling.max_tokens, sampling.temperature, vocabulary=vocabulary)
    return ContinuousEngine(0, short=0).generate(model, IDS, MASK, BATCH.keys, known, {END})


def expected_logprobs(model: Any, responses: Responses, known: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities among the known ids, by plain transformers, each response by itself."""
    found = torch.zeros_like(responses.logprobs)
    for row, (ids, kept, taken) in enumerate(zip(responses.ids, responses.attention_mask, responses.mask, strict=True)):
        alone, count = ids[kept.bool()], int(taken.sum())
        with torch.no_grad():
            logits = model(input_ids=alone[None]).logits[0, -count - 1 : -1] / temperature
        masked = torch.full_like(logits, -torch.inf)
        masked[:, known] = logits[:, known]
        found[row, :count] = masked.log_softmax(-1).gather(1, alone[-count:, None])[:, 0]
    return found


@pytest.mark.parametrize("gaps", [(), (GAP,)])
@pytest.mark.parametrize("engine", [native, continuous])
def test_engine_with_more_rows_than_tokens_samples_tokens_by_their_probability_among_tokens(
    engine: Callable[[Any, Vocabulary, Sampling], Responses], gaps: tuple[int, ...]
) -> None:
    model, known = padded_model(), [one for one in range(SIZE) if one not in gaps]

    found = engine(model, Vocabulary(SIZE, gaps), SAMPLING)

    taken = found.ids[:, found.prompt_width :][found.mask.bool()].tolist()
    assert set(taken) <= set(known) and len(set(taken)) > 5
    expected = expected_logprobs(model, found, known, SAMPLING.temperature)
    torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gaps", [(), (GAP,)])
def test_score_with_more_rows_than_tokens_has_entropy_and_gradient_of_the_tokens_alone(gaps: tuple[int, ...]) -> None:
    model, known = padded_model(), [one for one in range(SIZE) if one not in gaps]
    policy = Policy(model, 0.8, None, Vocabulary(SIZE, gaps))
    responses = native(model, policy.vocabulary, SAMPLING)

    scores = policy.score(responses, entropy_gradient=True)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()

    length = responses.mask.shape[1]
    with torch.no_grad():
        places = (responses.attention_mask.cumsum(1) - 1).clamp(min=0)
        output = model(input_ids=responses.ids, attention_mask=responses.attention_mask, position_ids=places)
        among = (output.logits[:, -length - 1 : -1][..., known] / 0.8).log_softmax(-1)
    torch.testing.assert_close(scores.entropy, -(among.exp() * among).sum(-1), atol=1e-4, rtol=1e-4)
    gradient = model.lm_head.weight.grad
    assert gradient is not None and bool(gradient.isfinite().all())
    assert bool((gradient[SIZE:] == 0).all()) and bool((gradient[known] != 0).any(1).all())


def test_greedy_choice_with_more_rows_than_tokens_is_the_most_probable_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0]])

    ids, logprobs = choose(logits, torch.zeros(1), Sampling(1, 1, 0.0, vocabulary=Vocabulary(3)))

    assert ids.tolist() == [1]
    torch.testing.assert_close(logprobs, logits[:, :3].log_softmax(-1)[:, 1])


def test_vocabulary_of_a_tokenizer_has_its_ids_and_no_others() -> None:
    own = tokenizer()

    assert vocabulary_of(own) == Vocabulary(14)
    assert vocabulary_of(own).unknown(17) == [14, 15, 16]
    assert Vocabulary(5, (2,)).unknown(7) == [2, 5, 6]
    assert [one in Vocabulary(5, (2,)) for one in (-1, 0, 2, 4, 5)] == [False, True, False, True, False]


def test_end_tokens_that_the_tokenizer_lacks_end_nothing() -> None:
    model = padded_model()
    model.generation_config.eos_token_id = [5, 30]

    assert end_tokens(model, tokenizer()) == {END, 5}


@pytest.mark.parametrize("flags", [[], ["--rl.generation.engine=continuous", "--rl.evaluation.temperature=1"]])
def test_roles_of_a_job_with_more_rows_than_tokens_sample_tokens_alone(flags: list[str]) -> None:
    longer = {"generation.max_response_tokens": 17}  # Short ones are made by the model's own loop.
    padded, sample = job(f"--model.config.vocab_size={ROWS}", *flags, **longer), sample_of(BATCH)
    trained, beside = trained_roles(padded, padded_model(), tokenizer(), 0), untrained_roles(padded, tokenizer())

    for generator in (trained["actor"], beside["generator"]):
        made = generator.generate(sample, {}).sample
        assert made is not None and made.data["responses"].max() < SIZE
    check_generation(padded_model(), padded.rl, tokenizer(), BATCH)
