"""Notes of a dry run: advice, machines, Muon's part of a model, and settings that cards will get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hypha_ray.config import Job
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.dataset_settings import with_sample_tokens
from hypha_ray.driver.preflight.checks import advice, case_of
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.driver.preflight.notes import StepReport, gpu_name, muon_notes, rule_notes, step_notes
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.market.requirements import OWN_LABEL, RAY_LABEL, NodeResources
from hypha_ray.types import TokenRules
from tests.support.worker_bench import CONFIG
from tests.unit.driver.test_scoring import dataset

NODES = [NodeResources("10.0.0.1", {"CPU": 4, "memory": 8e9}, {"CPU": 4, "memory": 8e9})]
LLAMA = {"model_type": "llama", "vocab_size": 50_000, "hidden_size": 32, "intermediate_size": 64}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("rounds", "outer", "expected"),
    [
        (20, {}, ["outer_optimizer.momentum 0.9 takes about 50 rounds to settle, and there are 20: 0.75 would do"]),
        (
            3,
            {"momentum": 0.5},
            ["outer_optimizer.momentum 0.5 takes about 10 rounds to settle, and there are 3"],
        ),
        (50, {}, []),
        (10, {"momentum": 0.5}, []),
        (1, {"momentum": 0.0}, []),
        (20, {"name": "adam"}, []),
    ],
)
def test_momentum_that_cannot_settle_is_told_with_one_that_can(
    rounds: int, outer: dict[str, Any], expected: list[str]
) -> None:
    job = Job.model_validate({"rounds": {"update_rounds": rounds}, "outer_optimizer": outer})
    assert [note[: len(text)] for note, text in zip(advice(job), expected, strict=True)] == expected
    steps = job.model_copy(update={"sync": job.sync.model_copy(update={"strategy": "sync"})})
    assert not list(advice(steps))


@pytest.mark.parametrize(
    ("rounds", "sync", "told"),
    [
        ({"update_rounds": 60}, {"fragments": 4}, "and each of 4 fragments has 15: 0.66 would do"),
        ({"update_rounds": 200}, {"fragments": 4}, None),
        ({"update_rounds": 60}, {"fragments": 4, "stagger": False}, None),
        ({"update_rounds": 30}, {"strategy": "async"}, "and there are 30: 0.83 would do"),
        ({"update_rounds": 30}, {"strategy": "async", "delayed_nesterov": False}, None),
        ({"update_rounds": 60, "warmup_rounds": 20}, {}, "and there are 40: 0.87 would do"),
        ({"update_rounds": 60, "warmup_rounds": 60}, {}, None),
    ],
)
def test_momentum_is_held_against_the_steps_that_it_has(
    rounds: dict[str, Any], sync: dict[str, Any], told: str | None
) -> None:
    notes = list(advice(Job.model_validate({"rounds": rounds, "sync": sync})))
    assert len(notes) == (told is not None) and all(str(told) in note for note in notes)


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        ({"delay_steps": 8}, "results come 8 batches late, and are exchanged every 8 or so"),
        ({"delay_steps": 4}, None),
        ({"delay_steps": 8, "mixing": 0.5}, None),
        ({"delay_steps": 8, "fragments": 2}, None),
        (
            {"delay_steps": 8, "fragments": 2, "in_flight": 2},
            "results come 16 batches late, and are exchanged every 16",
        ),
        ({"delay_steps": 8, "fragments": 2, "stagger": False}, "results come 8 batches late"),
    ],
)
def test_delay_that_leaves_little_of_a_round_is_told(sync: dict[str, Any], told: str | None) -> None:
    rounds = {"update_rounds": 500, "samples_between_updates": 64, "max_batch_size": 4}
    notes = list(advice(Job.model_validate({"rounds": rounds, "sync": sync, "resources": {"num_workers": 2}})))
    assert len(notes) == (told is not None) and all(str(told) in note for note in notes)


@pytest.mark.parametrize(("codec", "inner", "warned"), [("topk", "adamw", 1), ("topk", "sgd", 0), ("int8", "adamw", 0)])
def test_adam_on_sparse_gradients_is_warned_of(codec: str, inner: str, warned: int) -> None:
    tables = {"sync": {"strategy": "sync", "codec": codec}, "inner_optimizer": {"name": inner}}
    assert len(list(advice(Job.model_validate(tables)))) == warned


def test_gpus_that_no_worker_leases_are_told() -> None:
    job = Job.model_validate({"outer_optimizer": {"momentum": 0.0}})
    assert [note for note in advice(job, gpus=2) if "none leases a GPU, and there are 2" in note]
    for settings in ({"resources": {"worker": {"gpu": 1}}}, {"worker": {"device": "cpu"}}):
        assert not list(advice(Job.model_validate({"outer_optimizer": {"momentum": 0.0}} | settings), gpus=2))
    assert not list(advice(job))


def test_machine_lines_of_groups_say_what_each_needs_and_how_many_fit() -> None:
    groups = [{"count": 2, "gpu": 1, "gpu_type": "l4"}, {"count": 3, "memory_gb": 4}, {"kind": "bridged"}]
    job = Job.model_validate({"workers": groups})
    assert list(machine_lines(job, NODES, "head")) == [
        "workers 0 to 1, each with 1 CPU, 1 GPU, gpu_type l4: 0 of 2 fit",
        "workers 2 to 4, each with 1 CPU, 4 GB of memory: 2 of 3 fit",
        "worker 5 with no reservation: 1 of 1 fit",
        "resources: 3 of 6 workers fit; nodes: 1",
    ]


def test_machine_lines_of_a_job_without_groups_are_one() -> None:
    job = Job.model_validate({"resources": {"num_workers": 6}})
    assert list(machine_lines(job, NODES, "head")) == ["resources: 4 of 6 workers fit; nodes: 1"]


@pytest.mark.parametrize(("name", "noted"), [("adamw", False), ("muon", True)])
def test_note_counts_the_parameters_of_both_optimizers(name: str, noted: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    job = Job.model_validate({"inner_optimizer": {"name": name}})
    unused: Any = None
    # GPT-2 of one layer and width 16: 12 · 16² in matrices, (50 + 16) · 16 in tables, 15 · 16 in gains and biases.
    note = "muon steps on 3,072 of 4,368 parameters (70.3%), those of matrices"
    rest = "; AdamW on the rest: 1,056 of embeddings and head, 240 of vectors"
    assert muon_notes(Case(job, unused, model, unused, unused)) == ([note + rest] if noted else [])


OFF = "autocast none, compile false, fused_loss false, attention none"
EAGER = "autocast bf16 (the card multiplies bfloat16), compile false (400 steps would save about 0."


def notes(folder: Path, labels: list[str], **tables: dict[str, Any]) -> StepReport:
    tokens = np.random.default_rng(0).integers(3, 300, (4, 512))
    path, manifest = dataset(folder, {"input_ids": tokens})
    rounds = {"update_rounds": 100, "samples_between_updates": 8, "max_batch_size": 1}
    job = Job.model_validate({"model": {"config": LLAMA}, "rounds": rounds, **tables})
    amounts = {"CPU": 8.0, "GPU": 1.0}
    nodes = [NodeResources("at", amounts, amounts, {RAY_LABEL: label} if label else {}) for label in labels]
    case = case_of(with_sample_tokens(job, manifest), in_folder(path, manifest))
    return step_notes(case, nodes)


GPU = {"resources": {"worker": {"gpu": 1.0}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "tables", "expected"),
    [
        (["H100"], {}, [f"on CPU: {OFF} (no GPU)"]),
        (["H100"], {"worker": {"device": "cpu"}, **GPU}, [f"on CPU: {OFF} (no GPU)"]),
        (["H100", "H100"], GPU, [f"on H100: {EAGER}"]),
        (["H100"], {"run": {"mode": "replay"}, **GPU}, [f"on H100: {OFF} (replay mode"]),
        (["T4"], GPU, ["on T4: autocast fp16 (the card multiplies float16 and not bfloat16)"]),
        (["", "A100"], GPU, ["on A100: ", "workers on a GPU choose theirs when they start"]),
        (["G"], GPU, ["workers on G choose theirs when they start"]),
        (["AMD-Instinct-MI300X-OAM"], GPU, [f"on AMD-Instinct-MI300X-OAM: {OFF} (nothing was measured on such a GPU)"]),
        (["AMD-Instinct-MI210", "L4", "MXC500"], {"resources": {"worker": {"gpu": 1.0, "gpu_type": "amd"}}},
         ["on AMD-Instinct-MI210: "]),
        (["AMD-Instinct-MI210", "L4", "MXC500"], {"resources": {"worker": {"gpu": 1.0, "gpu_type": "nvidia"}}},
         ["on L4: "]),
        (["P100"], GPU, ["on P100: autocast none (the card multiplies no matrices of 16 bits faster)"]),
        (["H100", "L4"], {"resources": {"worker": {"gpu": 1.0, "gpu_type": "L4"}}}, ["on L4: "]),
        (["H100"], {"worker": dict(zip(("autocast", "compile", "fused_loss", "attention"),
                                       ("none", False, False, "none"), strict=True)), **GPU}, []),
    ],
)  # fmt: skip
def test_settings_are_told_for_each_kind_of_card_at_hand(
    labels: list[str], tables: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    lines = notes(tmp_path, labels, **tables).settings
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


@pytest.mark.parametrize(
    ("resources", "labels", "name"),
    [
        ({"accelerator_type:T4": 1.0}, {}, "T4"),
        ({"accelerator_type:T4": 1.0}, {RAY_LABEL: "A100", OWN_LABEL: "big"}, "A100"),
        ({}, {OWN_LABEL: "L4"}, "L4"),
        ({}, {}, "a GPU"),
    ],
)
def test_kind_of_a_card_is_told_by_a_label_or_by_a_resource(
    resources: dict[str, float], labels: dict[str, str], name: str
) -> None:
    amounts = {"CPU": 8.0, "GPU": 1.0, **resources}
    assert gpu_name(NodeResources("at", amounts, amounts, labels)) == name


@pytest.mark.slow
def test_memory_is_that_of_the_settings_that_are_chosen(tmp_path: Path) -> None:
    """512 logits of 50 000 classes are 98 MiB in 32 bits, which a fused loss on a GPU never has at once."""
    on_cpu = notes(tmp_path / "cpu", ["H100"]).memory
    on_gpu = notes(tmp_path / "gpu", ["H100"], **GPU).memory
    given = {"worker": {"autocast": "bf16", "compile": False, "fused_loss": True, "attention": "sdpa"}, **GPU}
    assert on_gpu == notes(tmp_path / "given", ["H100"], **given).memory != on_cpu
    assert len(on_gpu) == len(on_cpu) == 1


@pytest.mark.slow
def test_memory_beyond_the_reserved_one_is_a_warning(tmp_path: Path) -> None:
    """The logits of one sample alone take 98 MiB."""
    small = notes(tmp_path / "small", [], resources={"worker": {"memory_gb": 0.1}})
    assert small.warnings == [
        "a training step takes more than the 0.1 GB that a worker reserves: raise memory_gb, or save memory"
    ]
    assert notes(tmp_path / "large", [], resources={"worker": {"memory_gb": 4}}).warnings == []


@pytest.mark.parametrize(
    ("modality", "rules", "model_rules", "told"),
    [
        ("prompts", TokenRules(), TokenRules(), None),
        ("prompts", TokenRules((1,)), TokenRules(), "begin with token 1, and those that the model was trained on with"),
        ("prompts", TokenRules(template_sha256="a"), TokenRules(template_sha256="a"), None),
        ("language", TokenRules(template_sha256="a"), TokenRules(template_sha256="b"), "trained with another chat"),
        (
            "prompts",
            TokenRules(),
            TokenRules(template_sha256="a"),
            "plain texts, and the model was trained on chats",
        ),
        ("prompts", TokenRules(template_sha256="a"), TokenRules(), "are chats, and the model was trained on none"),
        ("language", TokenRules(), TokenRules(template_sha256="a"), None),
        (
            "prompts",
            TokenRules(template_sha256="a"),
            TokenRules(template_sha256="a", system="Be brief."),
            "without a system message, and those that the model was trained on with the system message 'Be brief.'",
        ),
        ("prompts", None, TokenRules((1,)), None),
        ("prompts", TokenRules((1,)), None, None),
    ],
)
def test_decisions_that_differ_from_those_of_the_model_are_told(
    tmp_path: Path, modality: str, rules: TokenRules | None, model_rules: TokenRules | None, told: str | None
) -> None:
    _, manifest = dataset(tmp_path, {"input_ids": np.ones((4, 8), np.int64)})
    changed = manifest.model_copy(update={"modality": modality, "tokens": rules})
    found = list(rule_notes(changed, model_rules))
    assert len(found) == (told is not None) and all(str(told) in note for note in found)
