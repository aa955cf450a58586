"""The figures of a campaign, as JSON has them and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from chaoslab.campaign import CampaignResult
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


def figures(options: Options, result: CampaignResult) -> dict[str, Any]:
    """Evaluate a campaign; `problems` is empty if all went well."""
    commits, problems = _log(result)
    edges = _edges(result, commits)
    calm = calm_window(edges, options.calm_rounds)
    chaos = chaos_window(edges, options.calm_rounds, options.chaos_rounds)
    losses = _losses(result, commits)
    kills = [] if result.hunter is None else result.hunter.kills
    for name, value in losses.items():
        if value:
            problems.append(f"{name.replace('_', ' ')}: {value}")
    ratio: float | None = None
    error: float | None = None
    if calm and chaos and options.kills is None:
        ratio, error = efficiency(calm, chaos)
    return {
        "E": ratio,
        "E_standard_error": error,
        "T_s": None if calm is None else calm.round_s,
        "calm": _window(calm, result),
        "chaos": _window(chaos, result),
        "mean_rounds_between_kills": options.mean_rounds_between_kills,
        "rounds_between_kills": _spacing(calm, chaos, [kill.at_s for kill in kills]),
        "kills": dict(Counter(kill.role for kill in kills)),
        "missed": [] if result.hunter is None else result.hunter.missed,
        "commits": len(commits),
        "rounds": result.rounds,
        "rounds_begun_again": begun_again(result.watch.begun()),
        **losses,
        "samples": asdict(account(commits, _sizes(result))),
        "recovery": _recovery(result.hunter),
        "memory": result.samples.growth(),
        "load_average": {"first": result.samples.load[:1], "last": result.samples.load[-1:]},
        "workers": options.workers,
        "signal": options.signal,
        "seed": options.seed,
        "machine": machine(),
        "strikes": _strikes(result.hunter),
        "problems": problems,
    }


def page(report: Mapping[str, Any]) -> str:
    """The figures for reading."""
    spacing = _number(report["rounds_between_kills"], "T")
    expected = report["mean_rounds_between_kills"]
    samples = report["samples"]
    growths = [_growth(name, row) for name, row in report["memory"].items()]
    host = report["machine"]
    load = report["load_average"]
    lines = [
        _efficiency(report),
        f"T  {_number(report['T_s'], 's')}    kills every {spacing} in the measured rounds (asked for {expected:g} T)",
        "",
        *_phases(report),
        "",
        *_recoveries(report),
        "",
        f"commits    {report['commits']} of {report['rounds']} rounds; lost {report['commits_lost']}; "
        f"rounds discarded {report['rounds_discarded']}, begun again {report['rounds_begun_again']}",
        f"samples    {samples['committed']:,} in {samples['whole_epochs']} whole epochs; "
        f"lost {report['samples_lost']}, repeated {report['samples_repeated']}, unknown {report['samples_foreign']}",
        f"memory     {', '.join(growths)}",
        f"machine    {host['cores']} cores {host['cpu']}; load {load['first']} → {load['last']}; "
        f"Ray {host['ray']}; seed {report['seed']}",
    ]
    lines += [f"PROBLEM    {problem}" for problem in report["problems"]]
    return "\n".join(lines)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _log(result: CampaignResult) -> tuple[tuple[Commit, ...], list[str]]:
    try:
        return CommitLog(result.run).read(), list(result.problems)
    except CheckpointError as error:
        return (), [*result.problems, str(error)]


def _edges(result: CampaignResult, commits: Sequence[Commit]) -> list[Edge]:
    """Commits that were seen to appear, with their times."""
    edges = []
    for commit in commits:
        if commit.round in result.watch.commits:
            samples = sum(delta.samples for delta in commit.deltas)
            edges.append(Edge(commit.round, result.watch.commits[commit.round], samples))
    return edges


def _sizes(result: CampaignResult) -> dict[int, int]:
    manifest = load_manifest(result.corpus)
    return {info.index: info.samples for info in manifest.of("train")}


def _losses(result: CampaignResult, commits: Sequence[Commit]) -> dict[str, int]:
    """Figures that have to be zero."""
    samples = account(commits, _sizes(result))
    committed = [commit.round for commit in commits]
    missing = discarded(result.watch.begun(), committed, result.rounds)
    return {
        "rounds_discarded": len(missing),
        "commits_lost": breaks(commits) + len(result.watch.taken_back()),
        "samples_lost": samples.lost,
        "samples_repeated": samples.repeated,
        "samples_foreign": samples.foreign,
        "rounds_missing": result.rounds - len(commits),
    }


def _window(window: Window | None, result: CampaignResult) -> dict[str, Any] | None:
    if window is None:
        return None
    return {
        "rounds": window.rounds,
        "seconds": window.seconds,
        "steps_per_s": window.steps_per_s(BATCH_SIZE),
        "round_s": window.round_s,
        "round_deviation": window.deviation,
        "busy_cores": result.samples.busy_cores(window.begin_s, window.end_s),
        "object_store_mb": result.samples.store_mb(window.begin_s, window.end_s),
    }


def _spacing(calm: Window | None, chaos: Window | None, kills: Sequence[float]) -> float | None:
    """Rounds between kills, as they turned out in the measured rounds."""
    if calm is None or chaos is None:
        return None
    measured_kills = sum(chaos.begin_s <= at_s <= chaos.end_s for at_s in kills)
    if not measured_kills:
        return None
    return chaos.seconds / calm.round_s / measured_kills


def _recovery(hunter: Hunter | None) -> dict[str, dict[str, Any]]:
    if hunter is None:
        return {}
    times_s: dict[str, list[float | None]] = {}
    for kill in hunter.kills:
        times_s.setdefault(kill.role, []).append(hunter.heal_s(kill))
    return {role: recovery_figures(role_times_s) for role, role_times_s in times_s.items()}


def _strikes(hunter: Hunter | None) -> list[dict[str, Any]]:
    if hunter is None:
        return []
    strikes = []
    for kill in hunter.kills:
        healed_s = hunter.heal_s(kill)
        strikes.append({"at_s": kill.at_s, "name": kill.name, "signal": kill.signal, "healed_s": healed_s})
    return strikes


# ── page ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _efficiency(report: Mapping[str, Any]) -> str:
    if report["E"] is None:
        return "E  –    evenly spaced kills tell of recovery; or there was no whole round in one of the phases"
    return f"E  {report['E']:.3f} ± {report['E_standard_error']:.3f}    committed worker-steps per second, chaos ÷ calm"


def _number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.2f} {unit}"


def _phases(report: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{'':10}{'rounds':>8}{'seconds':>9}{'steps/s':>9}{'s/round':>9}{'±':>6}{'busy cores':>12}{'store MB':>10}"
    ]
    for name in ("calm", "chaos"):
        if report[name]:
            lines.append(_phase(name, report[name]))
    return lines


def _phase(name: str, row: Mapping[str, Any]) -> str:
    store = row["object_store_mb"]["end"]
    return (
        f"{name:10}{row['rounds']:>8}{row['seconds']:>9.1f}{row['steps_per_s']:>9.2f}{row['round_s']:>9.2f}"
        f"{row['round_deviation']:>6.0%}{_cell(row['busy_cores']):>12}{_cell(store):>10}"
    )


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _recoveries(report: Mapping[str, Any]) -> list[str]:
    lines = [f"{'killed':10}{'times':>6}{'healed':>8}{'p50 s':>8}{'p95 s':>8}{'max s':>8}    to"]
    lines += [_role(role, row) for role, row in report["recovery"].items()]
    missed = report["missed"]
    if missed:
        lines.append(f"{len(missed)} strikes had no victim: {', '.join(sorted(set(missed)))}")
    return lines


def _role(role: str, row: Mapping[str, Any]) -> str:
    progress = {"worker": "its number's next step", "node": "its worker's next step"}
    progress |= dict.fromkeys(("scheduler", "driver"), "the next step of any worker")
    times = row["healed"] + row["not_healed"]
    cells = f"{_cell(row['p50_s']):>8}{_cell(row['p95_s']):>8}{_cell(row['max_s']):>8}"
    return f"{role:10}{times:>6}{row['healed']:>8}{cells}    {progress.get(role, 'the next commit')}"


def _growth(name: str, row: Mapping[str, Any]) -> str:
    slope = "–" if row["mb_per_hour"] is None else f"{row['mb_per_hour']:+.1f}"
    return f"{name} {slope} MB/h ({row['points']} points, {row['minutes']} min)"
