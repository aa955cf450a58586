"""Texts of a summary about bytes: traffic and disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.driver.summary.disk import DiskSizes, free_bytes
from hypha_ray.driver.summary.exchange import Exchange
from hypha_ray.store.directory import runs
from hypha_ray.telemetry.sinks.table import si
from hypha_ray.texts import counted


def exchange_text(job: Job, exchange: Exchange) -> str:
    """Describe the traffic of all workers together."""
    about = "at most " if exchange.is_bound else ""
    if exchange.is_estimated:
        about += "about "
    up = f"{_range(exchange.up)} up"
    down = f"{_range(exchange.down)} down"
    total = f"{size_text(exchange.total_up)} and {size_text(exchange.total_down)} in all"
    if job.rounds.max_exchange_share is not None:
        total = f"at most {total}"
    codecs = f"{job.sync.codec} up, {job.sync.downward_codec} down"
    if job.sync.codec == job.sync.downward_codec:
        codecs = job.sync.codec
    return f"{about}{up} and {down} a round, {total} ({counted(job.num_workers, 'worker')}, {codecs})"


def disk_text(job: Job, use: DiskSizes) -> str:
    """Describe the space that a run takes and the space that is free."""
    about = "about"
    if use.is_bound:
        about = "at least"
    snapshots = f"{counted(use.snapshots, 'snapshot')} of {size_text(use.snapshot)}"
    models = f"{counted(use.models, 'model')} of {size_text(use.model)}"
    text = f"{about} {size_text(use.in_the_end)}: {snapshots}, {models}"
    folder = runs(job.run.dir)
    text += f"; {size_text(free_bytes(folder))} free in {folder}"
    mirror = job.checkpoint.mirror
    if mirror is not None:
        text += "; as much again at checkpoint.mirror"
    return text


def space_notes(job: Job, use: DiskSizes) -> Iterator[str]:
    """Warn of a disk that a run will fill."""
    places = {"run.dir": runs(job.run.dir)}
    mirror = job.checkpoint.mirror
    if mirror is not None and "://" not in mirror:
        places["checkpoint.mirror"] = Path(mirror)
    for key, folder in places.items():
        free = free_bytes(folder)
        if free < use.at_most:
            problem = f"the run takes up to {size_text(use.at_most)} in {folder}, and {size_text(free)} are free"
            yield f"{problem}: make room, choose another {key}, or keep fewer snapshots by checkpoint.keep"


def _range(rounds: Counter[int]) -> str:
    """Write the bytes of a round, or the least and the most of them if rounds differ."""
    least = size_text(min(rounds))
    most = size_text(max(rounds))
    if least == most:
        return most
    return f"{least} to {most}"


def size_text(size: int) -> str:
    """Write a number of bytes: 999 B, 1.23 kB, 45.6 MB."""
    text = si(size)
    if text[-1].isdigit():
        return f"{text} B"
    return f"{text[:-1]} {text[-1]}B"
