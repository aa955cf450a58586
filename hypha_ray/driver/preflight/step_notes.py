"""Notes of a dry run about a worker's step on the machines at hand: its settings and its memory."""

from __future__ import annotations

from collections.abc import Sequence
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
UNKNOWN_GPU = "a GPU"
"""Name of a GPU whose node has no label of its kind."""


def step_notes(case: Case, nodes: Sequence[NodeResources]) -> list[str]:
    """Return notes about the settings that workers will choose, and about the memory of a step with them.

    A GPU whose kind isn't known from the node's labels gets its settings when its worker starts.
    """
    notes: list[str] = []
    for device, groups in _groups_by_device(case.job, nodes).items():
        job = _job_on(case, device)
        if job is None:
            notes.append(f"workers on {device} choose settings that are auto when they start: its kind isn't known")
        elif automatic(case.job) and case.job.rl.algorithm is None:
            notes.append(f"settings of workers on {device}: {_settings_text(job)}")
        estimate = memory_notes(replace(case, job=job or case.job), groups)
        notes += [note for note in estimate if note not in notes]
    return notes


def _groups_by_device(job: Job, nodes: Sequence[NodeResources]) -> dict[str, list[WorkerGroup]]:
    """Return the groups of workers on each kind of device at hand, by its name."""
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
    for node in nodes:
        gpu = _gpu_name(node)
        if node.total.get("GPU") and group.gpu_type in (None, "any", "nvidia", gpu):
            gpus.add(gpu)
    return sorted(gpus) or [UNKNOWN_GPU]


def _gpu_name(node: NodeResources) -> str:
    return node.labels.get(RAY_LABEL) or node.labels.get(OWN_LABEL) or UNKNOWN_GPU


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
    if left_off(case.job, with_capability) is None:
        return None
    return chosen_job(case.job, facts)


def _settings_text(job: Job) -> str:
    """Return settings as text, with the reasons for chosen ones; a reason that all share is written once."""
    pairs = {name: f"{name} {_text(value)}" for name, value in settings_of(job).items()}
    reasons = job.reasons
    if len(reasons) == len(pairs) and len(set(reasons.values())) == 1:
        (reason,) = set(reasons.values())
        return f"{', '.join(pairs.values())} ({reason})"
    for name, reason in reasons.items():
        if name in pairs:
            pairs[name] += f" ({reason})"
    return ", ".join(pairs.values())


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else value
