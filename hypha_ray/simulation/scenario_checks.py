"""Checks of a scenario as a whole: its parts agree, and the simulation knows how to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.keys import KeyPath
from hypha_ray.config.value_types import MACHINES_AT_MOST
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.failures import read_trace
from hypha_ray.simulation.payload_sizes import BYTES_PER_CHUNK, MEAN_BITS, MOST_BITS
from hypha_ray.simulation.scenario import MachineGroup, Scenario

Locate = Callable[[KeyPath], str]
"""Gives a key with its file and line."""


def check_scenario(scenario: Scenario, folder: Path, locate: Locate) -> Scenario:
    """Check a scenario, and give its job the number of workers and samples.

    Args:
        scenario: what the file says.
        folder: folder that files named by the scenario are relative to.
        locate: gives a key with its file and line.

    Raises:
        ConfigError: CFG003 out of range, CFG011 keys that exclude each other or that aren't simulated, CFG012 a key is
            missing.

    """
    _refuse_what_is_not_simulated(scenario.job, locate)
    _check_sites(scenario, locate)
    if scenario.job.rounds.epochs is not None and scenario.model.samples is None:
        problem = f"{locate(('job', 'rounds', 'epochs'))} needs the size of the dataset"
        raise ConfigError("CFG012", problem, fix="give model.samples")
    for number, group in enumerate(scenario.machines):
        _check_group(group, ("machines", str(number)), locate)
    return _with_files(_with_job_of_fleet(scenario, locate), folder)


def with_workers(scenario: Scenario, workers: int) -> Scenario:
    """Scale a scenario to another number of machines; groups keep their shares, by largest remainders.

    `resources.num_workers`, `min_workers` and `sync.quorum` scale alike. So do samples, by `samples_per_worker`.

    Raises:
        ConfigError: CFG003, there are more groups than workers, or too many workers.

    """
    if workers < len(scenario.machines):
        allowed = f"{len(scenario.machines)} or more, one for each group of machines"
        raise ConfigError("CFG003", "workers is out of range", str(workers), allowed, "ask for more workers")
    if workers > MACHINES_AT_MOST:
        allowed = f"up to {MACHINES_AT_MOST}"
        raise ConfigError("CFG003", "workers is out of range", str(workers), allowed, "ask for fewer workers")
    factor = workers / scenario.machine_count
    counts = _scaled([group.count for group in scenario.machines], workers)
    groups = []
    for group, count in zip(scenario.machines, counts, strict=True):
        groups.append(group.model_copy(update={"count": count}))
    resources = scenario.job.resources
    sizes = {"num_workers": _resized(resources.num_workers, factor, workers)}
    if "min_workers" in resources.model_fields_set:
        sizes["min_workers"] = _resized(resources.min_workers, factor, sizes["num_workers"])
    job = scenario.job.model_copy(update={"resources": resources.model_copy(update=sizes)})
    if isinstance(job.sync.quorum, int):
        quorum = _resized(job.sync.quorum, factor, sizes["num_workers"])
        job = job.model_copy(update={"sync": job.sync.model_copy(update={"quorum": quorum})})
    job = _with_samples(job, scenario.samples_per_worker)
    varied = {**scenario.varied, "workers": workers}
    return scenario.model_copy(update={"machines": tuple(groups), "job": job, "varied": varied})


def _resized(number: int, factor: float, most: int) -> int:
    return min(most, max(1, round(factor * number)))


def _scaled(counts: list[int], total: int) -> list[int]:
    """Counts in the same proportions with another total, each at least 1."""
    shares = [total * count / sum(counts) for count in counts]
    scaled = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda index: int(shares[index]) - shares[index])
    for index in by_remainder:
        if sum(scaled) < total:
            scaled[index] += 1
    while sum(scaled) > total:
        scaled[scaled.index(max(scaled))] -= 1
    return scaled


def _refuse_what_is_not_simulated(job: Job, locate: Locate) -> None:
    refusals: list[tuple[bool, KeyPath, str]] = [
        (bool(job.workers), ("workers",), "give [[machines]] instead"),
        (bool(job.bridge.commands), ("bridge", "commands"), "leave it out"),
        (job.rl.algorithm is not None, ("rl", "algorithm"), "leave [job.rl] out: rollouts aren't simulated"),
        (job.run.mode == "replay", ("run", "mode"), 'use "elastic": inner states aren\'t simulated'),
        (job.worker.probe_batch_size, ("worker", "probe_batch_size"), "leave it out: all machines have room"),
    ]
    for refused, path, fix in refusals:
        if refused:
            raise ConfigError("CFG011", f"{locate(('job', *path))} isn't simulated", fix=fix)
    for key, codec in (("codec", job.sync.codec), ("downward_codec", job.sync.downward_codec)):
        known = (*BYTES_PER_CHUNK, *MEAN_BITS, *MOST_BITS)
        if codec not in known:
            problem = f"{locate(('job', 'sync', key))} has no known size"
            allowed = ", ".join(known)
            raise ConfigError("CFG003", problem, codec, allowed, "choose one of them")


def _check_sites(scenario: Scenario, locate: Locate) -> None:
    names = [site.name for site in scenario.sites]
    for number, name in enumerate(names):
        if name in names[:number]:
            problem = f"{locate(('sites', str(number), 'name'))} is the name of another site"
            raise ConfigError("CFG003", problem, repr(name), "a name of its own", "rename one")
    for path, site in _site_references(scenario):
        if site is not None and site not in names:
            matches = get_close_matches(site, names, n=1)
            fix = f"did you mean {matches[0]}?" if matches else "describe it in [[sites]]"
            raise ConfigError("CFG003", f"{locate(path)} names no site", repr(site), ", ".join(names) or "none", fix)


def _site_references(scenario: Scenario) -> Iterator[tuple[KeyPath, str | None]]:
    yield ("head", "site"), scenario.head.site
    for number, group in enumerate(scenario.machines):
        yield ("machines", str(number), "site"), group.site


def _check_group(group: MachineGroup, path: KeyPath, locate: Locate) -> None:
    if group.available is not None and group.diurnal is not None:
        problem = f"{locate((*path, 'available'))} and {locate((*path, 'diurnal'))} exclude each other"
        raise ConfigError("CFG011", problem, fix="keep one of them")
    if group.failures.every_h is not None and not any(group.failures.kinds.weights.values()):
        problem = f"{locate((*path, 'failures', 'kinds'))} is out of range"
        raise ConfigError("CFG003", problem, "no kind", "a weight above 0", "give one, or leave every_h out")


def _with_job_of_fleet(scenario: Scenario, locate: Locate) -> Scenario:
    """Give the job its samples of a round, if they are given for each worker."""
    job = scenario.job
    machines = scenario.machine_count
    if machines > MACHINES_AT_MOST:
        problem = f"{locate(('machines',))} has too many machines"
        raise ConfigError("CFG003", problem, str(machines), f"up to {MACHINES_AT_MOST}", "describe a smaller fleet")
    if job.num_workers > machines:
        problem = f"{locate(('job', 'resources', 'num_workers'))} is out of range"
        fix = "describe more machines, or want fewer workers"
        raise ConfigError("CFG003", problem, str(job.num_workers), f"up to {machines}, the number of machines", fix)
    if scenario.samples_per_worker is not None and "samples_between_updates" in job.rounds.model_fields_set:
        first = locate(("samples_per_worker",))
        second = locate(("job", "rounds", "samples_between_updates"))
        raise ConfigError("CFG011", f"{first} and {second} exclude each other", fix="keep one of them")
    return scenario.model_copy(update={"job": _with_samples(job, scenario.samples_per_worker)})


def _with_samples(job: Job, samples_per_worker: int | None) -> Job:
    if samples_per_worker is None:
        return job
    samples = {"samples_between_updates": samples_per_worker * job.num_workers}
    return job.model_copy(update={"rounds": job.rounds.model_copy(update=samples)})


def _with_files(scenario: Scenario, folder: Path) -> Scenario:
    """Read traces for mistakes, and name their files as seen from the working directory."""
    groups = []
    for group in scenario.machines:
        if group.available is None:
            groups.append(group)
            continue
        path = folder / Path(group.available).expanduser()
        read_trace(path, group.count)
        groups.append(group.model_copy(update={"available": str(path)}))
    return scenario.model_copy(update={"machines": tuple(groups)})
