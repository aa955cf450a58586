"""Generation by a server: against a server that runs the model by transformers, over real sockets."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hypha_ray.config.load import load
from hypha_ray.config.tables.rl import GenerationServer
from hypha_ray.errors import ClusterError, ConfigError, HyphaError
from hypha_ray.rl.engines.sampling import Sampling
from hypha_ray.rl.engines.server import ServerEngine
from hypha_ray.rl.island import Island
from tests.support.generation_server import Generation, serving
from tests.support.rl import BATCH, END, job, policy_model, tokenizer

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


@pytest.mark.parametrize("dialect", DIALECTS)
def test_responses_are_of_the_given_weights_and_carry_their_probabilities(
    dialect: str, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    engine = engine_of(dialect=dialect, urls=[server[1]])
    for seed in (0, 1):
        model = policy_model(seed)
        found = generated(engine, model)

        assert found.ids.shape[0] == 12 and torch.equal(found.ids[::3, : IDS.shape[1]], IDS)
        torch.testing.assert_close(found.logprobs, true_logprobs(model, found, 0.7), atol=1e-5, rtol=0)
        lengths = found.mask.sum(1).long()
        last = found.ids[torch.arange(12), IDS.shape[1] + lengths - 1]
        assert torch.equal(found.ended, last == END) and bool((found.ended | (lengths == 5)).all())
        assert len({tuple(row.tolist()) for row in found.ids[:3]}) > 1
        assert torch.equal(generated(engine, model).ids, found.ids)
    greedy = generated(engine, model, Sampling(2, 5, 0.0))
    assert torch.equal(greedy.ids[::2], greedy.ids[1::2])


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


@pytest.mark.parametrize(
    ("dialect", "path"), [("vllm", "/update_weight_version"), ("sglang", "/update_weights_from_disk")]
)
def test_answers_with_other_weights_are_never_used(
    dialect: str, path: str, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    generation.deaf = {path}
    with pytest.raises(ClusterError, match=r"RL023.*weights of version default instead of \w{16}"):
        generated(engine_of(dialect=dialect, urls=[url]), policy_model())
    assert generation.asked[path] == 4


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


@pytest.mark.parametrize("cut", [-1, 0, 9])
def test_an_answer_that_ends_early_is_one_of_a_lost_server(
    cut: int, server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    unharmed = generated(engine_of(urls=[url]), policy_model())
    generation.cut = {"/v1/completions": cut}

    assert torch.equal(generated(engine_of(urls=[url]), policy_model()).ids, unharmed.ids)
    assert not generation.cut


def test_a_server_that_is_killed_in_mid_batch_is_started_again(
    engine_of: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    model, died = policy_model(), tmp_path / "died"
    unharmed = generated(engine_of(command=command()), model)

    found = generated(engine_of(command=command(died)), model)

    assert died.exists()
    assert torch.equal(found.ids, unharmed.ids) and torch.equal(found.logprobs, unharmed.logprobs)


def test_a_started_server_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    pids, script = tmp_path / "pids", tmp_path / "serve.sh"
    os.mkfifo(pids)
    script.write_text(f"setsid sleep 600 &\necho $$ $! > {pids}\nwait\n", encoding="utf-8")
    program = "import sys; from hypha_ray.rl.engines.command import CommandServer\n"
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


def test_a_server_that_hangs_is_given_up_at_the_deadline(
    server: tuple[Generation, str], engine_of: Callable[..., ServerEngine]
) -> None:
    generation, url = server
    engine, model = engine_of(urls=[url], deadline_s=0.5), policy_model()
    generated(engine, model)
    with generation.lock, pytest.raises(ClusterError, match=r"RL022.*no answer in 0.5 s"):
        generated(engine, model)


def island_job(url: str, dialect: str, *flags: str, **rl: Any) -> Any:
    return job(
        f'--rl.generation.server.urls=["{url}"]',
        "--resources.num_workers=1",
        *flags,
        **{"generation.engine": "server", "generation.server.dialect": dialect, **rl},
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_island_trains_on_a_servers_responses(dialect: str, server: tuple[Generation, str]) -> None:
    generation, url = server
    island = Island(island_job(url, dialect, behaviour_cap=2.0), tokenizer())
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
