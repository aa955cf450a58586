"""Note on what Muon takes and what it leaves to AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hypha_ray.config import Job
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.driver.preflight.notes import muon_notes
from tests.support.worker_bench import CONFIG


@pytest.mark.parametrize(("name", "noted"), [("adamw", False), ("muon", True)])
def test_note_counts_the_parameters_of_both_optimizers(name: str, noted: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    job = Job.model_validate({"inner_optimizer": {"name": name}})
    unused: Any = None
    # GPT-2 of one layer and width 16: 12 · 16² in matrices, (50 + 16) · 16 in tables, 15 · 16 in gains and biases.
    note = "muon steps on 3,072 of 4,368 parameters (70.3%), those of matrices"
    rest = "; AdamW on the rest: 1,056 of embeddings and head, 240 of vectors"
    assert muon_notes(Case(job, unused, model, unused, unused)) == ([note + rest] if noted else [])
