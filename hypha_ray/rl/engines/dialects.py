"""Dialects of servers that generate: requests and answers of vLLM and of SGLang.

                 vLLM                                        SGLang
generate         /v1/completions, a request for a prompt     /generate, a request for a prompt
weights          /pause, /collective_rpc reload_weights,     /update_weights_from_disk
                 /update_weight_version, /resume
version          /weight_info                                in each answer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from hypha_ray.rl.engines.completions import Completion
from hypha_ray.rl.engines.native import Sampling
from hypha_ray.rl.http import Refused

Ask: TypeAlias = Callable[..., Any]
"""Function of a path, and of a payload to post if there is one, that returns the server's answer."""


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
        common = {
            **_common_settings(sampling, ends),
            "max_new_tokens": sampling.max_tokens,
            "top_k": sampling.top_k or -1,
        }
        seeds = range(seed, seed + sampling.samples)
        payload = {
            "input_ids": [list(prompt)] * sampling.samples,
            "sampling_params": [{**common, "sampling_seed": sampling_seed} for sampling_seed in seeds],
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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError):
            cause = type(error).__name__
            raise Refused(f"an answer without what is needed ({cause}: {error})") from None
