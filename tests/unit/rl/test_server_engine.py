"""Generation by a server: against a server that runs the model by transformers, over real sockets."""

from __future__ import annotations

import os
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hypha_ray.config.load import load
from hypha_ray.config.rl import GenerationServer
from hypha_ray.errors import ClusterError, ConfigError, HyphaError
from hypha_ray.model.tokenizers import Vocabulary
from hypha_ray.rl.engines.native import Completion, Responses, Sampling, responses_of
from hypha_ray.rl.engines.server import ServerEngine
from hypha_ray.rl.engines.server_programs import CommandServer
from hypha_ray.rl.island import Island
from hypha_ray.rl.policy import Policy, sample_of
from hypha_ray.rl.policy_roles import Generator
from tests.support.generation_server import Generation, serving
from tests.support.rl import BATCH, END, EPISODES, job, policy_model, tokenizer

SCRIPT = Path(__file__).parents[2] / "support" / "generation_server.py"
DIALECTS = ("vllm", "sglang")
SAMPLING = Sampling(samples=3, max_tokens=5, temperature=0.7)
IDS, MASK = (torch.from_numpy(BATCH.arrays[name]).long() for name in ("input_ids", "attention_mask"))


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """Folder of a model with other weights than those that are trained."""
    policy_model(seed=5).save_pretrained(tmp_path / "first")
    return tmp_path / "first"


@pytest.fixture
def server(first: Path) -> Iterator[tuple[Generation, str]]:
    """A running server and its address."""
    generation = Generation(str(first))
    with serving(generation) as served:
        yield generation, f"http://127.0.0.1:{served.server_port}"


@pytest.fixture
def engine_of() -> Iterator[Callable[..., ServerEngine]]:
    """Maker of engines, which are closed at the end."""
    made = []

    def make(**settings: Any) -> ServerEngine:
        made.append(ServerEngine(GenerationServer(**settings), 3, 0, tokenizer()))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def command(*more: Any) -> str:
    return " ".join(map(str, [sys.executable, SCRIPT, "{model}", "{port}", *more]))


def generated(engine: ServerEngine, model: Any, sampling: Sampling = SAMPLING) -> Any:
    return engine.generate(model, IDS, MASK, BATCH.keys, sampling, {END})


def true_logprobs(model: Any, responses: Any, temperature: float) -> torch.Tensor:
    """Log-probabilities by plain transformers, each response by itself."""
    found = torch.zeros_like(responses.logprobs)
    for row, (ids, mask, taken) in enumerate(zip(responses.ids, responses.attention_mask, responses.mask, strict=True)):
        with torch.no_grad():
            alone, count = ids[mask.bool()], int(taken.sum())
            logits = model(input_ids=alone[None]).logits[0, -count - 1 : -1] / temperature
            found[row, :count] = logits.log_softmax(-1).gather(1, alone[-count:, None])[:, 0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_responses_are_of_the_given_weights_and_carry_their_probabilities(
    dialect: str, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    engine = engine_of(dialect=dialect, urls=[url])
    for seed in (0, 1):
        model = policy_model(seed)
        found = generated(engine, model)

        assert found.ids.shape[0] == 12 and torch.equal(found.ids[::3, : IDS.shape[1]], IDS)
        torch.testing.assert_close(found.logprobs, true_logprobs(model, found, 0.7), atol=1e-5, rtol=0)
        lengths = found.mask.sum(1).long()
        last = found.ids[torch.arange(12), IDS.shape[1] + lengths - 1]
        assert torch.equal(found.ended, last == END) and bool((found.ended | (lengths == 5)).all())
        assert len({tuple(row.tolist()) for row in found.ids[:3]}) > 1
        assert len({*generation.seeds}) == 12 and max(generation.seeds) < 2**31, "servers take seeds of 31 bits"
        assert torch.equal(generated(engine, model).ids, found.ids)
    greedy = generated(engine, model, Sampling(2, 5, 0.0))
    assert torch.equal(greedy.ids[::2], greedy.ids[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_weights_are_handed_over_once_while_they_stay_the_same(
    dialect: str, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    generation, url = server
    engine = engine_of(dialect=dialect, urls=[url], folder=str(tmp_path))
    loads = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[dialect]
    for seed, expected in ((0, 1), (0, 1), (1, 2), (0, 3)):
        generated(engine, policy_model(seed))
        assert generation.asked[loads] == expected
        assert len([*tmp_path.glob("hypha-weights-*/*")]) == 1
    engine.close()
    assert not [*tmp_path.glob("hypha-weights-*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "path"), [("vllm", "/update_weight_version"), ("sglang", "/update_weights_from_disk")]
)
@pytest.mark.long(keep=1)
def test_answers_with_other_weights_are_never_used(
    dialect: str, path: str, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    generation.deaf = {path}
    with pytest.raises(ClusterError, match=r"RL023.*weights of version default instead of \w{16}"):
        generated(engine_of(dialect=dialect, urls=[url]), policy_model())
    assert generation.asked[path] == 4


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_was_restarted_gets_the_weights_again(
    dialect: str, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine], first: Path
) -> None:
    generation, url = server
    engine, model = engine_of(dialect=dialect, urls=[url]), policy_model()
    before = generated(engine, model)
    generation.load(str(first))
    generation.version = "default"

    assert torch.equal(generated(engine, model).ids, before.ids)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [-1, 0, 9])
def test_an_answer_that_ends_early_is_one_of_a_lost_server(
    cut: int, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    unharmed = generated(engine_of(urls=[url]), policy_model())
    generation.cut = {"/v1/completions": cut}

    assert torch.equal(generated(engine_of(urls=[url]), policy_model()).ids, unharmed.ids)
    assert not generation.cut


@pytest.mark.slow
def test_a_server_that_is_killed_in_mid_batch_is_started_again(
    server: tuple[Generation, str], engine_of: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    model, died = policy_model(), tmp_path / "died"
    unharmed = generated(engine_of(urls=[server[1]]), model)

    found = generated(engine_of(command=command(died)), model)

    assert died.exists()
    assert torch.equal(found.ids, unharmed.ids) and torch.equal(found.logprobs, unharmed.logprobs)


@pytest.mark.parametrize("has_log", [False, True])
def test_output_of_a_server_stays_if_the_job_or_an_error_names_its_file(
    has_log: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = tmp_path / "server.log" if has_log else None
    for line in ("cat", "false"):
        server = CommandServer(line, "", {}, log)
        if line == "false":
            with pytest.raises(ConfigError, match=r"RL020.*has ended"):
                while True:
                    server.check_lives()
        server.close()
        kept = list(tmp_path.iterdir())
        assert len(kept) == (1 if has_log or line == "false" else 0)


def test_a_started_server_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    pids, script = tmp_path / "pids", tmp_path / "serve.sh"
    os.mkfifo(pids)
    script.write_text(f"setsid sleep 600 &\necho $$ $! > {pids}\nwait\n", encoding="utf-8")
    program = "import sys; from hypha_ray.rl.engines.server_programs import CommandServer\n"
    program += f"server = CommandServer('sh {script} {{port}}', '', {{}}); sys.stdin.read()"
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    handles = [os.pidfd_open(int(pid)) for pid in pids.read_text(encoding="utf-8").split()]

    worker.kill()
    worker.communicate()

    assert len(handles) == 2
    assert all(select.select([handle], [], [], 60)[0] for handle in handles)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"command": "no-such-program {port}"}, ConfigError, "RL020.*no-such-program"),
        (
            {"command": f"{sys.executable} -c 'import sys; sys.exit(\"out of memory {{port}}\")'"},
            ConfigError,
            "RL020.*exit code 1.*out of memory",
        ),
        ({"urls": ["http://127.0.0.1:9"], "start_s": 0.3}, ClusterError, "RL023.*0.3 s.*refused"),
    ],
)
def test_a_server_that_cannot_be_had_is_one_clear_error(
    settings: dict[str, Any], error: type[HyphaError], told: str, engine_of: Callable[..., ServerEngine]
) -> None:
    with pytest.raises(error, match=told):
        generated(engine_of(**settings), policy_model())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "path", "status", "told"),
    [
        ("vllm", "/v1/completions", 400, "RL021.*status 400"),
        ("vllm", "/weight_info", 404, "RL021.*status 404"),
        ("sglang", "/generate", 500, "RL023.*status 500"),
        ("sglang", "/update_weights_from_disk", 422, "RL021.*status 422"),
    ],
)
def test_requests_that_fail_are_told_of_with_the_servers_words(
    dialect: str,
    path: str,
    status: int,
    told: str,
    server: tuple[Generation, str],
    engine_of: Callable[..., ServerEngine],
) -> None:
    generation, url = server
    generation.broken = {path: status}
    with pytest.raises(HyphaError, match=told):
        generated(engine_of(dialect=dialect, urls=[url]), policy_model())


@pytest.mark.slow
@pytest.mark.long
def test_a_server_that_hangs_is_given_up_at_the_deadline(
    server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    engine, model = engine_of(urls=[url], deadline_s=8.0), policy_model()
    generated(engine, model)
    with generation.lock, pytest.raises(ClusterError, match=r"RL022.*no answer in 8 s"):
        generated(engine, model)


@pytest.mark.slow
def test_a_lost_answer_costs_that_answer_only(
    server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    unharmed = generated(engine_of(urls=[url]), policy_model())
    generation.asked.clear()
    generation.cut = {"/v1/completions": 9}

    assert torch.equal(generated(engine_of(urls=[url]), policy_model()).ids, unharmed.ids)
    assert generation.asked["/v1/completions"] == len(IDS) + 1
    assert generation.asked["/collective_rpc"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "path"), [("vllm", "/v1/completions"), ("sglang", "/generate")])
def test_a_busy_server_is_asked_again_when_it_said_and_for_what_is_lacking(
    dialect: str, path: str, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    unharmed = generated(engine_of(dialect=dialect, urls=[url]), policy_model())
    generation.asked.clear()
    generation.busy = {path: 2 * len(IDS) + 1}
    began = time.monotonic()

    assert torch.equal(generated(engine_of(dialect=dialect, urls=[url]), policy_model()).ids, unharmed.ids)
    assert time.monotonic() - began >= 3
    assert generation.asked[path] == 3 * len(IDS) + 1


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("tokens", "logprobs", "told"),
    [
        ([10**6, END], [-1.0, -1.0], "token id 1000000"),
        ([-5, END], [-1.0, -1.0], "token id -5"),
        ([10**30, END], [-1.0, -1.0], "token id of more than 30 digits"),
        ([2.9, END], [-1.0, -1.0], r"token id 2\.9"),
        ([2.0, END], [-1.0, -1.0], r"token id 2\.0"),
        ([True, END], [-1.0, -1.0], "token id True"),
        (["2", END], [-1.0, -1.0], "token id '2'"),
        ([None, END], [-1.0, -1.0], "token id None"),
        ([2, END], [float("nan"), -1.0], "log-probability nan"),
        ([2, END], [float("-inf"), -1.0], "log-probability -inf"),
        ([2, END], [-1.0, 5.0], r"log-probability 5\.0"),
        ([2, END], [-1e300, -1.0], r"log-probability -1e\+300"),
        ([2, END], [None, -1.0], "log-probability None"),
        ([2, END], [False, -1.0], "log-probability False"),
        ([2, END], [-1.0], "2 tokens of a response with 1 log-prob"),
        ([], [], "0 tokens of a response"),
    ],
)
def test_numbers_that_no_model_can_have_made_are_refused(
    dialect: str,
    tokens: list[Any],
    logprobs: list[Any],
    told: str,
    server: tuple[Generation, str],
    engine_of: Callable[..., ServerEngine],
) -> None:
    generation, url = server
    if dialect == "sglang" and len(tokens) != len(logprobs):
        pytest.skip("the server of the test pairs them itself")
    generation.respond = lambda *_: (tokens, logprobs)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"RL021.*{told}"):
        generated(engine_of(dialect=dialect, urls=[url]), policy_model(), Sampling(1, 5, 1.0))


@pytest.mark.parametrize("vocabulary", [Vocabulary(13), Vocabulary(14, (13,)), Vocabulary(14, (5, 13))])
def test_a_row_of_the_model_that_the_tokenizer_lacks_is_refused(
    vocabulary: Vocabulary, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    generation.respond = lambda *_: ([13, END], [-1.0, -1.0])  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"RL021.*token id 13"):
        generated(engine_of(urls=[url]), policy_model(), Sampling(1, 5, 1.0, vocabulary=vocabulary))
    generator = Generator(job().rl, 3, Policy(policy_model(), 1.0, None, vocabulary), {END}, Telling(13, -1.0))
    with pytest.raises(ConfigError, match=r"RL021.*token id 13"):
        generator.generate(sample_of(BATCH), {})


class Telling:
    """Engine whose responses to all prompts have two tokens, of which the first is given."""

    name, remedy = "an engine of a test", "use another one"

    def __init__(self, token: int, logprob: float) -> None:
        self._first = token, logprob

    def generate(
        self, model: Any, ids: Any, attention_mask: Any, keys: Any, sampling: Sampling, ends: Any
    ) -> Responses:
        token, logprob = self._first
        found = [Completion((token, END), (logprob, -1.0), None)] * (len(ids) * sampling.samples)
        return responses_of(ids, attention_mask, found, ends)

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("token", "logprob", "told"),
    [
        (10**6, -1.0, "token id 1000000"),
        (-5, -1.0, "token id -5"),
        (14, -1.0, "token id 14"),
        (2, float("nan"), "log-probability nan"),
        (2, float("-inf"), "log-probability -inf"),
        (2, 5.0, "log-probability 5"),
    ],
)
def test_numbers_of_any_engine_are_held_against_the_policy(token: int, logprob: float, told: str) -> None:
    policy = Policy(policy_model(), 1.0, None)
    generator = Generator(job().rl, 3, policy, {END}, Telling(token, logprob))
    with pytest.raises(ConfigError, match=f"RL021.*an engine of a test.*{told}"):
        generator.generate(sample_of(BATCH), {})


def test_rounding_above_one_is_taken(server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]) -> None:
    generation, url = server
    generation.respond = lambda *_: ([2, END], [1e-6, 0])  # type: ignore[method-assign]

    assert generated(engine_of(urls=[url]), policy_model(), Sampling(1, 5, 1.0)).mask.sum() == 2 * len(IDS)


@pytest.mark.slow
@pytest.mark.long
def test_a_server_that_is_killed_while_it_starts_again_is_no_wrong_command(
    server: tuple[Generation, str], engine_of: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    starts, died, script = tmp_path / "starts", tmp_path / "died", tmp_path / "serve.sh"
    second = f"echo x >> {starts}\n[ $(wc -l < {starts}) -eq 2 ] && kill -9 $$\n"
    script.write_text(f'{second}exec {sys.executable} {SCRIPT} "$1" "$2" {died}\n', encoding="utf-8")
    model = policy_model()
    unharmed = generated(engine_of(urls=[server[1]]), model)

    found = generated(engine_of(command=f"sh {script} {{model}} {{port}}"), model)

    assert died.exists() and starts.read_text(encoding="utf-8") == "x\n" * 3
    assert torch.equal(found.ids, unharmed.ids)


def test_what_a_server_prints_is_in_a_log_that_is_told(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "generation-0.log"
    settings = GenerationServer(command="sh -c 'echo out of luck; kill -9 $$' {port}")
    engine = ServerEngine(settings, 3, 0, tokenizer(), log)
    try:
        with pytest.raises(ConfigError, match=rf"RL020.*killed by signal 9 \(SIGKILL\).*out of luck; all is in {log}"):
            generated(engine, policy_model())
    finally:
        engine.close()
    assert log.read_text(encoding="utf-8") == "out of luck\n"
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def no_room() -> Iterator[Callable[[], Any]]:
    """Maker of a context in which files of this process can't grow, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def full() -> Iterator[None]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    yield full
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_an_island_whose_folder_for_weights_is_full_says_so_and_goes_on(
    server: tuple[Generation, str], no_room: Callable[[], Any], tmp_path: Path
) -> None:
    generation, url = server
    island = Island(island_job(url, "vllm", f"--rl.generation.server.folder={tmp_path}"), tokenizer())
    try:
        assert island.step(BATCH).problems == ()
        with no_room():
            result = island.step(BATCH)
        assert result.scored
        (problem,) = result.problems
        assert re.search(rf"the policy generates itself.*can't be written to {tmp_path}", problem)
        asked = generation.asked["/v1/completions"]
        after = island.step(BATCH)
        assert after.problems == () and generation.asked["/v1/completions"] > asked
        assert len([*tmp_path.glob("hypha-weights-*/*")]) == 1
    finally:
        island.close()


def test_a_folder_for_weights_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    settings = GenerationServer(urls=["http://127.0.0.1:9"], folder=str(tmp_path / "none"))
    with pytest.raises(ClusterError, match=r"RL027.*rl\.generation\.server\.folder"):
        ServerEngine(settings, 3, 0, tokenizer())


def island_job(url: str, dialect: str, *flags: str, **rl: Any) -> Any:
    return job(
        f'--rl.generation.server.urls=["{url}"]',
        "--resources.num_workers=1",
        *flags,
        **{"generation.engine": "server", "generation.server.dialect": dialect, **rl},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "flags"), [("vllm", ()), ("sglang", ()), ("vllm", EPISODES), ("sglang", EPISODES)])
def test_an_island_trains_on_a_servers_responses(
    dialect: str, flags: tuple[str, ...], server: tuple[Generation, str]
) -> None:
    generation, url = server
    island = Island(island_job(url, dialect, *flags, behaviour_cap=2.0), tokenizer())
    versions = []
    for _ in range(3):
        result = island.step(BATCH)
        gap, count = result.sums["logprob_gap"]
        assert count > 0 and gap / count < 1e-5
        versions.append(generation.version)
    assert len(set(versions)) == 3
    assert island.evaluate([BATCH])["pass@1"][1] == 4
    assert generation.version not in versions
    island.close()


def test_a_server_with_probabilities_of_another_temperature_is_refused(server: tuple[Generation, str]) -> None:
    generation, url = server
    generation.raw_logprobs = True
    island = Island(
        island_job(url, "vllm", "--model.config.initializer_range=1.0", **{"generation.temperature": 0.5}), tokenizer()
    )
    with pytest.raises(ConfigError, match=r"RL024.*processed_logprobs"):
        island.step(BATCH)
    island.close()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "CFG011.*server.command.*server.urls"),
        (
            ['--rl.generation.server.urls=["http://a:1"]', "--rl.generation.server.command=x {port}"],
            "CFG011.*one of them",
        ),
        (['--rl.generation.server.urls=["http://a:1"]', "--resources.num_workers=2"], "CFG011.*2 different"),
        (['--rl.generation.server.urls=["a:1"]'], "CFG003.*urls.*http://"),
        (["--rl.generation.server.command=vllm serve {model}"], "CFG003.*{port}"),
        (["--rl.generation.server.command=vllm serve {modle} {port}"], "CFG003.*{model}"),
        (["--rl.generation.server.command=x {port}", "--run.mode=replay"], "CFG011.*replay"),
        (["--rl.generation.server.command=x {port}", "--rl.model_workers=2"], "CFG011.*model_workers"),
        (["--rl.generation.server.command=x {port}", "--rl.generation.server.dialect=tgi"], "CFG003.*vllm | sglang"),
    ],
)
def test_job_files_that_no_server_could_serve_are_refused(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(["--dataset.path", "unused", "--rl.algorithm=grpo", "--rl.generation.engine=server", *flags])
