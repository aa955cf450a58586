"""Tokenizer of a job, which obeys what was decided when the dataset was prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.data.manifest import Manifest
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.model.loading.hub import fetch
from hypha_ray.model.loading.preprocess import load_preprocessor
from hypha_ray.model.loading.tokenizer import end_of, obey, saved_rules
from hypha_ray.model.tasks.table import find_task
from hypha_ray.types import TokenRules

_WRITES = {"causal-lm": False, "seq2seq-lm": True}
"""Tasks whose models write text, and whether it is a translation."""


def job_preprocessor(job: Job, source: DataSource) -> Any | None:
    """Load a job's tokenizer or image processor, with the dataset's decisions about tokens.

    Raises:
        HyphaError: any error of `load_preprocessor`.

    """
    return preprocessor_for(job.preprocessor, job.model, source)


def preprocessor_for(preprocessor: Preprocessor, model: Model, source: DataSource) -> Any | None:
    """Load a tokenizer or image processor, as `load_preprocessor`, with a dataset's decisions about tokens.

    Raises:
        HyphaError: any error of `load_preprocessor`.

    """
    found = load_preprocessor(preprocessor, source.folder, model)
    tokenizer = getattr(found, "tokenizer", found)
    name = find_task(model.type).name
    if name in _WRITES and hasattr(tokenizer, "init_kwargs") and (rules := _rules(model, source, tokenizer)):
        obey(tokenizer, rules, translates=_WRITES[name])
    return found


def is_silent(manifest: Manifest) -> bool:
    """Whether a dataset of tokens, made by an earlier release, tells nothing of their beginnings and ends."""
    made_here = manifest.preprocessor is not None and manifest.modality in ("language", "prompts")
    return made_here and manifest.tokens is None


def inherited(model: Model, source: DataSource) -> TokenRules | None:
    """Return the decisions that came with the weights of a repository, if their tokens are the dataset's."""
    rules = saved_rules(model)
    return rules if rules is not None and source.has_tokens_of(_folder(model)) else None


def _rules(model: Model, source: DataSource, tokenizer: Any) -> TokenRules | None:
    """Return the decisions that hold for a job; None if nothing is known of how its dataset was made."""
    own = source.manifest.tokens
    base = inherited(model, source)
    if own is None and is_silent(source.manifest):
        end = end_of(tokenizer)
        own = TokenRules(ends=() if end is None else (end,))
    if own is None or base is None:
        return own or base
    return replace(own, ends=tuple(dict.fromkeys((*own.ends, *base.ends))))


def _folder(model: Model) -> Path:
    return fetch(str(model.repository), model.revision, model.token.get_secret_value() if model.token else None)
