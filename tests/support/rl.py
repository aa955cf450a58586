"""A tiny policy, its tokenizer, and prompts of the dataset's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.rl.rewards.response import pack_records
from hypha_ray.types import Samples

CHARACTERS = "0123456789="
PAD, END = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for a character."""
    vocabulary = {"<pad>": PAD, "<eos>": END, **{one: 2 + place for place, one in enumerate(CHARACTERS)}, "<unk>": 13}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def settings(**more: Any) -> dict[str, Any]:
    """Table `model.config` of a Llama with random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return {"vocab_size": 14, "bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD, **sizes, **heads, **more}


def policy_model(seed: int = 0) -> LlamaForCausalLM:
    """The model in evaluation mode; its weights are large enough for probabilities to differ."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **settings())).eval()


def classifier(folder: Path, dtype: torch.dtype = torch.float32, chat_template: str | None = None) -> None:
    """Save a reward model with random weights, and its tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(num_labels=1, initializer_range=0.3, **settings())
    LlamaForSequenceClassification(config).to(dtype).save_pretrained(folder)
    own = tokenizer()
    own.chat_template = chat_template
    own.save_pretrained(folder)


def prompts(texts: list[str], answers: list[str], epoch: int = 0) -> Samples:
    """Pack texts as prompts of slice 0, padded on the left."""
    width = max(map(len, texts))
    ids, mask = np.full((len(texts), width), PAD, np.int32), np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :] = [2 + CHARACTERS.index(one) for one in text]
        mask[row, width - len(text) :] = 1
    records = pack_records([{"task": "test", "answer": answer} for answer in answers])
    keys = np.array([[epoch, 0, row] for row in range(len(texts))], np.int64)
    return Samples({"input_ids": ids, "attention_mask": mask, "reward_data": records}, keys)


BATCH = prompts(["12=", "345=", "7=", "98="], ["21", "543", "7", "89"])
"""Prompts that a model with random weights now and then answers in part."""

EPISODES = (
    "--rl.environment=number_game",
    "--rl.episode.turns=2",
    "--rl.generation.max_response_tokens=24",
    '--rl.reward.functions=["environment", "positions"]',
)
"""Flags of a job whose responses are conversations of up to two turns."""


def job(*flags: str, **rl: Any) -> Job:
    """A job with a tiny policy: of GRPO, unless told otherwise."""
    model = [f"--model.config.{name}={value}" for name, value in settings(model_type="llama").items()]
    table = {"algorithm": "grpo", "group_size": 4, "generation.max_response_tokens": 5, **rl}
    more = [f"--rl.{name}={value}" for name, value in table.items()]
    flat = [*model, *more, '--rl.reward.functions=["positions"]', "--inner_optimizer.weight_decay=0", *flags]
    return load(["--dataset.path", "unused", "--inner_optimizer.learning_rate=1e-2", *flat]).job


def place_rewards(responses: list[str], answers: list[str]) -> torch.Tensor:
    """The share of right places, the end being one of them; "." is the end token, "_" and "?" are none of a text."""
    found = []
    for response, answer in zip(responses, answers, strict=True):
        places = zip(response.translate({ord("_"): None, ord("?"): None}), f"{answer}.", strict=False)
        found.append(sum(one == other for one, other in places) / (len(answer) + 1))
    return torch.tensor(found, dtype=torch.float32)
