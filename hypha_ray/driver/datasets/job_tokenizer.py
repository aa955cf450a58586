"""Tokenizer of a job, with the decisions about tokens that were made when the dataset was prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.data.manifest import Manifest
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.model.loading.hub import fetch, hub_token
from hypha_ray.model.loading.preprocess import load_preprocessor
from hypha_ray.model.loading.tokenizer import apply_rules, end_token, saved_rules
from hypha_ray.model.tasks import find_task
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
    loaded = load_preprocessor(preprocessor, source.folder, model)
    tokenizer = getattr(loaded, "tokenizer", loaded)
    task_name = find_task(model.type).name
    if task_name in _WRITES and hasattr(tokenizer, "init_kwargs"):
        rules = _rules(model, source, tokenizer)
        if rules:
            apply_rules(tokenizer, rules, translates=_WRITES[task_name])
    return loaded


def is_silent(manifest: Manifest) -> bool:
    """Whether a dataset of tokens has no record of their beginnings and ends, because an earlier release made it."""
    is_prepared_text = manifest.preprocessor is not None and manifest.modality in ("language", "prompts", "preferences")
    return is_prepared_text and manifest.tokens is None


def inherited(model: Model, source: DataSource) -> TokenRules | None:
    """Return the decisions that came with the weights of a repository, if their tokens are the dataset's."""
    rules = saved_rules(model)
    if rules is None or not source.has_tokens_of(_folder(model)):
        return None
    return rules


def _rules(model: Model, source: DataSource, tokenizer: Any) -> TokenRules | None:
    """Return the decisions that hold for a job; None if those of its dataset aren't known."""
    dataset_rules = source.manifest.tokens
    model_rules = inherited(model, source)
    if dataset_rules is None and is_silent(source.manifest):
        end = end_token(tokenizer)
        dataset_rules = TokenRules(ends=() if end is None else (end,))
    if dataset_rules is None or model_rules is None:
        return dataset_rules or model_rules
    ends = dict.fromkeys((*dataset_rules.ends, *model_rules.ends))
    return replace(dataset_rules, ends=tuple(ends))


def _folder(model: Model) -> Path:
    return fetch(str(model.repository), model.revision, hub_token(model))
