"""Models that a user's own function builds, `model.factory`: a function of its options that returns a model.

The model is a `PreTrainedModel` of a class of the user's own, with random weights. Its configuration alone has to build
it again, so that `from_pretrained` of that class loads what a run saves.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from hypha_ray.config.schema import Model
from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.configuration import errors_as
from hypha_ray.plugins import find

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 3
"""Number of tensors that a message names."""


def built_by_factory(model: Model) -> PreTrainedModel:
    """Build a job's model by its factory, on torch's default device.

    Raises:
        ConfigError: PLG002, the factory can't be had; MODEL004, it raises; MODEL026, it returns something else.

    """
    from transformers import PreTrainedModel

    assert model.factory is not None
    factory: Any = find("model_factories", model.factory)
    with errors_as(ConfigError, "MODEL004", f"no model can be built by model.factory {model.factory}"):
        network = factory(dict(model.factory_options or {}))
    if not isinstance(network, PreTrainedModel):
        what = f"model.factory {model.factory} builds no model that from_pretrained could load"
        fix = "derive the model from PreTrainedModel, and its settings from PretrainedConfig"
        raise ConfigError("MODEL026", what, type(network).__name__, "a transformers.PreTrainedModel", fix)
    return network


def check_factory(model: Model, network: PreTrainedModel) -> None:
    """Refuse a model that its configuration alone doesn't build again.

    Args:
        model: table of the job file.
        network: model on torch's meta device.

    Raises:
        ConfigError: MODEL026.

    """
    what = f"model.factory {model.factory}: from_pretrained couldn't load what the run saves"
    with torch.device("meta"), errors_as(ConfigError, "MODEL026", what):
        config = type(network.config).from_dict(json.loads(network.config.to_json_string(use_diff=False)))
        again = type(network)(config)
    shapes = _shapes(network)
    others = _shapes(again)
    different = [name for name in shapes | others if shapes.get(name) != others.get(name)]
    if different:
        got = f"other tensors by its configuration: {', '.join(different[:_SHOWN])}"
        fix = "build all of the model in its constructor, from its configuration alone"
        raise ConfigError("MODEL026", what, got, f"{type(network).__name__}(config) with the same tensors", fix)


def _shapes(network: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
