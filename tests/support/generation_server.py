"""A server that generates with a small model on the CPU by transformers, in vLLM's and in SGLang's words.

python tests/support/generation_server.py MODEL PORT [FAULT FILE]
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Generation:
    """A model, the version of its weights, and faults that a test asks for."""

    def __init__(self, model: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.version, self.lock = "default", threading.Lock()
        self.asked: Counter[str] = Counter()
        """Number of requests by path."""
        self.deaf: set[str] = set()
        """Paths that are answered but do nothing."""
        self.broken: dict[str, int] = {}
        """Status of all answers of a path."""
        self.busy: dict[str, int] = {}
        """Number of the next requests of a path that are answered by 503, and told to come back after a second."""
        self.cut: dict[str, int] = {}
        """Bytes of its body after which the next answer of a path ends; below zero: it ends among its headers."""
        self.dies: Path | None = None
        """File that is there once the process has died at its second prompt; None: it never does."""
        self.seeds: list[int] = []
        """Seeds of all responses."""
        self.raw_logprobs = False
        """Log-probabilities are those at temperature 1, as vLLM's are unless told otherwise."""

    def load(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def respond(self, prompt: list[int], seed: int, settings: Any, limit: int) -> tuple[list[int], list[float]]:
        """Sample one response token by token, from a forward pass of all tokens each."""
        assert settings["top_p"] == settings["repetition_penalty"] == 1.0
        self.seeds.append(seed)
        generator, ids, logprobs = torch.Generator().manual_seed(seed), list(prompt), []
        while len(logprobs) < limit:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            scaled = (logits / (settings["temperature"] or 1.0)).log_softmax(-1)
            drawn = (
                scaled.argmax()
                if not settings["temperature"]
                else torch.multinomial(scaled.exp(), 1, False, generator=generator)[0]
            )
            logprobs.append(float((logits.log_softmax(-1) if self.raw_logprobs else scaled)[drawn]))
            ids.append(int(drawn))
            if ids[-1] in settings["stop_token_ids"]:
                break
        return ids[len(prompt) :], logprobs

    def answer(self, path: str, asked: Any) -> Any:
        """The answer to a request; raises KeyError for an unknown path."""
        self.asked[path] += 1
        answers = {
            "/health": lambda _: None,
            "/v1/completions": self.vllm,
            "/pause?mode=wait": lambda _: {"status": "paused"},
            "/collective_rpc": self.reload,
            "/update_weight_version": lambda asked: self.call(asked["new_version"]),
            "/weight_info": lambda _: {"weight_version": self.version},
            "/resume": lambda _: {"status": "resumed"},
            "/generate": self.sglang,
            "/update_weights_from_disk": self.update,
        }
        return {"success": True, "message": ""} if path in self.deaf else answers[path](asked)

    def vllm(self, asked: Any) -> Any:
        assert asked["return_token_ids"] and asked["logprobs"] == 1
        seeds = range(asked["seed"], asked["seed"] + asked["n"])
        found = [self.respond(asked["prompt"], seed, asked, asked["max_tokens"]) for seed in seeds]
        return {
            "choices": [
                {"index": place, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
                for place, (ids, logprobs) in reversed(list(enumerate(found)))
            ]
        }

    def reload(self, asked: Any) -> Any:
        assert asked["method"] == "reload_weights"
        self.load(asked["kwargs"]["weights_path"])
        return {"results": [None]}

    def call(self, version: str) -> Any:
        self.version = version
        return {"success": True, "message": "Succeeded to update model weights."}

    def update(self, asked: Any) -> Any:
        self.load(asked["model_path"])
        return self.call(asked["weight_version"])

    def sglang(self, asked: Any) -> Any:
        assert asked["return_logprob"]
        found = []
        for prompt, settings in zip(asked["input_ids"], asked["sampling_params"], strict=True):
            ids, logprobs = self.respond(prompt, settings["sampling_seed"], settings, settings["max_new_tokens"])
            pairs = [[logprob, one, None] for logprob, one in zip(logprobs, ids, strict=True)]
            facts = {"output_token_logprobs": pairs, "weight_version": self.version}
            found.append({"output_ids": ids, "meta_info": facts})
        return found


@contextmanager
def serving(generation: Generation, port: int = 0) -> Iterator[http.server.ThreadingHTTPServer]:
    """Serve on a port of this machine, one request at a time."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            with generation.lock:
                if generation.dies and not generation.dies.exists() and generation.asked.total() > 6:
                    generation.dies.touch()
                    os._exit(9)
                status = generation.broken.get(self.path, 200)
                if busy := generation.busy.get(self.path, 0):
                    status, generation.busy[self.path] = 503, busy - 1
                try:
                    answer = generation.answer(self.path, asked)
                except KeyError:
                    status, answer = 404, {"detail": "Not Found"}
            body = b"" if answer is None else json.dumps(answer).encode()
            cut = generation.cut.pop(self.path, len(body))
            self.send_response(status)
            if status == 503:
                self.send_header("Retry-After", "1")
            if cut < 0:
                self.flush_headers()
                return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:cut])

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = Generation(sys.argv[1])
    if len(sys.argv) > 3:
        told.dies = Path(sys.argv[3])
    with serving(told, int(sys.argv[2])):
        print("serving", flush=True)
        threading.Event().wait()
