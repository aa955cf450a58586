"""Options of ``simulate --advise``, beside a job file and its flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.keys import tables
from hypha_ray.config.options import parse_options
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.advice.exchange import Circumstances, ModelShape, parse_latency, parse_link

ASSUMED_BATCH_S = 1.0
"""Seconds of a batch if nothing says how long it takes."""
MOST_PARAMETERS = 1e13
"""Parameters of the largest model that is advised on."""
SWITCHES = ("advise", "help", "h")
"""Options without a value."""
LISTS = ("batch_s",)
"""Options with several values."""


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
        is_value = values_left > 0 and not word.startswith("--")  # Such as -5ms, or - for standard output.
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
