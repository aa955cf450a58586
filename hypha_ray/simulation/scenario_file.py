"""Scenario files: TOML tables of a `Scenario`, with a sweep over lists of values; and checks of a scenario as a whole.

    [sweep]
    "job.sync.codec" = ["fp32", "int4"]        # a run for each combination of the listed values
    "machines.0.up_mbps, machines.0.down_mbps" = [100, 1000]    # both keys have the same value

A scenario that ships with the package is read by its name.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from hypha_ray.config import Job
from hypha_ray.config.document import Document, read
from hypha_ray.config.keys import KeyPath, choice_remedy, dotted, key_of, shown
from hypha_ray.config.load import from_read_document
from hypha_ray.config.no_effect import UNTOLD, WITHOUT_EFFECT, is_below
from hypha_ray.config.value_types import MACHINES_AT_MOST, Table, table_of
from hypha_ray.errors import ConfigError
from hypha_ray.plugins import attempt, is_own, look_beside_the_job
from hypha_ray.simulation.exchange import BYTES_PER_CHUNK, MEAN_BITS, MOST_BITS, has_known_size
from hypha_ray.simulation.failures import with_traces
from hypha_ray.simulation.links import require_fast_links
from hypha_ray.simulation.options import with_samples, with_workers
from hypha_ray.simulation.scenario import MachineGroup, Scenario

FOLDER: Final = Path(__file__).with_name("scenarios")
"""Folder of the scenarios that ship with the package."""
SHORTCUTS: Final[Mapping[str, KeyPath]] = {"rounds": ("job", "rounds", "update_rounds"), "seed": ("seed",)}
"""Keys of overrides with a short name; `workers` is one more, which scales all groups of machines."""
SLICES_AT_MOST: Final = 2_000_000
"""Most slices of a dataset, whose account takes a gigabyte."""
S = TypeVar("S", bound=Scenario)
Locate = Callable[[KeyPath], str]
"""Gives a key with its file and line."""


def scenario_names() -> list[str]:
    """Names of the scenarios that ship with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def read_scenarios(path_or_name: str, overrides: Mapping[str, Any] | None = None) -> list[Scenario]:
    """Read a scenario file, or a scenario that ships with the package, as one scenario for each point of its sweep.

    Args:
        path_or_name: file, or name of a scenario of the package.
        overrides: values by dotted key, such as `job.sync.codec` or `machines.0.up_mbps`, and `workers`, `rounds` and
            `seed`; they win over the file and its sweep.

    Raises:
        ConfigError: with the file, line and key to correct.

    """
    document = read(str(_file(path_or_name)))
    overrides = dict(overrides or {})
    workers = overrides.pop("workers", None)
    overridden = {SHORTCUTS.get(name, tuple(name.split("."))): value for name, value in overrides.items()}
    scenarios: list[Scenario] = []
    varied: list[dict[str, Any]] = []
    for point in _sweep_points(document):
        settings = _Settings(document, point, overridden)
        if settings.varied in varied:
            continue  # The caller has set what these points differ in.
        varied.append(settings.varied)
        scenario = _build(settings)
        if workers is not None:
            scenario = with_workers(scenario, workers)
        _require_room(scenario, settings.key_location)
        scenarios.append(scenario)
    return scenarios


def _require_room(scenario: Scenario, locate: Locate) -> None:
    """Refuse more slices than memory has room for."""
    slices = scenario.model.slice_count(scenario.needed_samples)
    if slices > SLICES_AT_MOST:
        problem = f"{locate(('model', 'slice_samples'))} makes too many slices"
        fix = "have larger slices, or give model.samples"
        raise ConfigError("CFG003", problem, str(slices), f"up to {SLICES_AT_MOST}", fix)


def _file(path_or_name: str) -> Path:
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return path
    names = scenario_names()
    if path_or_name in names:
        return FOLDER / f"{path_or_name}.toml"
    matches = get_close_matches(path_or_name, names, n=1)
    fix = f"did you mean {matches[0]}?" if matches else "name one of them, or a TOML file"
    raise ConfigError("CFG015", "there is no such scenario", shown(path_or_name), ", ".join(names), fix)


def _sweep_points(document: Document) -> Iterator[dict[KeyPath, Any]]:
    """Every combination of the values of a sweep, by path; one that is empty without a sweep.

    Raises:
        ConfigError: CFG002, a value isn't a list; CFG003, a list is empty; SIM003, a key has no effect.

    """
    sweep = document.table.get("sweep", {})
    if not isinstance(sweep, dict):
        problem = f"{document.location(('sweep',))}: sweep has the wrong type"
        raise ConfigError("CFG002", problem, shown(sweep), "a table of lists by key", "begin it with [sweep]")
    lists: dict[tuple[KeyPath, ...], Sequence[Any]] = {}
    for written_path, values in _leaves(sweep, ()):
        location = document.location(("sweep", *written_path))
        if not isinstance(values, list):
            problem = f"{location}: {dotted(written_path)} of the sweep has the wrong type"
            raise ConfigError("CFG002", problem, shown(values), "list of values", "put the values into brackets")
        if not values:
            problem = f"{location}: {dotted(written_path)} of the sweep is out of range"
            raise ConfigError(
                "CFG003", problem, "an empty list", "at least one value", "give one, or leave the key out"
            )
        keys = _swept_keys(".".join(written_path))
        for key in keys:
            if key[:1] == ("job",) and is_below(key[1:], (*UNTOLD, *WITHOUT_EFFECT)):
                problem = f"{location}: {dotted(key)} of the sweep changes nothing that is simulated"
                raise ConfigError("SIM003", problem, fix="leave it out")
        lists[keys] = values
    for values in itertools.product(*lists.values()):
        point: dict[KeyPath, Any] = {}
        for keys, value in zip(lists, values, strict=True):
            point |= dict.fromkeys(keys, value)
        yield point


def _swept_keys(names: str) -> tuple[KeyPath, ...]:
    """Keys of a sweep's list: one, or several behind commas that have equal values."""
    keys: list[KeyPath] = []
    for name in names.split(","):
        key = name.strip()
        keys.append(SHORTCUTS.get(key, tuple(key.split("."))))
    return tuple(keys)


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Values that aren't tables, with their paths; a table without keys is one, unless it is the whole."""
    if isinstance(value, dict) and (value or not path):
        for name, child in value.items():
            yield from _leaves(child, (*path, name))
    else:
        yield path, value


@dataclass(frozen=True, slots=True)
class _Settings:
    """A file's tables with the values of a point of its sweep, and with those that the caller gives."""

    document: Document
    point: Mapping[KeyPath, Any]
    overridden: Mapping[KeyPath, Any]
    table: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        table = copy.deepcopy(self.document.table)
        table.pop("sweep", None)
        object.__setattr__(self, "table", table)
        for path, value in {**self.point, **self.overridden}.items():
            self._put(path, value)

    def location(self, path: KeyPath) -> str:
        """``FILE:LINE`` of the setting of a key, or its name if the caller has set it."""
        if path in self.overridden:
            return dotted(path)
        location = self.document.location(path)
        if location != self.document.file and path not in self.point:
            return location
        for written_path, _ in _leaves(self.document.table.get("sweep", {}), ()):
            for key in _swept_keys(".".join(written_path)):
                if key[: len(path)] == path:
                    return self.document.location(("sweep", *written_path))
        return location

    def key_location(self, path: KeyPath) -> str:
        """Location and name of a key, as the beginning of an error message."""
        location = self.location(path)
        name = dotted(path)
        return name if location == name else f"{location}: {name}"

    @property
    def varied(self) -> dict[str, Any]:
        """Values of the sweep and of the caller, by dotted key."""
        return {".".join(path): value for path, value in {**self.point, **self.overridden}.items()}

    def _put(self, path: KeyPath, value: Any) -> None:
        parent: Any = self.table
        for depth, name in enumerate(path[:-1]):
            parent = self._entry(parent, path, depth) if isinstance(parent, list) else parent.setdefault(name, {})
            if not isinstance(parent, dict | list):
                problem = f"{self.key_location(path)} leads through a key that is no table"
                raise ConfigError("CFG001", problem, dotted(path[: depth + 1]), fix="name a key of a table")
        if isinstance(parent, list):
            self._entry(parent, path, len(path) - 1)
            parent[int(path[-1])] = value
        else:
            parent[path[-1]] = value

    def _entry(self, entries: list[Any], path: KeyPath, depth: int) -> Any:
        """Entry of a list that a path leads to at a depth."""
        name = path[depth]
        if not name.isdecimal() or int(name) >= len(entries):
            allowed = f"0 … {len(entries) - 1}"
            problem = f"{self.location(path)}: there is no {dotted(path[: depth + 1])}"
            raise ConfigError("CFG003", problem, shown(name), allowed, "count the tables from 0")
        return entries[int(name)]


class _JobPart(Document):
    """The table `job` of a scenario file, as a job file of its own whose keys keep their lines."""

    __slots__ = ("settings",)
    settings: _Settings

    def location(self, path: Sequence[str]) -> str:
        """``FILE:LINE`` of a key of the job."""
        return self.settings.location(("job", *path))


def _build(settings: _Settings) -> Scenario:
    """Make a scenario.

    Raises:
        ConfigError: CFG001 unknown key, CFG002 wrong type, CFG003 out of range, CFG011 keys that exclude each other,
            CFG012 a key is missing.

    """
    tables = dict(settings.table)
    if "varied" in tables:
        names = ", ".join(_names_of(Scenario))
        raise ConfigError(
            "CFG001", f"unknown key {settings.key_location(('varied',))}", allowed=names, fix="leave it out"
        )
    job = _job_of(settings, tables.pop("job", {}))
    try:
        scenario = Scenario.model_validate({"name": Path(settings.document.file).stem, **tables, "job": job})
    except ValidationError as error:
        raise _explained(error, settings) from None
    scenario = scenario.model_copy(update={"varied": settings.varied})
    folder = Path(settings.document.file).parent
    return check_scenario(scenario, folder, settings.key_location)


def _job_of(settings: _Settings, table: Any) -> Job:
    if not isinstance(table, dict):
        problem = f"{settings.key_location(('job',))} has the wrong type"
        raise ConfigError("CFG002", problem, shown(table), "table", "give the tables of a job file as [job.NAME]")
    resources = table.setdefault("resources", {})
    if isinstance(resources, dict) and "workers" not in table:
        resources.setdefault("num_workers", _machine_count(settings.table.get("machines")))
    document = settings.document
    part = _JobPart(document.file, document.text, table, document.private)
    object.__setattr__(part, "settings", settings)
    return from_read_document(part)


def _machine_count(groups: Any) -> int:
    """Number of machines, as far as the tables are right; the others are found out later."""
    count = 0
    for group in groups if isinstance(groups, list) else []:
        group_count = group.get("count") if isinstance(group, dict) else None
        if isinstance(group_count, int):
            count += group_count
    return min(max(1, count), MACHINES_AT_MOST)


def _explained(error: ValidationError, settings: _Settings) -> ConfigError:
    """The first error that pydantic reports, an unknown key before others, with file, line and the nearest key."""
    errors: list[dict[str, Any]] = [dict(details) for details in error.errors(include_url=False)]
    first_error = min(errors, key=lambda details: details["type"] != "extra_forbidden")
    error_type = first_error["type"]
    path = tuple(map(str, first_error["loc"]))
    location = settings.key_location(path)
    table = _table_at(path[:-1])
    if error_type == "extra_forbidden":
        names = _names_of(table)
        matches = get_close_matches(path[-1], names, n=1)
        fix = f"did you mean {dotted([*path[:-1], matches[0]])}?" if matches else "leave it out"
        allowed = "" if matches else ", ".join(names)
        return ConfigError("CFG001", f"unknown key {location}", allowed=allowed, fix=fix)
    if error_type == "missing":
        meaning = table.model_fields[path[-1]].description
        problem = f"{settings.location(path[:-1])}: {dotted(path)} is missing"
        return ConfigError("CFG012", problem, fix=f"give the {meaning}")
    allowed = _kind_of(table, path[-1])
    got = shown(first_error["input"])
    if error_type == "tuple_type":
        remedy = f"write [[{dotted(path)}]]"
        return ConfigError("CFG002", f"{location} has the wrong type", got, "list of tables", remedy)
    fix = choice_remedy(first_error["input"], allowed)
    if allowed.startswith("number") and isinstance(first_error["input"], str):
        fix = "give the number alone, without a unit"
    if error_type.endswith("_type"):
        return ConfigError("CFG002", f"{location} has the wrong type", got, allowed, fix)
    return ConfigError("CFG003", f"{location} is out of range", got, allowed, fix)


def _names_of(table: type[Table]) -> list[str]:
    """Keys of a table that a file may set."""
    return [name for name in table.model_fields if name != "varied"]


def _table_at(path: KeyPath) -> type[Table]:
    """The table of a scenario at a path."""
    table: type[Table] = Scenario
    for name in path:
        if name.isdecimal():
            continue
        inner = table_of(table, name)
        if inner is None:
            return table
        table = inner
    return table


def _kind_of(table: type[Table], name: str) -> str:
    """Description of the allowed values of a key."""
    if name.isdecimal() or name not in table.model_fields:
        return "table"
    field_info = table.model_fields[name]
    try:
        return key_of((name,), field_info).kind
    except (KeyError, ValueError):  # The setting is a table, or a list of tables.
        return "table"


def check_scenario(scenario: S, folder: Path, locate: Locate) -> S:
    """Check a scenario, and give its job the number of workers and samples.

    Args:
        scenario: what the file says.
        folder: folder that files named by the scenario are relative to.
        locate: gives a key with its file and line.

    Raises:
        ConfigError: CFG003 out of range, CFG011 keys that exclude each other or that aren't simulated, CFG012 a key is
            missing.

    """
    _refuse_what_is_not_simulated(scenario, locate)
    _check_sites(scenario, locate)
    if scenario.job.rounds.epochs is not None and scenario.model.samples is None:
        problem = f"{locate(('job', 'rounds', 'epochs'))} needs the size of the dataset"
        raise ConfigError("CFG012", problem, fix="give model.samples")
    for number, group in enumerate(scenario.machines):
        _check_group(group, ("machines", str(number)), locate)
    require_fast_links(scenario, locate)
    return with_traces(_with_job_of_fleet(scenario, locate), folder)


def _refuse_what_is_not_simulated(scenario: Scenario, locate: Locate) -> None:
    job = scenario.job
    has_bridged_group = any(group.bridged for group in job.workers)
    refusals: list[tuple[bool, KeyPath, str]] = [
        (bool(job.workers) and not scenario.groups_workers, ("workers",), "give [[machines]] instead"),
        (has_bridged_group, ("workers",), "leave external trainers out: their times aren't known"),
        (bool(job.bridge.commands), ("bridge", "commands"), "leave it out"),
        (job.rl.algorithm is not None, ("rl", "algorithm"), "leave [job.rl] out: rollouts aren't simulated"),
        (job.run.mode == "replay", ("run", "mode"), 'use "elastic": inner states aren\'t simulated'),
        (job.worker.probe_batch_size, ("worker", "probe_batch_size"), "leave it out: all machines have room"),
    ]
    for refused, path, fix in refusals:
        if refused:
            raise ConfigError("CFG011", f"{locate(('job', *path))} isn't simulated", fix=fix)
    for key in ("codec", "downward_codec"):
        codec = getattr(job.sync, key)
        options = getattr(job.sync, f"{key}_options")
        if is_own("codecs", codec):
            look_beside_the_job()
            attempt(f"sync.{key}", "codecs", codec, options, job)
        if not has_known_size(codec, options):
            problem = f"{locate(('job', 'sync', key))} has no known size"
            allowed = ", ".join((*BYTES_PER_CHUNK, *MEAN_BITS, *MOST_BITS))
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


def _with_job_of_fleet(scenario: S, locate: Locate) -> S:
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
        samples_line = locate(("samples_per_worker",))
        second = locate(("job", "rounds", "samples_between_updates"))
        raise ConfigError("CFG011", f"{samples_line} and {second} exclude each other", fix="keep one of them")
    return scenario.model_copy(update={"job": with_samples(job, scenario.samples_per_worker)})
