"""The environment of every test and of the processes that it starts, set before anything reads it."""

from __future__ import annotations

import os

os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MPLBACKEND="Agg",
)
