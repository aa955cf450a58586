"""A tiny policy, its tokenizer, and prompts of the dataset's form."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hypha_ray.types import Samples
from hypha_ray.types.prompts import pack_records

CHARACTERS = "0123456789="
PAD, END = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for a character."""
    vocabulary = {"<pad>": PAD, "<eos>": END, **{one: 2 + place for place, one in enumerate(CHARACTERS)}, "<unk>": 13}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.decoder = decoders.Fuse()
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
