"""A language model that writes answers to prompts, or turns of a conversation, as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import ConfigError
from hypha_ray.model.checks.positions import max_positions
from hypha_ray.model.environment import device_of
from hypha_ray.model.loading.preprocess import load_preprocessor
from hypha_ray.model.loading.tokenizer import prompt_ids, tokenizer_of
from hypha_ray.model.saved_model import open_saved
from hypha_ray.model.vocabulary import settle_generation

_UNLIMITED = 1 << 30


class Writer:
    """Writes by a saved model.

    Args:
        folder: folder of the model, with its tokenizer.
        raw: no chat template is used.
        system: system message of a conversation; None: none.
        seed: seed of torch's generators, which sampling draws from.

    Raises:
        HyphaError: the model or its tokenizer can't be loaded, or it generates no text.

    """

    def __init__(self, folder: Path, *, raw: bool = False, system: str | None = None, seed: int = 0) -> None:
        network, task = open_saved(folder)
        if task.name not in ("causal-lm", "seq2seq-lm"):
            raise ConfigError("GEN002", "this model generates no text", task.name, "causal-lm, seq2seq-lm")
        self._tokenizer = tokenizer_of(load_preprocessor(Preprocessor(), None, Model(repository=str(folder))))
        self._network: Any = network.to(device_of("auto"))
        self._ends = settle_generation(network, self._tokenizer)
        self._system, self._turns = system, list[dict[str, str]]()
        self.chats = not raw and getattr(self._tokenizer, "chat_template", None) is not None
        self.forget()
        torch.manual_seed(seed)

    def forget(self) -> None:
        """Begin a new conversation."""
        self._turns = [] if self._system is None else [{"role": "system", "content": self._system}]

    def write(self, prompt: str, *, max_new_tokens: int, temperature: float, top_p: float) -> str:
        """Print an answer as it is generated, and return it; of a conversation it is the next turn.

        Args:
            prompt: text to answer, or to go on from.
            max_new_tokens: number of tokens after which the answer is cut off.
            temperature: divisor of logits; 0: the most probable token each time.
            top_p: probability mass of the tokens to choose from.

        Raises:
            ConfigError: GEN003, the model has too few positions for the prompt.

        """
        ids = self._encoded(prompt)
        room = self._room(ids.shape[1])
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
        output = self._network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=_Printer(self._tokenizer, self._ends),
            max_new_tokens=min(max_new_tokens, room),
            do_sample=temperature > 0,
            num_beams=1,  # A stream takes no beams, with which many models for translation were saved.
            num_return_sequences=1,
            pad_token_id=self._tokenizer.pad_token_id or 0,
            **sampling,
        )
        written = output[0] if self._network.config.is_encoder_decoder else output[0, ids.shape[1] :]
        answer = str(self._tokenizer.decode(self._kept(written), skip_special_tokens=True))
        if self.chats:
            self._turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return answer

    def _encoded(self, prompt: str) -> torch.Tensor:
        """Return token ids [1, tokens], as prepared data has them."""
        if self.chats:
            turns = [*self._turns, {"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            translates = self._network.config.is_encoder_decoder
            ids = prompt_ids(self._tokenizer, prompt, translates=translates) if prompt or not translates else []
        if not ids:
            raise ConfigError("GEN003", "the prompt is empty", repr(prompt), fix="give at least one character")
        return torch.tensor([ids], device=self._network.device)

    def _room(self, tokens: int) -> int:
        """Return the number of positions that are left for an answer; a decoder beside an encoder has its own."""
        apart = self._network.config.is_encoder_decoder
        limits = [max_positions(self._network, decoder=decoder) for decoder in (False, apart)]
        read, written = (_UNLIMITED if limit is None else limit for limit in limits)
        most = read if apart else read - 1
        if tokens > most:
            raise ConfigError("GEN003", "the conversation is too long for the model", f"{tokens} tokens", f"{most}")
        return written if apart else written - tokens

    def _kept(self, ids: torch.Tensor) -> torch.Tensor:
        """Return an answer's ids without the token that ended it, which may be no special one."""
        return ids[: len(ids) - int(len(ids) > 0 and int(ids[-1]) in self._ends)]


class _Printer:
    """Streamer that prints an answer as it is generated, without the token that ends it, which may be no special one.

    Args:
        tokenizer: tokenizer of the model.
        ends: ids of tokens that end an answer.

    """

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self._printer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._ends = ends

    def put(self, value: Any) -> None:
        """Print what is certain of the text so far; the prompt comes first, and isn't printed."""
        if self._printer.next_tokens_are_prompt or int(value.flatten()[-1]) not in self._ends:
            self._printer.put(value)

    def end(self) -> None:
        """Print the rest."""
        self._printer.end()
