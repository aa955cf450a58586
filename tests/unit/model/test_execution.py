"""Settings of computation change time and memory, and neither losses nor gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.schema import Job, Model
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import build_model, skeleton
from hypha_ray.model.execution import check_execution
from hypha_ray.types import Samples
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.jobs import MODEL


def trainer(model: dict[str, Any], **worker: Any) -> SupervisedTrainer:
    return SupervisedTrainer(Job.model_validate({"model": model, "worker": {"device": "cpu", **worker}}))


def batch() -> Samples:
    ids = np.random.default_rng(0).integers(3, 300, (4, 32))
    return Samples({"input_ids": ids}, np.zeros((4, 3), np.int64))


def gradients(one: SupervisedTrainer) -> dict[str, torch.Tensor]:
    one.optimizer.zero_grad()
    one.backward(batch())
    return {name: p.grad for name, p in one.model.named_parameters() if p.grad is not None}


@pytest.fixture(params=["whole", "adapter"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "whole":
        return {"config": MODEL}
    build_model(Model(config=MODEL), seed=0).save_pretrained(tmp_path)
    return {"repository": str(tmp_path), "lora": {"rank": 2}}


def test_checkpointed_activations_are_computed_twice_and_give_the_same_gradients(model: dict[str, Any]) -> None:
    plain, saving = trainer(model), trainer(model, gradient_checkpointing=True)
    calls = dict.fromkeys(("plain", "saving"), 0)
    for name, one in (("plain", plain), ("saving", saving)):
        layer = one.model.model.layers[0].self_attn  # type: ignore[union-attr, index]

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        layer.register_forward_pre_hook(count)
    expected, found = gradients(plain), gradients(saving)
    assert calls == {"plain": 1, "saving": 2}
    assert expected.keys() == found.keys() and expected
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_attention_is_the_one_that_was_chosen_and_gives_the_same_gradients() -> None:
    eager, sdpa = (trainer({"config": MODEL}, attention=name) for name in ("eager", "sdpa"))
    assert [one.model.config._attn_implementation for one in (eager, sdpa)] == ["eager", "sdpa"]
    expected, found = gradients(eager), gradients(sdpa)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "task", "worker", "error"),
    [
        ({"model_type": "resnet", "depths": [1], "hidden_sizes": [4]}, "image-classification",
         {"gradient_checkpointing": True}, "ResNetForImageClassification can't compute its activations again"),
        ({"model_type": "resnet", "depths": [1], "hidden_sizes": [4]}, "image-classification",
         {"attention": "sdpa"}, "lacks this implementation"),
    ],
)  # fmt: skip
def test_setting_that_the_model_lacks_is_refused_before_it_is_built(
    config: dict[str, Any], task: str, worker: dict[str, Any], error: str
) -> None:
    job = Job.model_validate({"model": {"config": config, "type": task}, "worker": worker})
    with pytest.raises(ConfigError, match=error) as caught:
        check_execution(skeleton(job.model), job.worker)
    assert caught.value.code == "MODEL020"
    with pytest.raises(ConfigError, match=error):
        SupervisedTrainer(job)
