"""Operations of a worker's training, and those that its lease could do: their quotient is the utilisation (MFU)."""

from __future__ import annotations

from typing import Any, Final

import torch

from hypha_ray.config import Job
from hypha_ray.config.cards import find_card
from hypha_ray.config.tables.resources import WorkerGroup
from hypha_ray.model.lora import has_adapter
from hypha_ray.model.settings import is_routed
from hypha_ray.model.tasks.table import find_task

_COUNTED: Final = ("causal-lm", "masked-lm", "sequence-classification", "token-classification")
"""Tasks of models that all tokens go through, and all parameters with each of them."""


def token_operations(job: Job, model: Any, parameters: int) -> float | None:
    """Return the operations of training on a token: 6 for each parameter (arXiv 2204.02311, appendix B).

    Embeddings count. Attention doesn't, and neither does what is computed twice to save memory.

    Args:
        job: the job file.
        model: model of transformers.
        parameters: number of its parameters.

    Returns:
        None for adapters, whose frozen weights have no gradients, and for models with experts, of which a token takes
        some. None for encoders with decoders, too, and for other tasks than those of texts.

    """
    if job.rl.algorithm is not None or find_task(job.model.type).name not in _COUNTED or has_adapter(job.model):
        return None
    config = model.config
    if job.model.input_names is not None or config.is_encoder_decoder or is_routed(config.get_text_config()):
        return None
    return 6.0 * parameters


def peak_operations(group: WorkerGroup, device: torch.device) -> float | None:
    """Return the dense operations of 16 bits in a second that a worker's GPUs, or its part of one, are made for.

    Returns:
        None without a GPU, and for a card that isn't listed in `config.cards`.

    """
    if device.type != "cuda":
        return None
    card = find_card(torch.cuda.get_device_name(device))
    return None if card is None or not group.gpu else card.tflops * 1e12 * group.gpu
