"""Requests: hooks as a job file asks for them, repetitions, and model workers that can't be built."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hypha_ray.config import Job
from hypha_ray.errors import AuthenticationError, ConfigError
from hypha_ray.model.layout import array_of
from hypha_ray.model.lora import build_trained
from hypha_ray.rl.batches import sums_of
from hypha_ray.rl.dataflow.actor import error_for_user
from hypha_ray.rl.dataflow.graph import Mesh, step_graph
from hypha_ray.rl.dataflow.master import Extras, Master
from hypha_ray.rl.dataflow.model_worker import Local, ModelWorker
from hypha_ray.rl.dataflow.requests import (
    Evaluate,
    Hook,
    ModelRequest,
    Name,
    Offload,
    Reallocate,
    RequestQueue,
    Save,
    Transfer,
)
from hypha_ray.rl.island import Island
from hypha_ray.rl.policy import sample_of
from hypha_ray.rl.policy_roles import OffloadedWeights
from hypha_ray.rl.reward_role import Advantage
from hypha_ray.rl.roles import trained_roles, untrained_roles
from hypha_ray.types import Sums
from tests.support.rl import BATCH, job, policy_model, prompts, tokenizer

VALIDATION = prompts(["21=", "7=", "88="], ["12", "7", "88"], epoch=9)


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    sha256 = hashlib.sha256()
    for name in sorted(weights):
        sha256.update(weights[name].numpy().tobytes())
    return sha256.hexdigest()


@pytest.mark.slow
def test_offloaded_weights_take_no_memory_and_come_back_to_the_bit() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(2)))
    size = sum(one.nbytes for one in model.parameters())
    before, with_it = [one.detach().clone().sum(0) for one in model.parameters()], memory_bytes()

    offloaded = OffloadedWeights(model)

    assert with_it - memory_bytes() > 0.9 * size
    offloaded.load()
    assert all(torch.equal(one, other.sum(0)) for one, other in zip(before, model.parameters(), strict=True))


def test_tied_weights_are_offloaded_once_and_stay_tied() -> None:
    model = policy_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    before = {name: one.clone() for name, one in model.state_dict().items()}

    OffloadedWeights(model).load()

    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["initial", "round", "average"])
def test_a_reference_that_is_offloaded_between_its_uses_changes_no_bit(reference: str) -> None:
    kept = Island(job(reference=reference, kl=0.2), tokenizer())
    moved = Island(job(reference=reference, kl=0.2, offload_reference="true"), tokenizer())
    for version in range(3):
        results = [island.step(BATCH) for island in (kept, moved)]
        assert results[0].sums == results[1].sums
        for island in (kept, moved):
            island.merged(version + 1)

    states = kept.state(), moved.state()
    assert states[0].keys() == states[1].keys() and all(
        (states[1][name] == one).all() for name, one in states[0].items()
    )
    for name, tensor in kept.model.named_parameters():
        assert torch.equal(dict(moved.model.named_parameters())[name], tensor)


def test_evaluation_within_a_round_is_that_of_the_weights_after_the_step() -> None:
    island = Island(job(**{"evaluation.samples": 3, "evaluation.every_steps": 2}), tokenizer())
    assert not [name for name in (island.step(BATCH), island.step(BATCH))[1].sums if name.startswith("validation/")]
    island.evaluate([VALIDATION])

    found = [island.step(BATCH).sums for _ in range(2)]

    expected = {f"validation/{name}": sums for name, sums in island.evaluate([VALIDATION]).items()}
    assert not found[0].keys() & expected.keys()
    assert {name: found[1][name] for name in expected} == expected
    assert {"validation/pass@1", "validation/pass@3", "validation/reward"} <= expected.keys()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_policy_is_saved_every_few_steps_for_transformers_to_load(algorithm: str, tmp_path: Path) -> None:
    place = f"--run.dir={tmp_path}", "--run.name=saved"
    island = Island(job(*place, algorithm=algorithm, save_every_steps=2), tokenizer(), worker=3)
    island.merged(7)
    island.step(BATCH)
    assert not (tmp_path / "saved").exists()

    island.step(BATCH)

    folder = tmp_path / "saved" / "policies" / "worker-3" / "version_000007_step_000002"
    loaded, own = AutoModelForCausalLM.from_pretrained(folder), getattr(island.model, "actor", island.model)
    assert all(torch.equal(one, own.state_dict()[name]) for name, one in loaded.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder)("12=")["input_ids"] == tokenizer()("12=")["input_ids"]
    island.step(BATCH)
    assert [one.name for one in folder.parent.iterdir()] == [folder.name]
    island.merged(8)
    island.step(BATCH)
    names = {one.name for one in folder.parent.iterdir()}
    assert names == {folder.name, "version_000008_step_000001"}, "steps are counted from the weights that were merged"


def test_a_policy_that_cannot_be_saved_is_told_and_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "no-folder"
    folder.touch()
    island = Island(job(f"--run.dir={folder}", "--run.name=saved", save_every_steps=1), tokenizer())
    before = {name: one.clone() for name, one in island.model.state_dict().items()}

    result = island.step(BATCH)

    assert result.scored
    (problem,) = result.problems
    assert problem.startswith("the policy was not saved; training goes on: error[MODEL013]") and str(folder) in problem
    assert any(not torch.equal(one, before[name]) for name, one in island.model.state_dict().items())
    folder.unlink()
    assert island.step(BATCH).problems == ()
    assert [one.name for one in folder.glob("saved/policies/*/*")] == ["version_000000_step_000002"]


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_a_generator_has_the_share_of_the_trainers_weights_that_it_is_given_after_each_step(eta: float) -> None:
    settings = job(model_workers=2)
    island = Island(job(), tokenizer())
    trainer = ModelWorker(0, trained_roles(job(), island.model, tokenizer(), 0), {})
    beside = ModelWorker(1, untrained_roles(settings, tokenizer()), {})
    expected = {name: one.clone() for name, one in beside.weights("generator").items()}
    for step in range(3):
        island.step(BATCH)
        given = trainer.weights("actor")
        expected = {name: torch.lerp(one, given[name], eta) for name, one in expected.items()}
        hook = Reallocate("actor", "generator", eta)
        beside.handle(ModelRequest(2 * step, "fetch", 1, arguments={"sample": sample_of(BATCH)}))
        takes, ids = ("prompts", "keys"), sample_of(BATCH).ids
        sent = {name: array_of(one) for name, one in given.items()}
        beside.handle(ModelRequest(2 * step + 1, "generate", 1, "generator", ids, takes, (Transfer(()), hook)), sent)

        assert digest(beside.weights("generator")) == digest(expected)
        assert (digest(given) == digest(expected)) == (eta == 1.0)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("inference", [Offload("reference")], []),
        ("train_step", [Save("actor", "x")], []),
        ("inference", [], [Evaluate("evaluation", sample_of(VALIDATION), 0)]),
        ("generate", [], [Save("actor", "x")]),
        ("spec", [], [Offload("reference")]),
    ],
)
def test_hooks_stand_only_where_they_can_be_done(name: Name, before: list[Hook], after: list[Hook]) -> None:
    with pytest.raises(ValueError, match=r"can't stand|takes no hooks"):
        ModelRequest(0, name, 0, "actor", before=tuple(before), after=tuple(after))


class Twice(Local):
    """Transport that makes each request twice, those that change weights aside."""

    def send(self, request: ModelRequest) -> int:
        if request.name not in ("train_step", "initialize"):
            super().send(request)
        return super().send(request)


def steps(settings: Job, transport: type[Local]) -> tuple[list[Sums], list[Any], float]:
    """Take three steps; return their figures, the weights after them, and the coefficient of the divergence."""
    model = build_trained(settings).eval()
    advantage = Advantage(settings.rl)
    roles = {**trained_roles(settings, model, tokenizer(), 0), "advantage": advantage}
    meshes = {name: Mesh((0,)) for name in roles}
    master = Master(meshes, RequestQueue(transport({0: ModelWorker(0, roles, {})}), 0.0), count())
    for name in ("actor", *(["critic"] if settings.rl.has_critic else [])):
        master.ask("initialize", name, steps=3)
    found = []
    for step in range(3):
        extras = {"rew_inf": Extras({"round": 0}), "advantage_inf": Extras({"step": step})}
        found.append(sums_of(master.traverse(step_graph(settings.rl), sample_of(BATCH), extras)))
    return found, [parameter.detach().clone() for parameter in model.parameters()], advantage.kl


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_place": "reward", "kl": 0.1, "kl_target": 0.1, "kl_horizon": 100, "reference": "initial"},
        {"algorithm": "ppo", "kl": 0.1, "kl_target": 0.1, "kl_horizon": 100, "reference": "initial"},
        {"algorithm": "reinforce++", "data_parallel": "true", "kl": 0.1, "reference": "initial"},
        {"behaviour_cap": 2.0, "offload_reference": "true", "kl": 0.1, "reference": "initial"},
    ],
)
def test_requests_of_all_roles_made_twice_change_nothing(settings: dict[str, Any]) -> None:
    """Advantages, references, critics, learners, rewards and generation all answer the second time as the first."""
    wanted = job("--inner_optimizer.name=sgd", **settings)
    sums, weights, coefficient = steps(wanted, Local)
    again, others, same = steps(wanted, Twice)

    assert again == sums
    assert same == coefficient
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    if wanted.rl.kl_target is not None:
        assert coefficient != wanted.rl.kl


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named 'my_rewards'"), "lacks a package.*No module named 'my_rewards'"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "don't fit.*Tried to allocate"),
        (RuntimeError("first line\nsecond line"), "can't be built.*RuntimeError: first line second line"),
    ],
)
def test_a_reason_of_other_libraries_is_one_clear_error(error: Exception, told: str) -> None:
    with pytest.raises(ConfigError, match=f"RL028.*{told}") as raised:
        raise error_for_user(error)
    assert raised.value.exit_code == 2


def test_a_reason_of_ours_keeps_its_code() -> None:
    own = AuthenticationError("RWD006", "the judge's key isn't in the environment")
    assert error_for_user(own) is own and own.exit_code == 4
