"""Frozen weights of 4 or 8 bits below an adapter, by bitsandbytes (QLoRA, arXiv 2305.14314; LLM.int8, 2208.07339)."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hypha_ray.config.schema import Model
from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.weights import weight_files


def check_quantization() -> None:
    """Refuse quantized weights on a machine without bitsandbytes.

    Raises:
        ConfigError: MODEL008.

    """
    if importlib.util.find_spec("bitsandbytes") is None:
        problem = "model.quantization needs bitsandbytes"
        fix = "pip install 'hypha_ray[quantized]' on each machine, or leave it out"
        raise ConfigError("MODEL008", problem, "it isn't installed", fix=fix)


def loading_options(model: Model, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return options of `from_pretrained` for a job's quantized weights; none if they aren't quantized.

    Args:
        model: table of the job file.
        dtype: dtype of weights that aren't quantized, and of matrices as they are multiplied.
        device: device that the weights will be used on. They are quantized there: int8 of a CPU can't be moved.

    Raises:
        ConfigError: MODEL008, the package is missing.

    """
    if model.quantization is None:
        return {}
    check_quantization()
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # It warns in each step of int8 that it casts its input.
    if model.quantization == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return {"quantization_config": config, "device_map": {"": str(device)}}


def fingerprint(model: Model, folder: Path) -> str:
    """Return the SHA-256 of a repository's weights as they are in its files, and of their form.

    The last bits of quantized weights may depend on the device that has quantized them.
    """
    form = repr(model.quantization)
    sha256 = hashlib.sha256(form.encode())
    file_of = dict[str, Path]()
    for file in weight_files(folder, str(model.repository)):
        with safe_open(file, "pt") as content:
            file_of |= dict.fromkeys(content.keys(), file)
    for name, file in sorted(file_of.items()):
        with safe_open(file, "pt") as content:
            tensor = content.get_tensor(name)
        description = repr((name, str(tensor.dtype), tuple(tensor.shape)))
        sha256.update(description.encode())
        values = tensor.contiguous().flatten()
        sha256.update(values.view(torch.uint8).numpy().data)
    return sha256.hexdigest()
