"""Answers of a language model to prompts, or its turns of a conversation, printed as they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from hypha_ray.config.entry_point import print_notes
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import ConfigError, DataError, reason_of
from hypha_ray.model.checks import max_positions
from hypha_ray.model.environment import device_of
from hypha_ray.model.saved_model import open_saved
from hypha_ray.model.tokenizers import (
    load_preprocessor,
    prompt_ids,
    rules_of,
    settle_generation,
    tokenizer_of,
)

DEFAULT_TEMPERATURE = 0.7
"""Divisor of logits for models that were saved without one."""
_UNLIMITED = 1 << 30


class Writer:
    """Generator of answers by a saved model.

    Args:
        folder: folder of the model, with its tokenizer.
        raw: no chat template is used; None: one is if there is one, unless the model was trained without it.
        system: system message of a conversation; empty: none; None: that of the model's preparation, if it had one.
        seed: seed of torch's generators, which sampling draws from.

    Raises:
        HyphaError: the model or its tokenizer can't be loaded, or it generates no text.

    """

    def __init__(self, folder: Path, *, raw: bool | None = None, system: str | None = None, seed: int = 0) -> None:
        network, task = open_saved(folder)
        if task.name not in ("causal-lm", "seq2seq-lm"):
            raise ConfigError("GEN002", "this model generates no text", task.name, "causal-lm, seq2seq-lm")
        self._tokenizer = tokenizer_of(load_preprocessor(Preprocessor(), None, Model(repository=str(folder))))
        self._network: Any = network.to(device_of("auto"))
        self._ends = settle_generation(network, self._tokenizer)
        self._translates: bool = network.config.is_encoder_decoder
        self._turns: list[dict[str, str]] = []
        has_template = getattr(self._tokenizer, "chat_template", None) is not None
        rules = rules_of(self._tokenizer)
        # Data of an earlier release tells no size of a vocabulary, and not whether it was put into a template.
        is_unused = rules is not None and rules.vocab_size is not None and rules.template_sha256 is None
        self.chats = has_template and not (is_unused if raw is None else raw)
        """Whether prompts are put into a chat template."""
        self.leaves_template = has_template and is_unused and raw is None
        """Whether there is a chat template that isn't used, because the model was trained without it."""
        self.default_system: str | None = None
        """System message that is used because the model was trained with it."""
        if system is None and self.chats and rules is not None:
            self.default_system = rules.system
        self._system = system or self.default_system
        self._notes_length = True
        self.forget()
        torch.manual_seed(seed)

    def forget(self) -> None:
        """Begin a new conversation."""
        self._turns = []
        if self._system is not None:
            self._turns.append({"role": "system", "content": self._system})

    def write(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        prints: bool = True,
    ) -> str:
        """Print an answer as it is generated, and return it; in a conversation it is the next turn.

        Other settings of generation that were saved with the model hold, such as a penalty of repetitions.

        Args:
            prompt: text to answer, or to go on from.
            max_new_tokens: number of tokens after which the answer is cut off.
            temperature: divisor of logits; 0: the most probable token each time; None: as saved, otherwise 0.7.
            top_p: probability mass of the tokens to choose from; None: as saved, otherwise 1.
            top_k: number of most probable tokens to choose from; None: as saved, otherwise all.
            prints: whether the answer is printed.

        Raises:
            ConfigError: GEN003, the model has too few positions for the prompt, or lacks a token of it; GEN005, the
                chat template refuses the conversation.
            DataError: GEN004, the prompt or the system message has halves of characters.

        """
        ids = self._encode(prompt)
        sampling = self._sampling(temperature, top_p, top_k)
        output = self._network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=_Printer(self._tokenizer, self._ends) if prints else None,
            max_new_tokens=min(max_new_tokens, self._positions_left(ids.shape[1])),
            do_sample=bool(sampling),
            num_beams=1,  # A stream takes no beams, with which many models for translation were saved.
            num_return_sequences=1,
            pad_token_id=self._tokenizer.pad_token_id or 0,
            **sampling,
        )
        answer_ids = output[0]
        if not self._translates:  # A decoder's output begins with the prompt.
            self._note_length(len(answer_ids))
            answer_ids = answer_ids[ids.shape[1] :]
        answer = str(self._tokenizer.decode(self._without_end(answer_ids), skip_special_tokens=True))
        if self.chats:
            self._turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return answer

    def _sampling(self, temperature: float | None, top_p: float | None, top_k: int | None) -> dict[str, float]:
        """Return the settings of sampling, each as given or saved with the model; none for the most probable token."""
        saved_config = self._network.generation_config
        if temperature is None:
            temperature = DEFAULT_TEMPERATURE if saved_config.temperature is None else saved_config.temperature
        if not temperature:
            return {}
        if top_p is None:
            top_p = saved_config.top_p
        if top_k is None:
            top_k = saved_config.top_k
        # Without a number transformers chooses one of its own.
        return {"temperature": temperature, "top_p": 1.0 if top_p is None else top_p, "top_k": top_k or 0}

    def _encode(self, prompt: str) -> torch.Tensor:
        """Return token ids [1, tokens], as prepared data has them."""
        _require_characters("the prompt", prompt)
        _require_characters("the system message", self._system or "")
        ids: list[int] = []
        if self.chats:
            turns = [*self._turns, {"role": "user", "content": prompt}]
            ids = self._tokenizer(self._rendered(turns), add_special_tokens=False)["input_ids"]
        elif prompt or not self._translates:
            ids = prompt_ids(self._tokenizer, prompt, translates=self._translates)
        if not ids:
            raise ConfigError("GEN003", "the prompt is empty", repr(prompt), fix="give at least one character")
        rows = self._network.get_input_embeddings().weight.shape[0]
        if max(ids) >= rows:
            lacking_text = self._tokenizer.decode([next(token for token in ids if token >= rows)])
            problem = f"the prompt has a token that the model lacks, {lacking_text!r}"
            fix = "give a prompt without it; the model was made for a smaller tokenizer"
            raise ConfigError("GEN003", problem, f"token {max(ids)}", f"0 … {rows - 1}", fix)
        return torch.tensor([ids], device=self._network.device)

    def _rendered(self, turns: list[dict[str, str]]) -> str:
        """Return turns in the chat template, up to the answer.

        Raises:
            ConfigError: GEN005, the template refuses them.

        """
        try:
            return str(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # Templates raise errors of their own, for instance without system messages.
            fix = "leave --system out, or add --raw to go on from the text itself"
            problem = "the model's chat template refuses the conversation"
            raise ConfigError("GEN005", problem, reason_of(error), fix=fix) from None

    def _positions_left(self, tokens: int) -> int:
        """Return the number of positions for an answer to a prompt; the decoder of an encoder-decoder has its own."""
        positions = self._positions(decoder=False)
        longest_prompt = positions if self._translates else positions - 1
        if tokens > longest_prompt:
            problem = "the conversation is too long for the model"
            raise ConfigError("GEN003", problem, f"{tokens} tokens", f"{longest_prompt}")
        if self._translates:
            return self._positions(decoder=True)
        return positions - tokens

    def _positions(self, *, decoder: bool) -> int:
        limit = max_positions(self._network, decoder=decoder)
        return _UNLIMITED if limit is None else limit

    def _note_length(self, tokens: int) -> None:
        """Print a note, once, if a text is longer than the model was made for, though it has positions for it."""
        limit = getattr(self._network.config, "max_position_embeddings", None)
        if self._notes_length and isinstance(limit, int) and tokens > limit:
            self._notes_length = False
            print_notes([f"the text has {tokens} tokens, and the model was made for {limit}: it may end in nonsense"])

    def _without_end(self, ids: torch.Tensor) -> torch.Tensor:
        """Return an answer's ids without the token that ended it, which may be no special one."""
        if len(ids) and int(ids[-1]) in self._ends:
            return ids[:-1]
        return ids


def _require_characters(noun: str, text: str) -> None:
    """Refuse a text with halves of characters, as a command line has them whose bytes aren't UTF-8.

    Raises:
        DataError: GEN004.

    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("GEN004", f"{noun} isn't UTF-8", str(error), "UTF-8", "type it in UTF-8") from None


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
        """Print new text as far as it is final; the prompt comes first, and isn't printed."""
        if self._printer.next_tokens_are_prompt or int(value.flatten()[-1]) not in self._ends:
            self._printer.put(value)

    def end(self) -> None:
        """Print the last text."""
        self._printer.end()
