"""The figures of a campaign, as JSON has them and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from chaoslab.campaign import Found
from chaoslab.figures.audit import account, begun_again, breaks, discarded
from chaoslab.figures.efficiency import Edge, Window, calm_window, chaos_window, efficiency
from chaoslab.figures.recovery import figures as recovery_figures
from chaoslab.hunter import Hunter
from chaoslab.job import BATCH_SIZE
from chaoslab.options import Options
from chaoslab.processes import machine

from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.errors import CheckpointError
from hypha_ray.store.commits import CommitLog
from hypha_ray.types import Commit


def figures(options: Options, found: Found) -> dict[str, Any]:
    """Evaluate a campaign; `problems` is empty if all went well."""
    commits, problems = _log(found)
    edges = [
        Edge(commit.round, found.watch.commits[commit.round], sum(delta.samples for delta in commit.deltas))
        for commit in commits
        if commit.round in found.watch.commits
    ]
    calm = calm_window(edges, options.calm_rounds)
    chaos = chaos_window(edges, options.calm_rounds, options.chaos_rounds)
    losses = _losses(found, commits)
    kills = [] if found.hunter is None else found.hunter.kills
    problems += [f"{name.replace('_', ' ')}: {value}" for name, value in losses.items() if value]
    value, error = efficiency(calm, chaos) if calm and chaos and options.kills is None else (None, None)
    return {
        "E": value,
        "E_standard_error": error,
        "T_s": None if calm is None else calm.round_s,
        "calm": _window(calm, found),
        "chaos": _window(chaos, found),
        "mean_rounds_between_kills": options.mean_rounds_between_kills,
        "rounds_between_kills": _spacing(calm, chaos, [kill.at_s for kill in kills]),
        "kills": dict(Counter(kill.role for kill in kills)),
        "missed": [] if found.hunter is None else found.hunter.missed,
        "commits": len(commits),
        "rounds": found.rounds,
        "rounds_begun_again": begun_again(found.watch.begun()),
        **losses,
        "samples": asdict(account(commits, _sizes(found))),
        "recovery": _recovery(found.hunter),
        "memory": found.samples.growth(),
        "load_average": {"first": found.samples.load[:1], "last": found.samples.load[-1:]},
        "workers": options.workers,
        "signal": options.signal,
        "seed": options.seed,
        "machine": machine(),
        "strikes": _strikes(found.hunter),
        "problems": problems,
    }


def page(got: Mapping[str, Any]) -> str:
    """The figures for reading."""
    spacing = got["rounds_between_kills"]
    missed = len(got["missed"])
    lines = [
        _efficiency(got),
        f"T  {_number(got['T_s'], 's')}    kills every {_number(spacing, 'T')} in the measured rounds "
        f"(asked for {got['mean_rounds_between_kills']:g} T)",
        "",
        f"{'':10}{'rounds':>8}{'seconds':>9}{'steps/s':>9}{'s/round':>9}{'±':>6}{'busy cores':>12}{'store MB':>10}",
        *(_phase(name, got[name]) for name in ("calm", "chaos") if got[name]),
        "",
        f"{'killed':10}{'times':>6}{'healed':>8}{'p50 s':>8}{'p95 s':>8}{'max s':>8}    to",
        *(_role(role, row) for role, row in got["recovery"].items()),
        *([f"{missed} strikes had no victim: {', '.join(sorted(set(got['missed'])))}"] if missed else []),
        "",
        f"commits    {got['commits']} of {got['rounds']} rounds; lost {got['commits_lost']}; "
        f"rounds discarded {got['rounds_discarded']}, begun again {got['rounds_begun_again']}",
        f"samples    {got['samples']['committed']:,} in {got['samples']['whole_epochs']} whole epochs; "
        f"lost {got['samples_lost']}, repeated {got['samples_repeated']}, unknown {got['samples_foreign']}",
        "memory     " + ", ".join(_growth(name, row) for name, row in got["memory"].items()),
        f"machine    {got['machine']['cores']} cores {got['machine']['cpu']}; load {got['load_average']['first']} "
        f"→ {got['load_average']['last']}; Ray {got['machine']['ray']}; seed {got['seed']}",
        *(f"PROBLEM    {problem}" for problem in got["problems"]),
    ]
    return "\n".join(lines)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _log(found: Found) -> tuple[tuple[Commit, ...], list[str]]:
    try:
        return CommitLog(found.run).read(), list(found.problems)
    except CheckpointError as error:
        return (), [*found.problems, str(error)]


def _sizes(found: Found) -> dict[int, int]:
    return {info.index: info.samples for info in load_manifest(found.corpus).of("train")}


def _losses(found: Found, commits: Sequence[Commit]) -> dict[str, int]:
    """Figures that have to be zero."""
    samples = account(commits, _sizes(found))
    missing = discarded(found.watch.begun(), [commit.round for commit in commits], found.rounds)
    return {
        "rounds_discarded": len(missing),
        "commits_lost": breaks(commits) + len(found.watch.taken_back()),
        "samples_lost": samples.lost,
        "samples_repeated": samples.repeated,
        "samples_foreign": samples.foreign,
        "rounds_missing": found.rounds - len(commits),
    }


def _window(window: Window | None, found: Found) -> dict[str, Any] | None:
    if window is None:
        return None
    return {
        "rounds": window.rounds,
        "seconds": window.seconds,
        "steps_per_s": window.steps_per_s(BATCH_SIZE),
        "round_s": window.round_s,
        "round_deviation": window.deviation,
        "busy_cores": found.samples.busy_cores(window.begin_s, window.end_s),
        "object_store_mb": found.samples.store_mb(window.begin_s, window.end_s),
    }


def _spacing(calm: Window | None, chaos: Window | None, kills: Sequence[float]) -> float | None:
    """Rounds between kills, as they turned out in the measured rounds."""
    if calm is None or chaos is None:
        return None
    inside = sum(chaos.begin_s <= at <= chaos.end_s for at in kills)
    return chaos.seconds / calm.round_s / inside if inside else None


def _recovery(hunter: Hunter | None) -> dict[str, dict[str, Any]]:
    if hunter is None:
        return {}
    roles = dict.fromkeys(kill.role for kill in hunter.kills)
    return {
        role: recovery_figures([hunter.heal_s(kill) for kill in hunter.kills if kill.role == role]) for role in roles
    }


def _strikes(hunter: Hunter | None) -> list[dict[str, Any]]:
    if hunter is None:
        return []
    return [
        {"at_s": kill.at_s, "name": kill.name, "signal": kill.signal, "healed_s": hunter.heal_s(kill)}
        for kill in hunter.kills
    ]


# ── page ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _efficiency(got: Mapping[str, Any]) -> str:
    if got["E"] is None:
        return "E  –    evenly spaced kills tell of recovery; or there was no whole round in one of the phases"
    return f"E  {got['E']:.3f} ± {got['E_standard_error']:.3f}    committed worker-steps per second, chaos ÷ calm"


def _number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.2f} {unit}"


def _phase(name: str, row: Mapping[str, Any]) -> str:
    store = row["object_store_mb"]["end"]
    return (
        f"{name:10}{row['rounds']:>8}{row['seconds']:>9.1f}{row['steps_per_s']:>9.2f}{row['round_s']:>9.2f}"
        f"{row['round_deviation']:>6.0%}{_cell(row['busy_cores']):>12}{_cell(store):>10}"
    )


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _role(role: str, row: Mapping[str, Any]) -> str:
    progress = {"worker": "its number's next step", "node": "its worker's next step"}
    progress |= dict.fromkeys(("scheduler", "driver"), "the next step of any worker")
    times = row["healed"] + row["not_healed"]
    cells = "".join(f"{_cell(row[name]):>8}" for name in ("p50_s", "p95_s", "max_s"))
    return f"{role:10}{times:>6}{row['healed']:>8}{cells}    {progress.get(role, 'the next commit')}"


def _growth(name: str, row: Mapping[str, Any]) -> str:
    slope = row["mb_per_hour"]
    return f"{name} {'–' if slope is None else f'{slope:+.1f}'} MB/h ({row['points']} points, {row['minutes']} min)"
