"""Automatic settings follow from facts of card, model and job, and no other setting excludes them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from ray.util.accelerators import accelerators

from hypha_ray.config.automatic import (
    AUTO,
    CARDS,
    COMPILE_LAYER_S,
    COMPILE_S,
    LAYERS_S,
    LAYERS_SHARE,
    OFF,
    DeviceFacts,
    ModelFacts,
    automatic,
    capability_of,
    choose,
    chosen_job,
    find_card,
    settings_of,
    steps_of,
)
from hypha_ray.config.conflicts import conflicts
from hypha_ray.config.load import from_tables, load, resolved
from hypha_ray.config.schema import Job

H200 = DeviceFacts("cuda", "NVIDIA H200", (9, 0), compiles=True)
T4 = DeviceFacts("cuda", "Tesla T4", (7, 5), compiles=True)
AMD = DeviceFacts("cuda", "AMD Instinct MI300X", None, compiles=True)
CPU = DeviceFacts("cpu")
LLAMA = ModelFacts("causal-lm", 152_000_000, 16, 768, 50_257, has_sdpa=True, fuses=True)
"""The model of jobs/configs/pretrain.toml."""
LONG: dict[str, Any] = {"rounds": {"update_rounds": 100, "samples_between_updates": 1600, "max_batch_size": 16}}
"""100 steps a round of one worker, of 16 samples."""
ONE: dict[str, Any] = {"resources": {"num_workers": 1}}
UNCOMPILED: dict[str, Any] = {"worker": {"compile": False}}
BEST = {"autocast": "bf16", "compile": True, "fused_loss": False, "attention": "sdpa"}
EAGER = BEST | {"compile": False, "fused_loss": True}
NAMES = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    "Tesla T4": 65.0,
    "Tesla V100-SXM2-16GB": 125.0,
    "Tesla V100-PCIE-32GB": 112.0,
    "Tesla V100S-PCIE-32GB": 130.0,
}
OTHERS = (
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA A1000",
    "AMD Instinct MI300X",
    "",
)


def job_of(*tables: dict[str, Any], tokens: int | None = 1024) -> Job:
    merged: dict[str, Any] = {}
    for table in tables:
        for name, keys in table.items():
            merged[name] = {**merged.get(name, {}), **keys}
    return Job.model_validate(merged).with_sample_tokens(tokens)


def chosen(job: Job, device: DeviceFacts = H200, model: ModelFacts = LLAMA) -> dict[str, Any]:
    return settings_of(chosen_job(job, device, model))


def test_all_are_automatic_by_default_and_a_long_run_on_a_gpu_gets_the_best() -> None:
    assert automatic(job_of()) == list(OFF)
    assert chosen(job_of(LONG, ONE)) == BEST


@pytest.mark.parametrize(
    ("device", "tables", "reason"),
    [
        (CPU, {}, "no GPU"),
        (H200, {"run": {"mode": "replay"}}, "replay mode"),
        (H200, {"rl": {"algorithm": "grpo"}}, "reinforcement learning"),
        (AMD, {}, "nothing was measured"),
    ],
)
def test_where_nothing_is_to_be_changed_all_are_off(device: DeviceFacts, tables: dict[str, Any], reason: str) -> None:
    choices = choose(job_of(LONG, ONE, tables), device, LLAMA)
    assert {name: choice.value for name, choice in choices.items()} == OFF
    assert all(reason in choice.reason for choice in choices.values())


@pytest.mark.parametrize(
    ("tables", "device", "model", "expected"),
    [
        ({}, T4, {}, EAGER | {"autocast": "fp16"}),
        ({"worker": {"fused_loss": True}}, T4, {}, EAGER | {"autocast": "fp16"}),
        ({"worker": {"processes": 2, "sharding": "full"}}, T4, {}, EAGER | {"autocast": "fp16", "fused_loss": False}),
        ({}, replace(T4, capability=(6, 1)), {}, EAGER | {"autocast": "none"}),
        ({}, H200, {"narrow": True}, BEST | {"autocast": "none"}),
        ({}, H200, {"task": "object-detection", "fuses": False}, EAGER | {"autocast": "none", "fused_loss": False}),
        ({}, H200, {"task": "masked-lm", "fuses": False}, EAGER | {"fused_loss": False}),
        ({}, H200, {"foreign": True}, EAGER | {"autocast": "none"}),
        ({}, H200, {"routed": True}, EAGER),
        ({}, H200, {"adapted": True}, EAGER),
        ({}, H200, {"layers": None}, EAGER),
        ({}, H200, {"features": None}, EAGER),
        ({}, H200, {"has_sdpa": False}, BEST | {"attention": "none"}),
        ({}, replace(H200, compiles=False), {}, EAGER),
        ({"worker": {"compile": False}}, H200, {}, EAGER),
        ({"worker": {"compile": False, "fused_loss": False}}, H200, {}, EAGER | {"fused_loss": False}),
        ({"worker": {"fused_loss": True}}, H200, {}, EAGER),
        ({"worker": {"autocast": "none"}}, H200, {}, BEST | {"autocast": "none"}),
        ({"worker": {"attention": "eager"}}, H200, {}, EAGER | {"attention": "eager"}),
        ({"worker": {"attention": "none"}}, H200, {}, BEST | {"attention": "none"}),
        ({"worker": {"gradient_checkpointing": True}}, H200, {}, EAGER),
        ({"model": {"loss": "a:b"}}, H200, {}, EAGER | {"fused_loss": False}),
        ({"worker": {"probe_batch_size": True}}, H200, {}, EAGER),
        ({"worker": {"processes": 2}}, H200, {}, EAGER),
        ({"worker": {"processes": 2, "sharding": "full"}}, H200, {}, EAGER | {"fused_loss": False}),
        ({"resources": {"worker": {"gpu": 2.0}}}, H200, {}, EAGER),
        ({"rounds": {"update_rounds": 1}}, H200, {}, BEST | {"compile": "layers"}),
        ({"rounds": {"update_rounds": 1, "samples_between_updates": 640}}, H200, {}, EAGER),
        ({"worker": {"compile": True}, "rounds": {"update_rounds": 1}}, H200, {}, BEST),
        ({"worker": {"compile": True}}, CPU, {}, OFF | {"compile": True}),
        ({"rounds": {"max_batch_size": 1}, **UNCOMPILED}, H200, {"vocabulary": 1000}, EAGER | {"fused_loss": False}),
        ({"model": {"quantization": "nf4", "lora": {"rank": 4}}}, H200, {}, EAGER | {"autocast": "none"}),
    ],
)  # fmt: skip
def test_choice_follows_from_facts(
    tables: dict[str, Any], device: DeviceFacts, model: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert chosen(job_of(LONG, ONE, tables), device, replace(LLAMA, **model)) == expected


def test_model_is_compiled_from_the_step_on_at_which_that_pays() -> None:
    """66 ms are saved in a step of the measured model; a narrower estimate of the compiler's time is in no run."""
    needed = (COMPILE_S + 16 * COMPILE_LAYER_S) / 0.066
    for steps in (int(0.95 * needed), int(1.05 * needed)):
        job = job_of({"rounds": {"update_rounds": 1, "samples_between_updates": 16 * steps, "max_batch_size": 16}}, ONE)
        assert steps_of(job) == steps
        assert chosen(job)["compile"] == (True if steps > needed else "layers")
        assert f"{steps} steps" in choose(job, H200, LLAMA)["compile"].reason


def test_layers_are_compiled_in_a_short_run_from_the_step_on_at_which_that_pays() -> None:
    """The shorter run has no use for the compiler; two rounds of 40 steps have."""
    needed = LAYERS_S / LAYERS_SHARE / 0.066
    for steps, value in ((int(0.95 * needed), False), (int(1.05 * needed), "layers"), (80, "layers")):
        rounds = {"update_rounds": 1, "samples_between_updates": 16 * steps, "max_batch_size": 16}
        found = chosen(job_of({"rounds": rounds}, ONE))
        assert found == (EAGER if value is False else BEST | {"compile": value})


def test_steps_are_those_of_one_of_the_workers_and_one_a_round_in_synchronous_training() -> None:
    assert steps_of(job_of(LONG, {"resources": {"num_workers": 8}})) == 100 * 13
    assert steps_of(job_of(LONG, {"sync": {"strategy": "sync"}})) == 100


def test_samples_without_a_known_length_and_wide_models_compile_less_readily() -> None:
    assert chosen(job_of(LONG, ONE, tokens=None)) == EAGER
    fewer = job_of(LONG, ONE, {"rounds": {"update_rounds": 10}})
    assert chosen(fewer)["compile"] is True
    assert chosen(fewer, model=replace(LLAMA, features=4 * 768))["compile"] == "layers"


EXCLUDING: tuple[tuple[str, str, Any], ...] = (
    ("model", "quantization", "nf4"),
    ("model", "lora", {"rank": 4}),
    ("model", "type", "masked-lm"),
    ("worker", "sharding", "full"),
    ("worker", "processes", 2),
    ("worker", "probe_batch_size", True),
    ("worker", "gradient_checkpointing", True),
    ("worker", "compile", True),
    ("worker", "fused_loss", True),
    ("sync", "strategy", "sync"),
    ("rl", "algorithm", "grpo"),
)


@pytest.mark.slow
def test_no_choice_is_excluded_by_any_combination_of_other_settings() -> None:
    """Choices add no conflict to those that a job has with everything off."""
    tried = 0
    for given in product((False, True), repeat=len(EXCLUDING)):
        tables: dict[str, dict[str, Any]] = {"rounds": {"update_rounds": 1000}}
        for (table, key, value), is_set in zip(EXCLUDING, given, strict=True):
            if is_set:
                tables.setdefault(table, {})[key] = value
        job = Job.model_validate(tables).with_sample_tokens(1024)
        off = job.with_worker({name: OFF[name] for name in automatic(job)}, {})
        for device in (H200, T4):
            found = chosen_job(job, device, replace(LLAMA, task=job.model.type))
            assert set(conflicts(found)) == set(conflicts(off)) == set(conflicts(job))
            assert AUTO not in settings_of(found).values()
            tried += settings_of(found) != settings_of(off)
    assert tried > 500, "most combinations leave something to choose"


def test_preferences_leave_compilation_and_the_fused_loss_off() -> None:
    found = chosen_job(job_of(LONG, ONE, {"preference": {"loss": "dpo"}}), H200, LLAMA)
    assert not found.worker.compile and not found.worker.fused_loss
    assert found.worker.autocast == chosen_job(job_of(LONG, ONE), H200, LLAMA).worker.autocast == "bf16"
    assert found.reasons["fused_loss"] == "preference.loss excludes it"


def test_given_values_stay_and_the_chosen_ones_have_reasons() -> None:
    job = job_of(LONG, ONE, {"worker": {"autocast": "none", "attention": "eager"}})
    found = chosen_job(job, H200, LLAMA)
    assert settings_of(found) == {"autocast": "none", "compile": False, "fused_loss": True, "attention": "eager"}
    assert list(found.reasons) == ["compile", "fused_loss"] and found.reasons["compile"] == "not measured with eager"
    assert chosen_job(found, CPU) == found, "what is chosen isn't chosen again"


@pytest.mark.parametrize("name", ["compile", "fused_loss"])
@pytest.mark.parametrize("value", [True, False, "auto"])
def test_setting_that_is_a_switch_or_automatic_is_read_as_it_is_written(name: str, value: bool | str) -> None:
    job = from_tables({"worker": {name: value}})
    flag = load([f"--worker.{name}", str(value).lower()]).job
    assert getattr(job.worker, name) == getattr(flag.worker, name) == value
    assert from_tables(resolved(job)) == job


@pytest.mark.parametrize(("name", "tflops"), NAMES.items())
def test_card_has_the_peak_of_its_data_sheet(name: str, tflops: float) -> None:
    card = find_card(name)
    assert card is not None and card.tflops == tflops


@pytest.mark.parametrize("name", OTHERS)
def test_other_card_or_a_part_of_one_has_none(name: str) -> None:
    assert find_card(name) is None


def test_labels_of_ray_tell_the_capability() -> None:
    known = {"H100": (9, 0), "A100": (8, 0), "L4": (8, 9), "T4": (7, 5), "V100": (7, 0), "G": None, "MI300X": None}
    known |= {"A100-80G": (8, 0), "A100-80": None, "L40S": (8, 9), "P100": (6, 0), "H20": (9, 0)}
    assert {label: capability_of(label) for label in known} == known
    assert len({card.name for card in CARDS}) == len(CARDS)
    for name, label in vars(accelerators).items():
        if not name.startswith("__"):
            assert (capability_of(label) is not None) == ("NVIDIA" in name), label


def test_estimate_of_what_compiling_saves_has_no_exponent() -> None:
    """A step of 16 × 1024 tokens saves 4.4e-15 · 6 · 152e6 · 16 384 s = 65.75 ms."""
    long, small = job_of({"rounds": {**LONG["rounds"], "update_rounds": 1000}}, ONE), replace(LLAMA, parameters=10)
    assert "100000 steps would save about 6575 s, and compiling takes about 52 s" in compile_reason(long, LLAMA)
    told = "would save about 0.043 s, and compiling takes about 52 s; its layers alone about 0.039 s, and about 4 s"
    assert told in compile_reason(long, replace(LLAMA, parameters=1000))
    assert "would save less than 0.01 s, and" in compile_reason(long, small)


def compile_reason(job: Job, model: ModelFacts) -> str:
    return choose(job, H200, model)["compile"].reason
