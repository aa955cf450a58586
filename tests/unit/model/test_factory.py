"""Models that a user's own function builds: trained, saved, and loaded again by their own class."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.checks import require_complete
from hypha_ray.config.load import load
from hypha_ray.config.schema import Job, Model
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import build_model, check_factory, random_model, skeleton, task_of
from hypha_ray.model.flat import views
from hypha_ray.model.lora import build_trained
from hypha_ray.model.saved_model import export
from hypha_ray.model.tasks import find_task
from hypha_ray.types import Delta
from tests.support.plugins import modules_beside
from tests.support.worker_bench import Bench, plan_of

MODULE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class MixerConfig(PretrainedConfig):
    model_type = "own_mixer"

    def __init__(self, vocab_size=50, hidden_size=16, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**kwargs)


class Mixer(PreTrainedModel):
    config_class = MixerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None):
        states = self.embedding(input_ids).cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return CausalLMOutput(logits=self.head(states))


def mixer(options):
    return Mixer(MixerConfig(**options))


def grown(options):
    network = mixer(options)
    network.more = nn.Linear(2, 2)
    return network


def plain(options):
    return nn.Linear(2, 2)


def raises(options):
    raise KeyError("lost")


def exits(options):
    raise SystemExit(1)
"""
beside = modules_beside(own_models=MODULE)


def model(name: str = "mixer", **options: int) -> Model:
    return Model(factory=f"own_models:{name}", factory_options=options or None)


def test_weights_depend_on_the_seed_and_shapes_on_the_options() -> None:
    first, again, other = (build_model(model(hidden_size=8), seed).state_dict() for seed in (0, 0, 1))
    assert first["head.weight"].equal(again["head.weight"]) and not first["head.weight"].equal(other["head.weight"])
    assert first["head.weight"].shape == (50, 8)
    assert {tensor.device.type for tensor in skeleton(model()).state_dict().values()} == {"meta"}


def test_own_model_is_trained_saved_and_loaded_by_its_own_class(tmp_path: Path) -> None:
    table: dict[str, Any] = {"factory": "own_models:mixer", "factory_options": {"hidden_size": 8}}
    bench = Bench(model=table).run(plan_of(16))
    ids = torch.from_numpy(bench.slice["input_ids"]).long()
    before = build_trained(bench.job)
    network, layout = before, bench.layout
    weights = {"parameters/float32": bench.theta["parameters/float32"] + bench.weights}
    export(Job(model=Model(**table)), None, views(layout, [weights]), tmp_path / "model")

    loaded = sys.modules["own_models"].Mixer.from_pretrained(tmp_path / "model").eval()
    trained = np.concatenate([parameter.detach().numpy().ravel() for parameter in loaded.parameters()])
    assert trained.size == bench.weights.size and np.abs(bench.weights).max() > 0
    assert not loaded(input_ids=ids).logits.equal(network(input_ids=ids).logits)
    assert loaded.head.weight.detach().numpy().tolist() == views(layout, [weights])["head.weight"].tolist()
    assert bench.of(Delta)[0].loss > 0


def test_checks_before_a_start_accept_a_model_of_its_configuration_alone() -> None:
    check_factory(model(hidden_size=8), skeleton(model(hidden_size=8)))
    assert task_of(model(), skeleton(model())).labels == "shifted"
    assert type(random_model(model(), find_task("causal-lm"), None)).__name__ == "Mixer"  # type: ignore[arg-type]


def test_model_with_more_than_its_configuration_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MODEL026.*from_pretrained couldn't load.*more.weight, more.bias"):
        check_factory(model("grown"), skeleton(model("grown")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "MODEL026.*got Linear, allowed a transformers.PreTrainedModel"),
        ("raises", "MODEL004.*own_models:raises.*KeyError: 'lost'"),
        ("exits", "MODEL004.*own_models:exits.*SystemExit: 1"),
        ("nothing", "PLG002.*own_models:nothing can't be loaded"),
    ],
)
def test_factory_that_builds_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        skeleton(model(name))


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.repository", "x"],
        ["--model.config.model_type", "llama"],
        ["--rl.algorithm", "grpo"],
        ["--model.lora.rank", "2"],
    ],
)
def test_settings_that_a_factory_excludes_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"CFG011.*model\.(factory|lora)"):
        load(["--model.factory", "mine:build", "--dataset.path", "x", *flags])


def test_job_with_a_factory_has_a_model() -> None:
    require_complete(load(["--model.factory", "mine:build", "--dataset.path", "x"]).job)
