"""Options of ``simulate``: settings that a run is imagined with, fleets of another size, and those of ``--advise``.

Settings of machines, links and head are keys of a scenario, such as ``machines.up_mbps=50``. A key without a number
is meant for all machines or sites; ``machines.0.up_mbps`` is for the first group.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from hypha_ray.config import Job
from hypha_ray.config.keys import choice_remedy, key_of, shown, tables
from hypha_ray.config.options import parse_options
from hypha_ray.config.value_types import MACHINES_AT_MOST, Table, seconds_of, table_of
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.exchange import (
    WEIGHT_BYTES,
    Circumstances,
    ModelShape,
    parse_latency,
    parse_link,
    rate_text,
)
from hypha_ray.simulation.links import require_short
from hypha_ray.simulation.scenario import Scenario

SCENARIO_TABLES: Final = ("machines", "sites", "head")
"""Tables of a scenario that a trial may set; no table of a job file has these names."""
_NEXT_KEY: Final = re.compile(r",(?=\s*[A-Za-z_][\w.-]*\s*=)")
"""Comma before the next KEY=VALUE; other commas belong to a list."""
S = TypeVar("S", bound=Scenario)
ASSUMED_BATCH_S = 1.0
"""Seconds of a batch if nothing says how long it takes."""
MOST_PARAMETERS = 1e13
"""Parameters of the largest model that is advised on."""
SWITCHES = ("advise", "help", "h")
"""Options without a value."""
LISTS = ("batch_s",)
"""Options with several values."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings in the place of a run's own, as texts by dotted key."""

    text: str
    """The settings as they were written."""
    job: tuple[tuple[str, str], ...] = ()
    """Keys of the job file."""
    scenario: tuple[tuple[str, str], ...] = ()
    """Keys of a scenario's machines, sites and head."""

    @property
    def flags(self) -> list[str]:
        """The settings of the job file as flags of a job's command line."""
        return [f"--{key}={value}" for key, value in self.job]


def parse_trial(text: str) -> Trial:
    """Parse ``KEY=VALUE[,KEY=VALUE…]``.

    Raises:
        ConfigError: CFG015 a part isn't KEY=VALUE, CFG005 a key is given twice.

    """
    settings: dict[str, str] = {}
    for part in _NEXT_KEY.split(text):
        key, equals_sign, value = part.partition("=")
        key = key.strip()
        if value.rstrip().endswith(","):
            equals_sign = ""  # Nothing stands behind the last comma.
        if not key or not equals_sign or not value.strip():
            example = "write a key of the job file, = and a value, such as sync.codec=int4"
            raise ConfigError("CFG015", "--try needs settings", shown(text), "KEY=VALUE[,KEY=VALUE…]", example)
        if key in settings:
            raise ConfigError("CFG005", f"--try has {shown(key)} twice", shown(text), fix="keep one of them")
        settings[key] = value.strip()
    job: list[tuple[str, str]] = []
    scenario: list[tuple[str, str]] = []
    for key, value in settings.items():
        table, _, _ = key.partition(".")
        (scenario if table in SCENARIO_TABLES else job).append((key, value))
    return Trial(text, tuple(job), tuple(scenario))


def parse_trials(texts: Sequence[str]) -> list[Trial]:
    """Parse the values of all ``--try`` of a command line, see `parse_trial`."""
    return [parse_trial(text) for text in texts]


def parse_duration_s(text: str) -> float:
    """Parse a time such as ``6h``, ``90min``, ``2d`` or ``45`` (seconds).

    Raises:
        ConfigError: CFG003, it isn't one, or it is 0.

    """
    seconds = seconds_of(text)
    if seconds is None:
        fix = "give a number and a unit, such as 6h"
        raise ConfigError("CFG003", "--deadline is out of range", shown(text), "a time in s, min, h or d", fix)
    return seconds


def with_scenario_keys(scenario: S, settings: Sequence[tuple[str, str]]) -> S:
    """Set keys of machines, sites or head.

    Args:
        scenario: the scenario.
        settings: dotted keys and texts of their values.

    Raises:
        ConfigError: CFG001 unknown key, CFG002 wrong type, CFG003 out of range or no such group.

    """
    for key, text in settings:
        table, *path = key.split(".")
        value = _parsed(text)
        current_table = getattr(scenario, table)
        if isinstance(current_table, Table):
            changed: Any = _with(current_table, key, path, value)
        else:
            chosen_indices, rest_path = _chosen(len(current_table), key, path)
            entries = list(current_table)
            for index in chosen_indices:
                entries[index] = _with(entries[index], key, rest_path, value)
            changed = tuple(entries)
        scenario = scenario.model_copy(update={table: changed})
    return scenario


def with_samples(job: Job, samples_per_worker: int | None) -> Job:
    """A job with these samples of a round for each worker; None: its own."""
    if samples_per_worker is None:
        return job
    samples = {"samples_between_updates": samples_per_worker * job.num_workers}
    return job.model_copy(update={"rounds": job.rounds.model_copy(update=samples)})


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
    counts = scaled([group.count for group in scenario.machines], workers)
    groups = []
    for group, count in zip(scenario.machines, counts, strict=True):
        groups.append(group.model_copy(update={"count": count}))
    resources = scenario.job.resources
    sizes = {"num_workers": resized(resources.num_workers, factor, workers)}
    if "min_workers" in resources.model_fields_set:
        sizes["min_workers"] = resized(resources.min_workers, factor, sizes["num_workers"])
    job = scenario.job.model_copy(update={"resources": resources.model_copy(update=sizes)})
    if isinstance(job.sync.quorum, int):
        quorum = resized(job.sync.quorum, factor, sizes["num_workers"])
        job = job.model_copy(update={"sync": job.sync.model_copy(update={"quorum": quorum})})
    job = with_samples(job, scenario.samples_per_worker)
    varied_settings = {**scenario.varied, "workers": workers}
    return scenario.model_copy(update={"machines": tuple(groups), "job": job, "varied": varied_settings})


def resized(count: int, factor: float, most_count: int) -> int:
    """A number times a factor, rounded, from 1 up to the most."""
    return min(most_count, max(1, round(factor * count)))


def scaled(counts: list[int], total: int) -> list[int]:
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


def _parsed(text: str) -> Any:
    """A value of TOML; any other text is itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _chosen(count: int, key: str, path: Sequence[str]) -> tuple[range, Sequence[str]]:
    """Indices of the entries that a key is meant for, and the rest of its path."""
    if not path or not path[0].isdecimal():
        return range(count), path
    index = int(path[0])
    if index >= count:
        raise ConfigError("CFG003", f"there is no {key}", path[0], f"0 … {count - 1}", "count from 0")
    return range(index, index + 1), path[1:]


def _with(table: Table, key: str, path: Sequence[str], value: Any) -> Table:
    """A table with another value at a path.

    Raises:
        ConfigError: CFG001 unknown key, CFG002 wrong type, CFG003 out of range.

    """
    content = table.model_dump(exclude_none=True)
    parent = content
    kind = type(table)
    for name in path[:-1]:
        _require_key(kind, key, name)
        inner = table_of(kind, name)
        if inner is None:
            raise ConfigError("CFG001", f"unknown key {key}", fix=f"{name} has no keys of its own")
        kind = inner
        parent = parent.setdefault(name, {})
    if not path:
        raise ConfigError("CFG001", f"{key} is a table", allowed=_keys_of(kind), fix="name one of its keys")
    _require_key(kind, key, path[-1])
    inner = table_of(kind, path[-1])
    if inner is not None:
        raise ConfigError("CFG001", f"{key} is a table", allowed=_keys_of(inner), fix="name a key")
    parent[path[-1]] = value
    try:
        return type(table).model_validate(content)
    except ValidationError as error:
        raise _explained(error, type(table), key, path) from None


def _require_key(table: type[Table], key: str, name: str) -> None:
    names = table.model_fields
    if name in names:
        return
    matches = get_close_matches(name, names, n=1)
    if matches:
        raise ConfigError("CFG001", f"unknown key {key}", shown(name), fix=f"did you mean {matches[0]}?")
    raise ConfigError("CFG001", f"unknown key {key}", shown(name), _keys_of(table), "name one of these")


def _keys_of(table: type[Table]) -> str:
    return ", ".join(table.model_fields)


def _explained(error: ValidationError, table: type[Table], key: str, path: Sequence[str]) -> ConfigError:
    """The first error that pydantic reports of a table in which a key at a path was set."""
    first_error = error.errors(include_url=False)[0]
    for name in path[:-1]:
        table = table_of(table, name) or table
    if first_error["type"] == "missing":
        name = str(first_error["loc"][-1])
        missing = key.removesuffix(path[-1]) + name
        meaning = table.model_fields[name].description
        return ConfigError("CFG012", f"{key} needs {missing}", fix=f"give the {meaning}")
    got = shown(first_error["input"])
    allowed = key_of((path[-1],), table.model_fields[path[-1]]).kind
    fix = choice_remedy(first_error["input"], allowed)
    if first_error["type"].endswith("_type"):
        return ConfigError("CFG002", f"{key} has the wrong type", got, allowed, fix)
    return ConfigError("CFG003", f"{key} is out of range", got, allowed, fix)


@dataclass(frozen=True)
class Advise:
    """Propose settings of an exchange for a job, a fleet and its links."""

    link: str
    """rate of each worker's link, such as 100mbit, 1gbit, or 50mbit/5mbit for down/up"""
    advise: bool = True
    """propose settings for the job file, as TOML that goes behind it"""
    latency: str = "0ms"
    """time of a message one way, half of what ping shows, such as 20ms"""
    head_link: str | None = None
    """rate of the link of the machine with scheduler and parameter servers; default: as --link"""
    batch_s: list[float] = field(default_factory=list)
    """seconds of a batch of rounds.max_batch_size: of all workers, of each group of them, or of each worker"""
    from_: str | None = None
    """run of the same model whose workers' times of a batch are taken, in place of --batch-s"""
    parameters: float | None = None
    """number of trained parameters, such as 1.1e9; default: counted from the job's model"""
    fails_every_h: float | None = None
    """mean hours between two failures of a machine; default: the fleet is reliable"""
    overhead: float = 0.1
    """part of the time that workers may wait for exchanges"""
    seed: int = 0
    """seed of the simulated runs"""
    out: Path | None = None
    """file for the proposed settings; default: standard output, with the report as comments"""
    json: Path | None = None
    """file for the figures of the simulated runs, as JSON; -: standard output"""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into these options and what belongs to the job file.

    Raises:
        ConfigError: CFG001, a flag is neither, but resembles one of these options.

    """
    names = [option.name.rstrip("_") for option in fields(Advise)]
    of_advice: list[str] = []
    of_job: list[str] = []
    values_left = 0
    """Number of following words that may be values of one of these options."""
    for word in arguments:
        flag, has_value, _ = word.partition("=")
        is_value = values_left > 0 and not word.startswith("--")  # For instance -5ms, or - for standard output.
        if word.startswith("-") and word != "-" and not is_value:
            name = flag.lstrip("-").replace("-", "_")
            _refuse_resembling(name, names)
            is_own = name in (*names, "help", "h")
            values_left = 0
            if is_own and not has_value and name not in SWITCHES:
                values_left = len(arguments) if name in LISTS else 1
        elif word.startswith("@"):
            is_own = False
            values_left = 0
        else:
            is_own = values_left > 0
            values_left -= 1
        target = of_advice if is_own else of_job
        target.append(word)
    return of_advice, of_job


def _refuse_resembling(name: str, names: Sequence[str]) -> None:
    """Refuse a flag without a table that is nearly one of these options."""
    if "." in name or name in names or (name,) in tables():
        return
    matches = get_close_matches(name, names, n=1)
    if matches and name != "help":
        flag = matches[0].replace("_", "-")
        raise ConfigError("CFG001", f"unknown flag --{name.replace('_', '-')}", fix=f"did you mean --{flag}?")


def parse_advise(arguments: Sequence[str], doc: str | None) -> Advise:
    """Parse these options, and refuse numbers that are out of range.

    Raises:
        ConfigError: as `parse_options`; CFG003, out of range.

    """
    options = parse_options(Advise, doc, arguments)
    ranges = {
        "--overhead": (options.overhead, 0.001, 0.9),
        "--parameters": (options.parameters, 1, MOST_PARAMETERS),
        "--fails-every-h": (options.fails_every_h, 0.01, 1e6),
        "--seed": (options.seed, 0, 2**63 - 1),
    }
    for batch_s in options.batch_s:
        ranges["--batch-s"] = (batch_s, 1e-6, 1e6)
        _require_ranges(ranges)
    _require_ranges(ranges)
    if options.from_ is not None and options.batch_s:
        raise ConfigError("CFG011", "--from and --batch-s exclude each other", fix="leave one out")
    return options


def _require_ranges(ranges: dict[str, tuple[float | None, float, float]]) -> None:
    for flag, (value, least, most) in ranges.items():
        if value is not None and not least <= value <= most:
            allowed = f"{least:g} to {most:g}"
            raise ConfigError("CFG003", f"{flag} is out of range", f"{value:g}", allowed, "give a number in between")


def circumstances_of(options: Advise, job: Job, model: ModelShape) -> Circumstances:
    """Put model, fleet and links together.

    Raises:
        ConfigError: CFG003, CFG015, a rate, a time or the number of times is wrong.

    """
    latency_s = parse_latency(options.latency, "--latency")
    link = parse_link(options.link, "--link", latency_s)
    head = link
    if options.head_link is not None:
        head = parse_link(options.head_link, "--head-link", latency_s)
    reserved = int(job.resources.parameter_server.cpu)
    return Circumstances(
        model=model,
        batch_s=batch_times(options.batch_s or [ASSUMED_BATCH_S], job),
        link=link,
        head=head,
        fails_every_h=options.fails_every_h,
        server_threads=max(4, reserved),
    )


def require_fast(circumstances: Circumstances) -> None:
    """Refuse links that are too slow for the model.

    Raises:
        ConfigError: CFG003, its weights would take longer than any round may.

    """
    size_bytes = WEIGHT_BYTES * circumstances.model.parameters
    for flag, link in (("--link", circumstances.link), ("--head-link", circumstances.head)):
        for mbps in (link.up_mbps, link.down_mbps):
            require_short(flag, rate_text(mbps), "a model", size_bytes, mbps * 1e6 / 8)


def batch_times(times_s: Sequence[float], job: Job) -> tuple[float, ...]:
    """Seconds of a batch of each worker.

    Raises:
        ConfigError: CFG003, there is another number of them than of groups or of workers.

    """
    if len(times_s) == 1:
        return (times_s[0],) * job.num_workers
    groups = job.worker_groups
    if len(times_s) == len(groups):
        times: list[float] = []
        for batch_s, group in zip(times_s, groups, strict=True):
            times += [batch_s] * group.count
        return tuple(times)
    if len(times_s) == job.num_workers:
        return tuple(times_s)
    numbers = sorted({1, len(groups), job.num_workers})
    allowed = " or ".join(map(str, numbers))
    raise ConfigError("CFG003", "--batch-s has a wrong number of times", str(len(times_s)), allowed, "give one for all")
