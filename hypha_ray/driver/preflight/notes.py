"""Notes about a model before a start: tokens decided differently elsewhere, a reference, and Muon's parameters.

A worker's step on the available machines: the settings that it will choose, and its memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.automatic import (
    FIRST_WITH_BF16,
    DeviceFacts,
    Value,
    automatic,
    capability_of,
    chosen_job,
    left_off,
    settings_of,
)
from hypha_ray.config.keys import shown
from hypha_ray.config.resources import WorkerGroup
from hypha_ray.config.schema import Model
from hypha_ray.data.manifest import Manifest
from hypha_ray.driver.data_source import inherited, is_silent, job_preprocessor
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.market.requirements import AMD, OWN_LABEL, RAY_LABEL, NodeResources, group_need
from hypha_ray.members.muon import MATRICES, shares
from hypha_ray.model.execution import model_facts
from hypha_ray.model.sources import commit_of, folder_hash, hub_token
from hypha_ray.model.tokenizers import saved_rules, vocabulary_of
from hypha_ray.plugins import is_built_in
from hypha_ray.types import TokenRules

_WRITE = ("causal-lm", "seq2seq-lm")
"""Tasks whose models write text."""
CPU = "CPU"
"""Name of the device of workers without a GPU."""
UNKNOWN_GPU = "a GPU"
"""Name of a GPU whose node has no label of its kind."""
_RESOURCE = "accelerator_type:"
"""Beginning of the resource by which Ray names a node's GPUs beside its label."""


def token_notes(case: Case) -> Iterator[str]:
    """Yield notes about tokens for the user of a model that writes text."""
    if case.task.name not in _WRITE:
        return
    name = case.manifest.name
    rules = case.manifest.tokens
    if is_silent(case.manifest):
        gap = f"dataset {name!r} is of an earlier release, and doesn't tell which tokens begin its texts and end them"
        yield f"{gap}: none begins them, and the tokenizer's end token ends them; prepare it again to change that"
    preprocessor = job_preprocessor(case.job, case.source)
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    if not hasattr(tokenizer, "get_vocab"):
        return
    yield from _row_notes(tokenizer, case.facts.vocab_size)
    model_rules = inherited(case.job.model, case.source)
    yield from rule_notes(case.manifest, model_rules)
    if rules is not None and _differ(rules.template_sha256, _template_of(tokenizer)):
        yield _other_template_text("the tokenizer of preprocessor.repository has", name)


def notes_of_saved(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a note for each decision in which a dataset's preparation differs from that of a saved model."""
    return rule_notes(manifest, saved_rules(Model(repository=str(folder))))


def rule_notes(manifest: Manifest, model_rules: TokenRules | None) -> Iterator[str]:
    """Yield a note for each decision in which a dataset's preparation differs from that of a model.

    Args:
        manifest: the dataset's manifest; one without decisions has no notes.
        model_rules: decisions of the preparation that the model was trained on; None: they aren't known.

    """
    rules = manifest.tokens
    name = manifest.name
    if rules is None or model_rules is None:
        return
    if model_rules.begin != rules.begin:
        dataset_begin_text = f"texts of dataset {name!r} begin with {_ids(rules.begin)}"
        model_begin_text = f"those that the model was trained on with {_ids(model_rules.begin)}"
        yield f"{dataset_begin_text}, and {model_begin_text}: prepare both with the same tokenizer"
    templates = rules.template_sha256, model_rules.template_sha256
    if _differ(*templates):
        yield _other_template_text("the model was trained with", name)
    elif manifest.modality == "prompts" and None in templates and any(templates):
        dataset_text, model_text = ("chats", "none") if templates[0] else ("plain texts", "chats")
        problem = f"prompts of dataset {name!r} are {dataset_text}, and the model was trained on {model_text}"
        yield f"{problem}: answers may suffer; prepare both with a template, or both without"
    elif all(templates) and rules.system != model_rules.system:
        problem = f"chats of dataset {name!r} were prepared {_system_text(rules)}"
        model_text = f"those that the model was trained on {_system_text(model_rules)}"
        yield f"{problem}, and {model_text}: answers may suffer; give prepare the same --system for both"


def _differ(template_sha256: str | None, other_sha256: str | None) -> bool:
    """Whether there are two templates, and they aren't the same."""
    return template_sha256 is not None and other_sha256 is not None and template_sha256 != other_sha256


def _other_template_text(subject: str, dataset: str) -> str:
    return f"{subject} another chat template than dataset {dataset!r}: answers may suffer; use one for both"


def _system_text(rules: TokenRules) -> str:
    return "without a system message" if rules.system is None else f"with the system message {shown(rules.system)}"


def _row_notes(tokenizer: Any, rows: int | None) -> Iterator[str]:
    """Yield a note about rows of a model that stand for no token."""
    if rows is None:
        return
    vocabulary_size = vocabulary_of(tokenizer).size
    if vocabulary_size is not None and vocabulary_size > rows:
        counts_text = f"the tokenizer has {vocabulary_size:,} tokens, the model {rows:,} rows"
        missing_text = f"the dataset has none of the last {vocabulary_size - rows:,}"
        yield f"{counts_text}: {missing_text}, and prompts that have one will be refused"
        return
    unknown_ids = vocabulary_of(tokenizer).unknown(rows)
    if unknown_ids:
        counts_text = f"the model has {rows:,} rows, the tokenizer {rows - len(unknown_ids):,} tokens"
        yield f"{counts_text}: the other {len(unknown_ids):,} rows stand for nothing, and are never generated"


def _template_of(tokenizer: Any) -> str | None:
    """Return the hash of the template that a tokenizer takes for chats without tools; None without any."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    template = str(tokenizer.get_chat_template(None, None))
    return hashlib.sha256(template.encode()).hexdigest()


def _ids(begin: tuple[int, ...]) -> str:
    if not begin:
        return "no special token"
    return f"token {' '.join(map(str, begin))}"


def preference_notes(job: Job, manifest: Manifest) -> Iterator[str]:
    """Yield notes about what a dataset of preferences has and the loss leaves aside, and about its reference."""
    preference = job.preference
    loss = preference.loss
    if loss is None:
        return
    if "margins" in manifest.shapes and loss != "dpo" and is_built_in("preference_losses", loss):
        yield f"margins of dataset {manifest.name!r} have no effect on preference.loss = {loss!r}, only on dpo"
    has_reference = "reference_logprobs" in manifest.shapes
    if has_reference and preference.uses_reference and preference.reference != "dataset":
        yield (
            f"log-probabilities of a reference in dataset {manifest.name!r} have no effect beside "
            f'preference.reference = {preference.reference!r}: "dataset" takes them'
        )
    yield from reference_notes(job, manifest)


def reference_notes(job: Job, manifest: Manifest) -> Iterator[str]:
    """Yield a note if another model than the initial one has computed a dataset's log-probabilities."""
    preference = job.preference
    made_by = manifest.made_by
    if not preference.uses_reference or preference.reference != "dataset" or made_by is None:
        return
    reference = str(made_by.options.get("reference"))
    sha256 = made_by.options.get("reference_sha256")
    commit = made_by.options.get("reference_commit")
    start = job.model.repository
    has_name = start is not None and Path(start).absolute() == Path(reference).absolute()
    is_reference = has_name
    if start is not None and Path(start).expanduser().is_dir():
        if sha256 is not None:
            is_reference = folder_hash(Path(start).expanduser()) == sha256
    elif start is not None and commit is not None:
        is_reference = commit_of(start, job.model.revision, hub_token(job.model)) == commit
    if not is_reference:
        model = "random weights" if start is None else start
        if has_name:
            model = "what has been changed there since" if commit is None else "another commit of it"
        yield (
            f"the reference of dataset {manifest.name!r} is {reference}, and training begins with {model}: if they "
            "differ, rewards aren't 0 before the first step, and the policy is held to a model that it never was"
        )


def muon_notes(case: Case) -> list[str]:
    """Return a note with the numbers of parameters of both optimizers; none under another inner optimizer."""
    if case.job.inner_optimizer.name != "muon":
        return []
    counts = shares(case.network)
    total = sum(counts.values())
    matrices = counts.pop(MATRICES, 0)
    share = matrices / max(1, total)
    note = f"muon steps on {matrices:,} of {total:,} parameters ({share:.1%}), those of matrices"
    if counts:
        adamw_text = ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())
        note += f"; AdamW on the rest: {adamw_text}"
    return [note]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Texts about a step of workers, one for each available kind of device."""

    settings: list[str] = field(default_factory=list)
    """Settings that are ``auto`` in the job file, as workers will choose them."""
    memory: list[str] = field(default_factory=list)
    """Memory that a step takes, as far as it can be estimated."""
    warnings: list[str] = field(default_factory=list)
    """Steps that take more memory than workers reserve."""


def step_notes(case: Case, nodes: Sequence[NodeResources]) -> StepReport:
    """Describe the settings that workers will choose, and the memory of a step with them.

    A GPU whose kind isn't known from the node's labels gets its settings when its worker starts.

    Args:
        case: job, dataset and model.
        nodes: nodes of the cluster.

    """
    from hypha_ray.driver.preflight.memory import memory_notes

    notes = StepReport()
    for device, groups in _groups_by_device(case.job, nodes).items():
        job = _job_on(case, device)
        if job is None:
            notes.settings.append(f"workers on {device} choose theirs when they start: its kind isn't known")
        elif automatic(case.job) and case.job.rl.algorithm is None:
            notes.settings.append(f"on {device}: {_settings_text(job)}")
        sizes, warnings = memory_notes(replace(case, job=job or case.job), groups)
        _add_new(notes.memory, sizes)
        _add_new(notes.warnings, warnings)
    return notes


def _add_new(texts: list[str], added: Iterable[str]) -> None:
    """Add the texts that aren't there yet."""
    for text in added:
        if text not in texts:
            texts.append(text)


def _groups_by_device(job: Job, nodes: Sequence[NodeResources]) -> dict[str, list[WorkerGroup]]:
    """Return the groups of workers on each available kind of device, by its name."""
    groups: dict[str, list[WorkerGroup]] = {}
    for group in job.worker_groups:
        if not group.bridged:
            for device in _devices_of(job, group, nodes):
                groups.setdefault(device, []).append(group)
    return groups


def _devices_of(job: Job, group: WorkerGroup, nodes: Sequence[NodeResources]) -> list[str]:
    """Return the kinds of devices that a group's workers may have."""
    if not group.gpu or job.worker.device == "cpu":
        return [CPU]
    gpus: set[str] = set()
    for node, is_admitted in zip(nodes, group_need(group).admits(nodes), strict=True):
        if is_admitted and node.total.get("GPU"):
            gpus.add(gpu_name(node))
    return sorted(gpus) or [UNKNOWN_GPU]


def gpu_name(node: NodeResources) -> str:
    """Return the name of a node's GPUs by Ray's label, by the resource of that name, or by the owner's label."""
    of_resources = [name.removeprefix(_RESOURCE) for name in node.total if name.startswith(_RESOURCE)]
    names = [node.labels.get(RAY_LABEL), *of_resources, node.labels.get(OWN_LABEL)]
    return next(filter(None, names), UNKNOWN_GPU)


def _job_on(case: Case, device: str) -> Job | None:
    """Return the job with the settings that a worker on a device will choose; None if they can't be known."""
    if not automatic(case.job):
        return case.job
    facts = DeviceFacts("cpu")
    if device != CPU:
        facts = DeviceFacts("cuda", device, capability_of(device), compiles=True)
    if left_off(case.job, facts) is None:
        return chosen_job(case.job, facts, model_facts(case.job, case.network))
    with_capability = replace(facts, capability=facts.capability or FIRST_WITH_BF16)
    is_known = facts.capability is not None or device.startswith(AMD)
    if not is_known and left_off(case.job, with_capability) is None:
        return None
    return chosen_job(case.job, facts)


def _settings_text(job: Job) -> str:
    """Return settings as text, with the reasons for chosen ones; a reason that all share is written once."""
    setting_texts = {name: f"{name} {_text(value)}" for name, value in settings_of(job).items()}
    reasons = job.reasons
    if len(reasons) == len(setting_texts) and len(set(reasons.values())) == 1:
        (reason,) = set(reasons.values())
        return f"{', '.join(setting_texts.values())} ({reason})"
    for name, reason in reasons.items():
        if name in setting_texts:
            setting_texts[name] += f" ({reason})"
    return ", ".join(setting_texts.values())


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else value
