"""A dry run tells the settings that workers will choose on the nodes' cards, and the memory of a step with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.config import Job
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.dataset_settings import with_sample_tokens
from hypha_ray.driver.preflight.checks import case_of
from hypha_ray.driver.preflight.notes import StepReport, step_notes
from hypha_ray.market.requirements import RAY_LABEL, NodeResources
from tests.unit.driver.test_scoring import dataset

LLAMA = {"model_type": "llama", "vocab_size": 50_000, "hidden_size": 32, "intermediate_size": 64}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
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
