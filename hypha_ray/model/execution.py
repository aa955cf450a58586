"""Ways in which a worker computes its model: implementation of attention, known masks, activations computed twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hypha_ray.config.tables.resources import Worker
from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.configuration import errors_as

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_execution(network: PreTrainedModel, worker: Worker) -> None:
    """Refuse settings that the model's class doesn't know; packages of the workers' machines aren't looked for.

    Raises:
        ConfigError: MODEL020.

    """
    name = type(network).__name__
    if worker.gradient_checkpointing and not network.supports_gradient_checkpointing:
        what = f"worker.gradient_checkpointing: {name} can't compute its activations again"
        raise ConfigError("MODEL020", what, fix="leave it out, and set rounds.accumulation to save memory")
    known = {
        "sdpa": network._supports_sdpa,
        "flex_attention": network._supports_flex_attn,
        "flash_attention_2": network._supports_flash_attn,
        "flash_attention_3": network._supports_flash_attn,
    }
    if not known.get(worker.attention, True):
        allowed = ", ".join(["eager", *(one for one, supported in known.items() if supported)])
        what = f"worker.attention: {name} lacks this implementation"
        raise ConfigError("MODEL020", what, str(worker.attention), allowed)


def set_execution(network: PreTrainedModel, worker: Worker) -> None:
    """Set up a model as a worker is to compute it.

    Raises:
        ConfigError: MODEL020, the model doesn't know a setting, or MODEL008, a package is missing on this machine.

    """
    check_execution(network, worker)
    if worker.attention not in ("auto", "none"):
        with errors_as(ConfigError, "MODEL020", f"worker.attention = {worker.attention!r} can't be used"):
            network.set_attn_implementation(worker.attention)
    if worker.gradient_checkpointing:
        network.activation_checkpointing_enable()


@contextmanager
def known_mask(inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which transformers is told whether a decoder's attention mask hides anything.

    Otherwise it asks the device in each forward pass, which waits for all that the device has to do before. Masks of
    other shapes are asked as always, and so are all of them in a version of transformers that asks in another way.

    Args:
        inputs: keyword arguments of the model, on the CPU.

    """
    from transformers import masking_utils

    module: Any = masking_utils
    mask = inputs.get("attention_mask")
    ask = getattr(module, "fast_all", None)
    if mask is None or mask.ndim != 2 or ask is None:
        yield
        return
    shape = mask.shape
    shows_all = bool(mask.all())
    module.fast_all = lambda tensor: shows_all if tensor.shape == shape else ask(tensor)
    try:
        yield
    finally:
        module.fast_all = ask
