"""Check of the padding below a decoder that classifies by the last token before it."""

from __future__ import annotations

import inspect
from typing import Any

from hypha_ray.errors import ConfigError
from hypha_ray.model.tasks.task import Task
from hypha_ray.types import Samples


def check_padding(task: Task, network: Any, samples: Samples) -> None:
    """Refuse samples that are padded with another token than the model's, which would classify by padding.

    Raises:
        ConfigError: MODEL018, the model has another token for padding, or none.

    """
    ids = samples.arrays.get("input_ids")
    mask = samples.arrays.get("attention_mask")
    decodes = not network.config.is_encoder_decoder and reads(network, "pad_token_id")
    if task.name != "sequence-classification" or not decodes or ids is None or mask is None or ids.shape != mask.shape:
        return
    token = network.config.get_text_config().pad_token_id
    padding = ids[mask == 0]
    if (wrong := padding[padding != token]).size:
        what = f"{type(network).__name__} classifies by the last token before padding, and takes another for padding"
        fix = f"set pad_token_id = {wrong[0]} in the model's configuration, or prepare the dataset by its tokenizer"
        raise ConfigError("MODEL018", what, f"pad_token_id {token}", f"{wrong[0]}, as in the dataset", fix)


def reads(network: Any, key: str) -> bool:
    """Return whether the model's forward reads a key of its configuration."""
    steps = [getattr(type(network), name, None) for name in ("forward", "_shift_right")]
    return any(key in inspect.getsource(inspect.unwrap(step)) for step in steps if step is not None)
