"""Generation by a server of its own environment, vLLM or SGLang: it is given weights by folders, and token ids by HTTP.

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
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError

from hypha_ray.bridge.programs import WEIGHTS, Scratch, sweep
from hypha_ray.config.tables.rl import GenerationServer
from hypha_ray.errors import ClusterError, ConfigError
from hypha_ray.rl.engines.command import CommandServer
from hypha_ray.rl.engines.completions import Completion, EngineUnableError, responses_of, unfit
from hypha_ray.rl.engines.dialects import DIALECTS
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.engines.sampling import Sampling
from hypha_ray.rl.http import MOST_BYTES, Pauses, Refused, TooLate, Unreachable, call

_TOKEN_BYTES = 1024
"""Most bytes of an answer for each token: a server's words for it and its log-probability take about 150."""


@dataclass(slots=True)
class Batch:
    """Prompts, and the responses that have come."""

    prompts: Sequence[list[int]]
    """Token ids of each prompt."""
    seeds: Sequence[int]
    """Seed of each prompt."""
    sampling: Sampling
    """Settings."""
    ends: Sequence[int]
    """Ids of tokens that end a response."""
    known: frozenset[int]
    """Ids that a response may have."""
    groups: dict[int, list[Completion]] = field(default_factory=dict)
    """Responses by the place of their prompt."""

    def lacking(self) -> list[int]:
        """Return the places of prompts without responses."""
        return [place for place in range(len(self.prompts)) if place not in self.groups]

    def responses(self) -> list[Completion]:
        """Return all responses, those to one prompt as neighbours."""
        return [response for _, group in sorted(self.groups.items()) for response in group]

    def keep(self, groups: Mapping[int, list[Completion]], version: str, told: str | None) -> set[str]:
        """Keep the responses that were made with some weights.

        Args:
            groups: responses by the place of their prompt.
            version: version of the weights.
            told: version that the server has told for all of them; None: each response has its own.

        Returns:
            Versions of the responses that aren't kept.

        """
        others: set[str] = set()
        for place, group in groups.items():
            versions = {str(one.version) for one in group} if told is None else {told}
            if versions == {version}:
                self.groups[place] = group
            others |= versions - {version}
        if told is not None:  # It has told so even if each answer was lost.
            others |= {told} - {version}
        return others

    def most_bytes(self, place: int) -> int:
        """Return the most bytes of an answer to a prompt."""
        tokens = len(self.prompts[place]) + self.sampling.max_tokens
        return MOST_BYTES + _TOKEN_BYTES * tokens * self.sampling.samples

    def check(self, group: Sequence[Completion]) -> None:
        """Refuse responses to a prompt that are too few, too long, not over, or of numbers that can't be.

        Raises:
            Refused: with the number.

        """
        most = self.sampling.max_tokens
        if len(group) != self.sampling.samples:
            raise Refused(f"{len(group)} responses to a prompt instead of {self.sampling.samples}")
        for one in group:
            if reason := unfit(one, self.known):
                raise Refused(reason)
            if len(one.ids) > most or (len(one.ids) < most and one.ids[-1] not in self.ends):
                raise Refused(f"a response of {len(one.ids)} of {most} tokens, the last of them {one.ids[-1]}")


_ATTEMPTS = 4
"""Number of attempts in a row that bring no response of a batch."""
_AT_ONCE = 256
"""Number of prompts that a server has at a time."""
_POLL_S = 0.1
_HEALTH_S = 10.0

log = logging.getLogger(__name__)


class ServerEngine:
    """Server, and the weights that it has.

    Args:
        settings: table of the job file.
        seed: seed of the run.
        worker: number of the worker, which says which of several servers is its own.
        tokenizer: tokenizer of the run, which a server that is started may need.
        log: file for all that a server prints that is started; None: a temporary one.

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
        self._url = settings.urls[worker].rstrip("/") if settings.urls else ""
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
            ConfigError: RL020, a command doesn't start a server; RL021, the server refuses a request, or what it
                answers can't be a response.
            ClusterError: RL022, no answer in time; RL023, the server is lost, or answers with other weights.
            EngineUnableError: the weights can't be written.

        """
        prompts = [row[mask].tolist() for row, mask in zip(ids.cpu(), attention_mask.cpu().bool(), strict=True)]
        seeds = [_seed(self._seed, key) for key in keys.tolist()]
        rows = int(model.get_input_embeddings().weight.shape[0])
        known = frozenset(range(rows)).difference(sampling.vocabulary.unknown(rows))
        batch = Batch(prompts, seeds, sampling, sorted(ends), known)
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
        """Ask for responses until all are there, with pauses; those that are there aren't asked for again.

        Raises:
            ClusterError: RL023, several attempts in a row have brought nothing.

        """
        pauses = Pauses(_ATTEMPTS - 1)
        while lacking := batch.lacking():
            try:
                self._attempt(model, batch, lacking)
            except Unreachable as error:
                log.warning("the server that generates is lost, or has other weights: %s", error)
                if len(batch.lacking()) < len(lacking):
                    pauses.begin_anew()
                pause_s = pauses.after(error.retry_after_s)
                if pause_s is None:
                    what = "the server that generates is lost each time"
                    fix = f"see {self._printed()}"
                    raise ClusterError("RL023", what, str(error), fix=fix) from None
                time.sleep(pause_s)

    def _attempt(self, model: Any, batch: Batch, lacking: list[int]) -> None:
        """Ask for responses that are lacking; keep those of the right weights.

        Raises:
            Unreachable: responses were lost, or are of other weights.

        """
        version = _version(model)
        folder = self._saved(model, version)
        self._start(folder)
        if self._loaded != version:
            self._dialect.load(self._ask, str(folder), version)
            self._remove_others(folder)
        self._loaded = None  # The server may be lost, and come back with other weights, until an answer shows it.
        with ThreadPoolExecutor(min(_AT_ONCE, len(lacking))) as pool:
            answers = dict(zip(lacking, pool.map(partial(self._answer, batch), lacking), strict=True))
        told = self._dialect.version(self._ask)
        groups = {place: one for place, one in answers.items() if not isinstance(one, Unreachable)}
        others = batch.keep(groups, version, told)
        if others:
            raise Unreachable(f"weights of version {', '.join(sorted(others))} instead of {version}")
        self._loaded = version if groups or told is not None else None
        lost = [one for one in answers.values() if isinstance(one, Unreachable)]
        if lost:
            raise max(lost, key=lambda error: error.retry_after_s or 0.0)

    def _answer(self, batch: Batch, place: int) -> list[Completion] | Unreachable:
        """Return the responses to a prompt, or the error by which this answer was lost."""
        prompt = batch.prompts[place]
        sampling = batch.sampling
        ask = partial(self._ask, most_bytes=batch.most_bytes(place))
        try:
            group = self._dialect.generate(ask, prompt, batch.seeds[place], sampling, batch.ends)
        except Unreachable as error:
            return error
        batch.check(group)
        return group

    def _start(self, folder: Path) -> None:
        """Start a server if one is to be started and none lives; wait until it answers."""
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
        what = f"the server that generates hasn't answered for {settings.start_s:g} s"
        fix = f"start it again at {self._url}, or mend its address; see {self._printed()}"
        raise ClusterError("RL023", what, reason, fix=fix)

    def _printed(self) -> str:
        """Return the place of what the server prints."""
        return "what it logs" if self._server is None else f"{self._server.log} on the worker's machine"

    def _ask(self, path: str, payload: dict[str, Any] | None = None, most_bytes: int = MOST_BYTES) -> Any:
        return call(f"{self._url}{path}", payload, self._settings.deadline_s, most_bytes=most_bytes)

    def _saved(self, model: Any, version: str) -> Path:
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
                where = self._settings.folder or self._scratch.path.parent
                raise EngineUnableError(f"weights for it can't be written to {where} ({error})") from None
        return folder

    def _write(self, model: Any, folder: Path) -> None:
        self._scratch.path.mkdir(exist_ok=True)
        made = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(made, ignore_errors=True)
        model.save_pretrained(made)
        self._tokenizer.save_pretrained(made)
        made.rename(folder)

    def _remove_others(self, folder: Path) -> None:
        for other in self._scratch.path.glob("*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


def _scratch(folder: str | None) -> Scratch:
    """Return a new folder for weights, without those that killed processes left behind.

    Raises:
        ClusterError: RL027, it can't be made.

    """
    try:
        sweep(folder)
        return Scratch(WEIGHTS, folder)
    except OSError as error:
        what = "the folder for a server's weights can't be used"
        fix = "mend rl.generation.server.folder on this node"
        raise ClusterError("RL027", what, str(error), fix=fix) from None


def _version(model: Any) -> str:
    """Return the first digits of the sha256 of all weights, so equal weights have equal versions."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _seed(seed: int, key: Sequence[int]) -> int:
    """Return a seed of a prompt: servers take numbers of 31 bits, and count on for further responses."""
    return int(np.random.SeedSequence([seed, *key]).generate_state(1)[0] >> 2)
