"""Generation by a server of its own environment, vLLM or SGLang: it gets weights by folders, and token ids by HTTP.

weights ─► folder ─► load ─► version ─► generate ─► version of the answer: the same, or the answer isn't used
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError

from hypha_ray.bridge.paths import WEIGHTS, Scratch, sweep
from hypha_ray.config.rl import GenerationServer
from hypha_ray.errors import ClusterError, ConfigError
from hypha_ray.rl.engines.native import (
    Completion,
    EngineUnableError,
    Responses,
    Sampling,
    responses_of,
    token_lists,
    unfit,
)
from hypha_ray.rl.engines.server_programs import DIALECTS, CommandServer
from hypha_ray.rl.http import MOST_BYTES, Pauses, Refused, TooLate, Unreachable, call
from hypha_ray.texts import counted

_TOKEN_BYTES = 1024
"""Most bytes of an answer for each token: its text and its log-probability take about 150."""
_ATTEMPTS = 4
"""Largest number of attempts in a row without a new response."""
_AT_ONCE = 256
"""Number of prompts that a server has at a time."""
_POLL_S = 0.1
_HEALTH_S = 10.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """Prompts, and the responses that the server has given."""

    prompts: Sequence[list[int]]
    """Token ids of each prompt."""
    seeds: Sequence[int]
    """Seed of each prompt."""
    sampling: Sampling
    """Settings."""
    ends: Sequence[int]
    """Ids of tokens that end a response."""
    vocabulary: frozenset[int]
    """Ids that a response may have."""
    groups: dict[int, list[Completion]] = field(default_factory=dict)
    """Responses by the index of their prompt."""

    def unanswered(self) -> list[int]:
        """Return the indices of prompts without responses."""
        return [index for index in range(len(self.prompts)) if index not in self.groups]

    def responses(self) -> list[Completion]:
        """Return all responses, those to one prompt as neighbours."""
        groups = [self.groups[index] for index in sorted(self.groups)]
        return list(chain.from_iterable(groups))

    def keep(self, groups: Mapping[int, list[Completion]], version: str, server_version: str | None) -> set[str]:
        """Keep the responses that were made with the weights of a version.

        Args:
            groups: responses by the index of their prompt.
            version: version of the weights.
            server_version: version of all responses, as the server reports it; None: each response has its own.

        Returns:
            Versions of the responses that aren't kept.

        """
        all_versions: set[str] = set()
        if server_version is not None:  # The server's version counts even if each answer was lost.
            all_versions.add(server_version)
        for index, group in groups.items():
            versions = {str(completion.version) for completion in group}
            if server_version is not None:
                versions = {server_version}
            if versions == {version}:
                self.groups[index] = group
            all_versions |= versions
        return all_versions - {version}

    def most_bytes(self, index: int) -> int:
        """Return the most bytes of an answer to a prompt."""
        tokens = len(self.prompts[index]) + self.sampling.max_tokens
        return MOST_BYTES + _TOKEN_BYTES * tokens * self.sampling.samples

    def check(self, group: Sequence[Completion]) -> None:
        """Refuse responses to a prompt that are too few, too long, unfinished, or of impossible numbers.

        Raises:
            Refused: with the number.

        """
        most_tokens = self.sampling.max_tokens
        samples = self.sampling.samples
        if len(group) != samples:
            raise Refused(f"{counted(len(group), 'response')} to a prompt instead of {samples}")
        for completion in group:
            reason = unfit(completion, self.vocabulary)
            if reason:
                raise Refused(reason)
            count = len(completion.ids)
            last_id = completion.ids[-1]
            is_unfinished = count < most_tokens and last_id not in self.ends
            if count > most_tokens or is_unfinished:
                raise Refused(f"a response of {count} of {most_tokens} tokens, the last of them {last_id}")


class ServerEngine:
    """Server, and the weights that it has.

    Args:
        settings: table of the job file.
        seed: seed of the run.
        worker: number of the worker, and of its server if there are several.
        tokenizer: tokenizer of the run, which a server that is started may need.
        log: file for the output of a server that is started; None: a temporary one.

    Raises:
        ClusterError: RL027, there is no folder for weights.

    """

    name = "the server that generates"
    remedy = "serve the job's model; vLLM needs --logprobs-mode processed_logprobs for a temperature other than 1"

    def __init__(
        self, settings: GenerationServer, seed: int, worker: int, tokenizer: Any, log: Path | None = None
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._tokenizer = tokenizer
        self._log = log
        self._dialect = DIALECTS[settings.dialect]
        self._url = ""
        if settings.urls:
            self._url = settings.urls[worker].rstrip("/")
        self._server: CommandServer | None = None
        self._answered = False
        """Whether a server that the command starts has answered once."""
        self._loaded: str | None = None
        """Version of the weights that the server has; None if that isn't known."""
        self._scratch = _scratch(settings.folder)

    def generate(
        self,
        model: Any,
        ids: torch.Tensor,
        attention_mask: torch.Tensor,
        keys: npt.NDArray[np.int64],
        sampling: Sampling,
        ends: Collection[int],
    ) -> Responses:
        """Let the server respond with the weights of a model.

        Args:
            model: the model.
            ids: prompts padded on the left, [prompts, width].
            attention_mask: mask of their tokens, of the same shape.
            keys: epoch, slice and index of each prompt, which seeds are made of.
            sampling: settings.
            ends: ids of tokens that end a response.

        Raises:
            ConfigError: RL020, a command doesn't start a server; RL021, the server refuses a request, or its answer
                can't be a response.
            ClusterError: RL022, no answer in time; RL023, the server is lost, or answers with other weights.
            EngineUnableError: the weights can't be written.

        """
        seeds = [_seed(self._seed, key) for key in keys.tolist()]
        embeddings = model.get_input_embeddings().weight
        rows = int(embeddings.shape[0])
        vocabulary = frozenset(range(rows)).difference(sampling.vocabulary.unknown(rows))
        batch = Batch(token_lists(ids, attention_mask), seeds, sampling, sorted(ends), vocabulary)
        try:
            self._complete(batch, model)
        except TooLate as error:
            fix = "mend the server, or give it more time by rl.generation.server.deadline_s"
            raise ClusterError("RL022", "the server that generates doesn't answer", str(error), fix=fix) from None
        except Refused as error:
            fix = f"see whether the server speaks {self._settings.dialect!r}, and this model's length fits"
            raise ConfigError("RL021", "the server that generates refuses a request", str(error), fix=fix) from None
        return responses_of(ids, attention_mask, batch.responses(), ends)

    def close(self) -> None:
        """End a server that was started, and remove weights."""
        if self._server is not None:
            self._server.close()
        self._scratch.close()

    def _complete(self, batch: Batch, model: Any) -> None:
        """Ask for responses until all prompts are answered, with pauses; answered prompts aren't asked again.

        Raises:
            ClusterError: RL023, several attempts in a row have brought nothing.

        """
        pauses = Pauses(_ATTEMPTS - 1)
        while unanswered := batch.unanswered():
            try:
                self._attempt(model, batch, unanswered)
            except Unreachable as error:
                log.warning("the server that generates is lost, or has other weights: %s", error)
                if len(batch.unanswered()) < len(unanswered):
                    pauses.begin_anew()
                pause_s = pauses.after(error.retry_after_s)
                if pause_s is None:
                    problem = "the server that generates is lost each time"
                    fix = f"see {self._log_place()}"
                    raise ClusterError("RL023", problem, str(error), fix=fix) from None
                time.sleep(pause_s)

    def _attempt(self, model: Any, batch: Batch, unanswered: list[int]) -> None:
        """Ask for responses to these prompts; keep those of the right weights.

        Raises:
            Unreachable: responses were lost, or are of other weights.

        """
        version = _version(model)
        folder = self._save_weights(model, version)
        self._start(folder)
        if self._loaded != version:
            self._dialect.load(self._ask, str(folder), version)
            self._remove_others(folder)
        self._loaded = None  # The server may be lost, and come back with other weights, until an answer shows it.
        with ThreadPoolExecutor(min(_AT_ONCE, len(unanswered))) as pool:
            answers = list(pool.map(partial(self._answer, batch), unanswered))
        server_version = self._dialect.version(self._ask)
        groups: dict[int, list[Completion]] = {}
        errors: list[Unreachable] = []
        for index, answer in zip(unanswered, answers, strict=True):
            if isinstance(answer, Unreachable):
                errors.append(answer)
            else:
                groups[index] = answer
        wrong_versions = batch.keep(groups, version, server_version)
        if wrong_versions:
            versions_text = ", ".join(sorted(wrong_versions))
            raise Unreachable(f"weights of version {versions_text} instead of {version}")
        if groups or server_version is not None:
            self._loaded = version
        if errors:
            raise max(errors, key=lambda error: error.retry_after_s or 0.0)

    def _answer(self, batch: Batch, index: int) -> list[Completion] | Unreachable:
        """Return the responses to a prompt, or the error by which this answer was lost."""
        prompt = batch.prompts[index]
        ask = partial(self._ask, most_bytes=batch.most_bytes(index))
        try:
            group = self._dialect.generate(ask, prompt, batch.seeds[index], batch.sampling, batch.ends)
        except Unreachable as error:
            return error
        batch.check(group)
        return group

    def _start(self, folder: Path) -> None:
        """Start a server if the job has a command and none lives; wait until it answers."""
        settings = self._settings
        if settings.command is not None and (self._server is None or not self._server.lives):
            if self._server is not None:
                self._server.close()
            self._loaded = None
            self._server = CommandServer(settings.command, str(folder), self._dialect.environment, self._log)
            self._server.answered = self._answered
            self._url = self._server.url
        if self._loaded is not None:
            return
        until = time.monotonic() + settings.start_s
        reason = ""
        while time.monotonic() < until:
            try:
                call(f"{self._url}/health", None, _HEALTH_S)
            except (Unreachable, TooLate) as error:
                reason = str(error)
            else:
                if self._server is not None:
                    self._server.answered = self._answered = True
                return
            if self._server is not None:
                self._server.check_lives()
            time.sleep(_POLL_S)
        problem = f"the server that generates hasn't answered for {settings.start_s:g} s"
        fix = f"start it again at {self._url}, or mend its address; see {self._log_place()}"
        raise ClusterError("RL023", problem, reason, fix=fix)

    def _log_place(self) -> str:
        """Return the place of the server's output, for a message."""
        if self._server is None:
            return "what it logs"
        return f"{self._server.log} on the worker's machine"

    def _ask(self, path: str, payload: dict[str, Any] | None = None, most_bytes: int = MOST_BYTES) -> Any:
        return call(f"{self._url}{path}", payload, self._settings.deadline_s, most_bytes=most_bytes)

    def _save_weights(self, model: Any, version: str) -> Path:
        """Return the folder with the model's weights, as `save_pretrained` writes it.

        Raises:
            EngineUnableError: it can't be written, even without those of earlier weights beside it.

        """
        folder = self._scratch.path / version
        if folder.exists():
            return folder
        try:
            self._write(model, folder)
        except (OSError, SafetensorError):
            self._remove_others(folder)
            try:
                self._write(model, folder)
            except (OSError, SafetensorError) as error:
                self._remove_others(folder)
                parent = self._settings.folder or self._scratch.path.parent
                raise EngineUnableError(f"weights for it can't be written to {parent} ({error})") from None
        return folder

    def _write(self, model: Any, folder: Path) -> None:
        self._scratch.path.mkdir(exist_ok=True)
        unfinished = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        model.save_pretrained(unfinished)
        self._tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)

    def _remove_others(self, folder: Path) -> None:
        for old_folder in self._scratch.path.glob("*"):
            if old_folder != folder:
                shutil.rmtree(old_folder, ignore_errors=True)


def _scratch(folder: str | None) -> Scratch:
    """Return a new folder for weights; remove folders that killed processes have left behind.

    Raises:
        ClusterError: RL027, it can't be made.

    """
    try:
        sweep(folder)
        return Scratch(WEIGHTS, folder)
    except OSError as error:
        fix = "mend rl.generation.server.folder on this node"
        raise ClusterError("RL027", "the folder for a server's weights can't be used", str(error), fix=fix) from None


def _version(model: Any) -> str:
    """Return the first digits of the sha256 of all weights, so equal weights have equal versions."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        on_host = tensor.detach().cpu().contiguous()
        content = on_host.reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        digest.update(content.numpy())
    return digest.hexdigest()[:16]


def _seed(seed: int, key: Sequence[int]) -> int:
    """Return a seed of a prompt: servers take numbers of 31 bits, and count upwards for further responses."""
    state = np.random.SeedSequence([seed, *key]).generate_state(1)
    return int(state[0] >> 2)
