"""Servers that generate, as programs: the process of one that a command starts, and the dialects of vLLM and of SGLang.

                 vLLM                                        SGLang
generate         /v1/completions, a request for a prompt     /generate, a request for a prompt
weights          /pause, /collective_rpc reload_weights,     /update_weights_from_disk
                 /update_weight_version, /resume
version          /weight_info                                in each answer
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

from hypha_ray.bridge.paths import handed_on
from hypha_ray.errors import ConfigError
from hypha_ray.files import opener
from hypha_ray.rl.engines import guard
from hypha_ray.rl.engines.native import Completion, Sampling
from hypha_ray.rl.http import Refused, Unreachable

_STARTED = "RL020"
_LAST_BYTES = 4000
_MOST_LOG_BYTES = 16 << 20
"""Size of a log that is put aside when the next server starts."""
Ask: TypeAlias = Callable[..., Any]
"""Function of a path, and of a payload to post if there is one, that returns the server's answer."""


class CommandServer:
    """Process of a server; it ends with this process, however that ends.

    Args:
        line: command line, with ``{model}`` and ``{port}``.
        model: folder of the model.
        environment: variables beside those that are handed on.
        log: file for the server's output; a temporary one if it is None or can't be opened. That one is removed at the
            end unless an error has named it.

    Raises:
        ConfigError: RL020, there is no such program.

    """

    def __init__(self, line: str, model: str, environment: Mapping[str, str], log: Path | None = None) -> None:
        port = _free_port()
        words: list[str] = []
        for word in shlex.split(line):
            with_model = word.replace("{model}", model)
            words.append(with_model.replace("{port}", str(port)))
        self.url = f"http://127.0.0.1:{port}"
        self.answered = False
        """Whether a server of this command has answered once."""
        self._program = words[0]
        program = shutil.which(self._program)
        if program is None:
            fix = "mend rl.generation.server.command; the program has to be on every node that may get a worker"
            raise ConfigError(_STARTED, "there is no such program for a server that generates", self._program, fix=fix)
        self._log_file = _open_log(log)
        self._is_log_kept = Path(self._log_file.name) == log
        self._process = subprocess.Popen(
            [sys.executable, "-m", guard.__name__, program, *words[1:]],
            env={**handed_on(os.environ), **environment},
            stdin=subprocess.PIPE,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def check_lives(self) -> None:
        """Refuse a server that has ended.

        Raises:
            ConfigError: RL020, it has ended, and no server of this command has answered yet.
            Unreachable: it has ended, and a server of this command has answered before.

        """
        code = self._process.poll()
        if code is None:
            return
        if self.answered:
            raise Unreachable(f"the server has ended ({_exit_text(code)})")
        fix = f"run the command by hand; it printed at last: {self._last_line()}; all is in {self.log}"
        raise ConfigError(_STARTED, f"the server {self._program} has ended", _exit_text(code), fix=fix)

    @property
    def log(self) -> str:
        """File with the server's output, which stays from now on."""
        self._is_log_kept = True
        return str(self._log_file.name)

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and all that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(3 * guard.END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log_file.close()
        if not self._is_log_kept:
            Path(self._log_file.name).unlink(missing_ok=True)

    def _last_line(self) -> str:
        end = self._log_file.seek(0, os.SEEK_END)
        self._log_file.seek(max(0, end - _LAST_BYTES))
        text = self._log_file.read().decode(errors="replace")
        for line in reversed(text.split("\n")):
            if line.strip():
                return line.strip()[:300]
        return "nothing"


def _open_log(log: Path | None) -> IO[bytes]:
    """Open a file for a server's output; a file that has grown large is put aside."""
    if log is not None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            if log.exists() and log.stat().st_size > _MOST_LOG_BYTES:
                log.replace(log.with_suffix(".log.1"))
            return open(log, "a+b", opener=opener)
        except OSError:  # A full disk, for one: a log is no reason to end a run.
            pass
    return tempfile.NamedTemporaryFile(prefix="hypha-generation-", suffix=".log", delete=False)


def _exit_text(code: int) -> str:
    """Return an exit code as text; a shell's and the guard's are 128 and more for signals."""
    signal_number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(signal_number).name
    except ValueError:
        return f"exit code {code}"
    return f"killed by signal {signal_number} ({name})"


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


class Dialect(Protocol):
    """Dialect of a server."""

    environment: Mapping[str, str]
    """Variables that a server is started with."""

    def generate(
        self, ask: Ask, prompt: Sequence[int], seed: int, sampling: Sampling, ends: Sequence[int]
    ) -> list[Completion]:
        """Make as many responses to a prompt as the sampling has.

        Raises:
            Refused: the answer isn't what the dialect promises.

        """
        ...

    def load(self, ask: Ask, folder: str, version: str) -> None:
        """Let the server load weights from a folder when it has answered all requests, and give them a version.

        Raises:
            Refused: it has not loaded them.

        """
        ...

    def version(self, ask: Ask) -> str | None:
        """Return the version of the server's weights; None if each answer has it."""
        ...


class VLLM:
    """vLLM with its development endpoints."""

    environment: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "1"}

    def generate(
        self, ask: Ask, prompt: Sequence[int], seed: int, sampling: Sampling, ends: Sequence[int]
    ) -> list[Completion]:
        """Make responses as `Dialect` says; those to one prompt have seeds one after the other."""
        answer = ask(
            "/v1/completions",
            {
                **_common_settings(sampling, ends),
                "prompt": list(prompt),
                "n": sampling.samples,
                "max_tokens": sampling.max_tokens,
                "seed": seed,
                "logprobs": 1,
                "return_token_ids": True,
                "top_k": sampling.top_k or 0,
            },
        )
        completions: list[Completion] = []
        with _RefuseIncomplete():
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
                logprobs = choice["logprobs"]["token_logprobs"]
                completions.append(_completion(choice["token_ids"], logprobs, None))
        return completions

    def load(self, ask: Ask, folder: str, version: str) -> None:
        """Load weights as `Dialect` says; caches of prefixes go with the pause."""
        ask("/pause?mode=wait", {})
        ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        ask("/update_weight_version", {"new_version": version})
        ask("/resume", {})

    def version(self, ask: Ask) -> str | None:
        """Return the version that the server reports."""
        with _RefuseIncomplete():
            return str(ask("/weight_info")["weight_version"])


class SGLang:
    """SGLang's own endpoints."""

    environment: Mapping[str, str] = {}

    def generate(
        self, ask: Ask, prompt: Sequence[int], seed: int, sampling: Sampling, ends: Sequence[int]
    ) -> list[Completion]:
        """Make responses as `Dialect` says; seeds count if the server runs with deterministic inference."""
        common_fields = {
            **_common_settings(sampling, ends),
            "max_new_tokens": sampling.max_tokens,
            "top_k": sampling.top_k or -1,
        }
        seeds = range(seed, seed + sampling.samples)
        payload = {
            "input_ids": [list(prompt)] * sampling.samples,
            "sampling_params": [{**common_fields, "sampling_seed": sampling_seed} for sampling_seed in seeds],
            "return_logprob": True,
        }
        answers = ask("/generate", payload)
        completions: list[Completion] = []
        with _RefuseIncomplete():
            for answer in answers:
                facts = answer["meta_info"]
                logprobs = [pair[0] for pair in facts["output_token_logprobs"]]
                completions.append(_completion(answer["output_ids"], logprobs, str(facts["weight_version"])))
        return completions

    def load(self, ask: Ask, folder: str, version: str) -> None:
        """Load weights as `Dialect` says."""
        answer = ask("/update_weights_from_disk", {"model_path": folder, "weight_version": version})
        with _RefuseIncomplete():
            if not answer["success"]:
                raise Refused(f"weights were not loaded: {answer['message']}")

    def version(self, ask: Ask) -> str | None:
        """Return None: each answer has the version."""
        return None


DIALECTS: Final[dict[str, Dialect]] = {"vllm": VLLM(), "sglang": SGLang()}
"""Dialects by their names in the job file."""


def _common_settings(sampling: Sampling, ends: Sequence[int]) -> dict[str, Any]:
    """Return all settings that both dialects have: a server would take those left out from the model's folder."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(ends),
        "skip_special_tokens": False,
    }


def _completion(ids: Sequence[int], logprobs: Sequence[float], version: str | None) -> Completion:
    """Return a response with its numbers as they came: converted ones might be others."""
    return Completion(tuple(ids), tuple(logprobs), version)


class _RefuseIncomplete:
    """Context in which an answer is read: a missing part raises `Refused`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError):
            cause = type(error).__name__
            raise Refused(f"an answer without what is needed ({cause}: {error})") from None
