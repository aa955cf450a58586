"""Notes of a dry run about a worker's step on the machines at hand: its settings and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypha_ray.config import Job
from hypha_ray.config.automatic import DeviceFacts, Value, automatic, chosen_job, left_off, settings_of
from hypha_ray.config.cards import FIRST_WITH_BF16, capability_of
from hypha_ray.config.tables.resources import WorkerGroup
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.driver.preflight.memory import memory_notes
from hypha_ray.market.requirements import OWN_LABEL, RAY_LABEL, NodeResources
from hypha_ray.model.execution import model_facts

CPU = "CPU"
"""Name of the device of workers without a GPU."""


def step_notes(case: Case, nodes: Sequence[NodeResources]) -> list[str]:
    """Return notes about the settings that workers will choose, and about the memory of a step with them.

    A GPU whose kind isn't known from the node's labels gets its settings when its worker starts.
    """
    notes: list[str] = []
    for device, groups in _devices(case.job, nodes).items():
        job = _expected(case, device)
        if job is None:
            notes.append(f"workers on {device} choose settings that are auto when they start: its kind isn't known")
        elif automatic(case.job) and case.job.rl.algorithm is None:
            notes.append(f"settings of workers on {device}: {_settings(job)}")
        estimate = memory_notes(replace(case, job=job or case.job), groups)
        notes += [note for note in estimate if note not in notes]
    return notes


def _devices(job: Job, nodes: Sequence[NodeResources]) -> dict[str, list[WorkerGroup]]:
    """Return the groups of workers on each kind of device at hand, by its name."""
    found: dict[str, list[WorkerGroup]] = {}
    for group in job.worker_groups:
        if not group.bridged:
            for name in _names(job, group, nodes):
                found.setdefault(name, []).append(group)
    return found


def _names(job: Job, group: WorkerGroup, nodes: Sequence[NodeResources]) -> Iterator[str]:
    """Return the kinds of devices that a group's workers may have."""
    if not group.gpu or job.worker.device == "cpu":
        yield CPU
        return
    kinds = {_label(node) for node in nodes if node.total.get("GPU")}
    wanted = {kind for kind in kinds if group.gpu_type in (None, "any", "nvidia", kind)}
    yield from sorted(wanted or {"a GPU"})


def _label(node: NodeResources) -> str:
    return node.labels.get(RAY_LABEL) or node.labels.get(OWN_LABEL) or "a GPU"


def _expected(case: Case, device: str) -> Job | None:
    """Return the job with the settings that a worker on a device will choose; None if that can't be known."""
    if not automatic(case.job):
        return case.job
    facts = DeviceFacts("cpu") if device == CPU else DeviceFacts("cuda", device, capability_of(device), compiles=True)
    if left_off(case.job, facts) is None:
        return chosen_job(case.job, facts, model_facts(case.job, case.network))
    known = replace(facts, capability=facts.capability or FIRST_WITH_BF16)
    return None if left_off(case.job, known) is None else chosen_job(case.job, facts)


def _settings(job: Job) -> str:
    """Return settings as text, with the reasons of those that are chosen; a reason that all have is there once."""
    listed = {name: _text(value) for name, value in settings_of(job).items()}
    reasons = job.reasons
    if len(reasons) == len(listed) and len(set(reasons.values())) == 1:
        pairs = ", ".join(f"{name} {value}" for name, value in listed.items())
        return f"{pairs} ({next(iter(reasons.values()))})"
    why = {name: f" ({reasons[name]})" if name in reasons else "" for name in listed}
    return ", ".join(f"{name} {value}{why[name]}" for name, value in listed.items())


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else value
