"""Generation by a server of its own environment, vLLM or SGLang: it is given weights by folders, and token ids by HTTP.

weights ─► folder ─► load ─► version ─► generate ─► version of the answer: the same, or the answer isn't used
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.bridge.scratch import WEIGHTS, Scratch, sweep
from hypha_ray.config.tables.rl import GenerationServer
from hypha_ray.errors import ClusterError, ConfigError
from hypha_ray.rl.engines.command import CommandServer
from hypha_ray.rl.engines.completions import Completion, responses_of
from hypha_ray.rl.engines.dialects import DIALECTS
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.engines.sampling import Sampling
from hypha_ray.rl.http import Refused, TooLate, Unreachable, call

_ATTEMPTS = 4
"""Number of attempts at a batch whose server is lost, or answers with other weights."""
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

    """

    name = "the server that generates"
    remedy = "serve the job's model; vLLM needs --logprobs-mode processed_logprobs for a temperature other than 1"

    def __init__(self, settings: GenerationServer, seed: int, worker: int, tokenizer: Any) -> None:
        self._settings, self._seed, self._tokenizer = settings, seed, tokenizer
        self._dialect = DIALECTS[settings.dialect]
        self._url = settings.urls[worker].rstrip("/") if settings.urls else ""
        self._server: CommandServer | None = None
        self._loaded: str | None = None
        """Version of the weights that the server has; None if that isn't known."""
        sweep(settings.folder)
        self._scratch = Scratch(WEIGHTS, settings.folder)

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
            ConfigError: RL020, a command doesn't start a server; RL021, the server refuses a request.
            ClusterError: RL022, no answer in time; RL023, the server is lost, or answers with other weights.

        """
        prompts = [row[mask].tolist() for row, mask in zip(ids.cpu(), attention_mask.cpu().bool(), strict=True)]
        seeds = [_seed(self._seed, key) for key in keys.tolist()]
        reason = ""
        for _ in range(_ATTEMPTS):
            try:
                found = self._attempt(model, prompts, seeds, sampling, sorted(ends))
                return responses_of(ids, attention_mask, found, ends)
            except Unreachable as error:
                log.warning("the server that generates is lost, or has other weights: %s", error)
                self._loaded, reason = None, str(error)
            except TooLate as error:
                fix = "mend the server, or give it more time by rl.generation.server.deadline_s"
                raise ClusterError("RL022", "the server that generates doesn't answer", str(error), fix=fix) from None
            except Refused as error:
                fix = f"see whether the server speaks {self._settings.dialect!r}, and this model's length fits"
                raise ConfigError("RL021", "the server that generates refuses a request", str(error), fix=fix) from None
        raise ClusterError("RL023", "the server that generates is lost each time", reason, fix="see what it logs")

    def close(self) -> None:
        """End a server that was started, and remove weights."""
        if self._server is not None:
            self._server.close()
        self._scratch.close()

    def _attempt(
        self, model: Any, prompts: list[list[int]], seeds: list[int], sampling: Sampling, ends: Sequence[int]
    ) -> list[Completion]:
        version = _version(model)
        folder = self._saved(model, version)
        self._start(folder)
        if self._loaded != version:
            self._dialect.load(self._ask, str(folder), version)
            self._loaded = version
            self._remove_others(folder)
        with ThreadPoolExecutor(min(_AT_ONCE, len(prompts))) as pool:
            each = pool.map(
                lambda prompt, seed: self._dialect.generate(self._ask, prompt, seed, sampling, ends), prompts, seeds
            )
            groups = list(each)
        for group in groups:
            _check(group, sampling, ends)
        found = [one for group in groups for one in group]
        told = self._dialect.version(self._ask)
        versions = {one.version for one in found} if told is None else {told}
        if versions != {version}:
            raise Unreachable(f"weights of version {', '.join(map(str, versions))} instead of {version}")
        return found

    def _start(self, folder: Path) -> None:
        """Start a server if one is to be started and none lives; wait until it answers."""
        settings = self._settings
        if settings.command is not None and (self._server is None or not self._server.lives):
            if self._server is not None:
                self._server.close()
            self._loaded = None
            self._server = CommandServer(settings.command, str(folder), self._dialect.environment)
            self._url = self._server.url
        if self._loaded is not None:
            return
        until, reason = time.monotonic() + settings.start_s, ""
        while time.monotonic() < until:
            try:
                call(f"{self._url}/health", None, _HEALTH_S)
            except (Unreachable, TooLate) as error:
                reason = str(error)
            else:
                if self._server is not None:
                    self._server.answered = True
                return
            if self._server is not None:
                self._server.check_lives()
            time.sleep(_POLL_S)
        what = f"the server that generates hasn't answered for {settings.start_s:g} s"
        raise ClusterError("RL023", what, reason, fix=f"start it again at {self._url}, or mend its address")

    def _ask(self, path: str, payload: dict[str, Any] | None = None) -> Any:
        return call(f"{self._url}{path}", payload, self._settings.deadline_s)

    def _saved(self, model: Any, version: str) -> Path:
        """Return the folder with the model's weights, as `save_pretrained` writes it."""
        folder = self._scratch.path / version
        if not folder.exists():
            made = folder.with_name(f"{version}.part")
            model.save_pretrained(made)
            self._tokenizer.save_pretrained(made)
            made.rename(folder)
        return folder

    def _remove_others(self, folder: Path) -> None:
        for other in self._scratch.path.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)


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


def _check(group: Sequence[Completion], sampling: Sampling, ends: Sequence[int]) -> None:
    """Refuse responses to a prompt that are too few, too long, or over without a token that ends them."""
    if len(group) != sampling.samples:
        raise Refused(f"{len(group)} responses to a prompt instead of {sampling.samples}")
    for one in group:
        if len(one.ids) > sampling.max_tokens or (len(one.ids) < sampling.max_tokens and one.ids[-1] not in ends):
            raise Refused(
                f"a response of {len(one.ids)} of {sampling.max_tokens} tokens, the last of them {one.ids[-1]}"
            )
