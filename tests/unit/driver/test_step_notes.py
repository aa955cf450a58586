"""A dry run tells the settings that workers will choose on the nodes' cards, and the memory of a step with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.config import Job
from hypha_ray.driver.datasets.classes import with_sample_tokens
from hypha_ray.driver.datasets.data_source import in_folder
from hypha_ray.driver.preflight.checks import case_of
from hypha_ray.driver.preflight.step_notes import step_notes
from hypha_ray.market.requirements import RAY_LABEL, NodeResources
from tests.unit.driver.test_scoring import dataset

LLAMA = {"model_type": "llama", "vocab_size": 50_000, "hidden_size": 32, "intermediate_size": 64}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
OFF = "autocast none, compile false, fused_loss false, attention none"
EAGER = "autocast bf16 (the card multiplies bfloat16), compile false (400 steps would save about 0."


def notes(folder: Path, labels: list[str], **tables: dict[str, Any]) -> list[str]:
    tokens = np.random.default_rng(0).integers(3, 300, (4, 512))
    path, manifest = dataset(folder, {"input_ids": tokens})
    rounds = {"update_rounds": 100, "samples_between_updates": 8, "max_batch_size": 1}
    job = Job.model_validate({"model": {"config": LLAMA}, "rounds": rounds, **tables})
    amounts = {"CPU": 8.0, "GPU": 1.0}
    nodes = [NodeResources("at", amounts, amounts, {RAY_LABEL: label} if label else {}) for label in labels]
    case = case_of(with_sample_tokens(job, manifest), in_folder(path, manifest))
    return step_notes(case, nodes)


def memory(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("a training step of a worker takes")]


GPU = {"resources": {"worker": {"gpu": 1.0}}}


@pytest.mark.parametrize(
    ("labels", "tables", "expected"),
    [
        (["H100"], {}, [f"settings of workers on CPU: {OFF} (no GPU)"]),
        (["H100"], {"worker": {"device": "cpu"}, **GPU}, [f"settings of workers on CPU: {OFF} (no GPU)"]),
        (["H100", "H100"], GPU, [f"settings of workers on H100: {EAGER}"]),
        (["H100"], {"run": {"mode": "replay"}, **GPU}, [f"settings of workers on H100: {OFF} (replay mode"]),
        (["T4"], GPU, ["settings of workers on T4: autocast fp16 (the card multiplies float16 and not bfloat16)"]),
        (["", "A100"], GPU, ["settings of workers on A100: ", "workers on a GPU choose settings that are auto"]),
        (["G"], GPU, ["workers on G choose settings that are auto when they start"]),
        (["H100", "L4"], {"resources": {"worker": {"gpu": 1.0, "gpu_type": "L4"}}}, ["settings of workers on L4: "]),
        (["H100"], {"worker": dict(zip(("autocast", "compile", "fused_loss", "attention"),
                                       ("none", False, False, "none"), strict=True)), **GPU}, []),
    ],
)  # fmt: skip
def test_settings_are_told_for_each_kind_of_card_at_hand(
    labels: list[str], tables: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    lines = [line for line in notes(tmp_path, labels, **tables) if line not in memory([line])]
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True)), lines


def test_memory_is_that_of_the_settings_that_are_chosen(tmp_path: Path) -> None:
    """512 logits of 50 000 classes are 98 MiB in 32 bits, which a fused loss on a GPU never has at once."""
    on_cpu, on_gpu = (memory(notes(tmp_path / name, ["H100"], **tables)) for name, tables in
                      (("cpu", {}), ("gpu", GPU)))  # fmt: skip
    given = {"worker": {"autocast": "bf16", "compile": False, "fused_loss": True, "attention": "sdpa"}, **GPU}
    assert on_gpu == memory(notes(tmp_path / "given", ["H100"], **given)) != on_cpu
