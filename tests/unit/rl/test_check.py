"""Check of generation before a start."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hypha_ray.config.rl import RL
from hypha_ray.driver.preflight.trials import check_generation
from hypha_ray.errors import ConfigError
from hypha_ray.rl.policy import end_tokens
from tests.support.rl import END, policy_model, prompts, settings, tokenizer

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
