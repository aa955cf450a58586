"""Identity of what a run is trained with: content counts, on each machine and at each start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from hypha_ray.config import Job
from hypha_ray.errors import CheckpointError
from hypha_ray.model import sources
from hypha_ray.model.sources import changes, folder_hash, identity_of, pinned, require_same


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    safetensors.numpy.save_file({"weight": np.arange(1000, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def job_of(model: Path | str, **tables: Any) -> Job:
    return Job.model_validate({"model": {"repository": str(model)}, **tables})


def test_copy_of_a_folder_with_other_times_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    os.utime(copy / "config.json", (1, 1))
    (copy / "README.md").write_text("says nothing of weights")
    assert folder_hash(copy) == folder_hash(model)


def test_another_named_template_is_another_tokenizer(model: Path) -> None:
    templates = model / "additional_chat_templates"
    templates.mkdir()
    hashes = {folder_hash(model)}
    for text in ("{{ messages[0].content }}", "{{ messages[-1].content }}"):
        (templates / "tool_use.jinja").write_text(text)
        hashes.add(folder_hash(model))
    assert len(hashes) == 3


def test_other_weights_of_the_same_shape_are_another_model(model: Path) -> None:
    begun = job_of(model).beginning_with(identity_of(job_of(model)))
    require_same(begun, begun.begun_with)
    safetensors.numpy.save_file({"weight": np.arange(1, 1001, dtype=np.float32)}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"CKPT007.*model\.repository.*run\.name") as caught:
        require_same(begun, begun.begun_with)
    assert "--resume" not in str(caught.value)


def test_large_file_is_known_by_samples_of_its_content(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_WHOLE_BYTES", 1 << 20)
    weights = np.random.default_rng(0).normal(size=5_000_000).astype(np.float32)
    hashes = set()
    for step in range(3):
        safetensors.numpy.save_file({"weight": weights + np.float32(1e-3 * step)}, model / "model.safetensors")
        hashes.add(folder_hash(model))
    assert len(hashes) == 3


def test_reward_module_that_was_edited_is_another_one_and_may_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "own_rewards_of_a_test.py"
    module.write_text("def right(response):\n    return 1.0\n")
    rl = {"algorithm": "grpo", "reward": {"functions": ["exact", "own_rewards_of_a_test:right"]}}
    job = job_of(model, rl=rl)
    before = identity_of(job)
    module.write_text("def right(response):\n    return 0.5\n")
    assert changes(identity_of(job), before) == ["rl.reward.functions own_rewards_of_a_test:right"]
    with pytest.raises(CheckpointError, match=r"CKPT007.*own_rewards_of_a_test:right.*--resume"):
        require_same(job, before)


def test_module_that_a_reward_module_imports_from_beside_it_belongs_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards_with_imports.py").write_text("import json\nfrom first_helper import score as right\n")
    (tmp_path / "first_helper.py").write_text(
        "def score(response):\n    import second_helper\n    return second_helper.ONE\n"
    )
    (tmp_path / "second_helper.py").write_text("import first_helper\nONE = 1.0\n")
    (tmp_path / "stranger.py").write_text("")
    job = job_of(model, rl={"algorithm": "grpo", "reward": {"functions": ["rewards_with_imports:right"]}})
    before = identity_of(job)
    (tmp_path / "stranger.py").write_text("changed = True\n")
    assert changes(identity_of(job), before) == []
    (tmp_path / "second_helper.py").write_text("import first_helper\nONE = 0.5\n")
    assert changes(identity_of(job), before) == ["rl.reward.functions rewards_with_imports:right"]


def test_external_trainer_that_was_edited_is_another_one_and_may_be_accepted(tmp_path: Path, model: Path) -> None:
    (tmp_path / "train.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("RATE = 1\n")
    command = f"python {tmp_path / 'train.py'} --fast"
    job = job_of(model, resources={"num_workers": 3}, bridge={"commands": [command, command, "trainer-of-a-package"]})
    before = identity_of(job)
    (tmp_path / "helper.py").write_text("RATE = 2\n")
    assert changes(identity_of(job), before) == [f"trainer {command!r}"]
    with pytest.raises(CheckpointError, match=r"CKPT007.*train\.py.*--resume"):
        require_same(job, before)


def test_things_that_are_not_on_this_machine_are_not_compared(model: Path) -> None:
    before = identity_of(job_of(model))
    shutil.rmtree(model)
    require_same(job_of(model), before)
    require_same(job_of(model), {})


def test_hub_repository_keeps_the_commit_that_it_had_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has moved on to another commit of the branch, as after a push."""
    cache = tmp_path / "models--some--model"
    for commit in ("a" * 40, "b" * 40):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
    (cache / "refs").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (cache / "refs" / "main").write_text("a" * 40)
    begun = pinned(job_of("some/model"), {})
    known = identity_of(begun)
    (cache / "refs" / "main").write_text("b" * 40)
    assert begun.model.revision == "a" * 40
    assert pinned(job_of("some/model"), known).model.revision == "a" * 40
    assert pinned(job_of("some/model"), {}).model.revision == "b" * 40
