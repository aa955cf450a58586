"""Variables that programs of other environments are started with: trainers, and servers that generate."""

from __future__ import annotations

import re
from collections.abc import Mapping

_HANDED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|XDG_RUNTIME_DIR|DOCKER_HOST"
    r"|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|NODE_PATH|SSL_CERT_(FILE|DIR)"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|OMP_(PLACES|PROC_BIND|WAIT_POLICY)|MKL_THREADING_LAYER"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|HOME|PATH|LAUNCH_BLOCKING)|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)"
    r"|(HIP|ROCR)_VISIBLE_DEVICES|PYTORCH_CUDA_ALLOC_CONF|HF_HOME|HF_HUB_(CACHE|OFFLINE)|TRANSFORMERS_OFFLINE"
)
"""Names of variables that a program gets of a worker's; see docs/bridge.md."""


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a program gets of a worker's: any other one may hold a secret."""
    return {name: value for name, value in environment.items() if _HANDED_ON.fullmatch(name)}
