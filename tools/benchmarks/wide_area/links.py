"""Machines far apart, on this one: network namespaces, joined by links as narrow and as long as those between sites.

    site 0   wan0 ─┐
    site 1   wan0 ─┼─ bridge          Every end of a cable has a token bucket (`tc tbf`), so both ways are limited.
    site 2   wan0 ─┘                  The bridge has a namespace of its own: this machine's network stays as it is.

Needs root, `ip`, `tc` and `nsenter`; `missing` says what isn't there. Namespaces are called ``hypha-PID-NETWORK-PLACE``
by the process that made them; those of processes that were killed are removed when the next network is made.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.wide_area import delayed_link

DEVICE = "wan0"
"""A site's own end of its link."""
BURST_BYTES = 64 << 10
"""Bytes that a token bucket lets through at once: a packet as large as the kernel makes them."""
QUEUE_S = 0.05
"""Longest wait of a packet for its bucket; it is dropped if it would be longer."""
END_S = 10.0
"""Longest wait for killed processes to be gone."""
_OURS = re.compile(r"hypha-(\d+)-\d+-\w+")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Link:
    """Link of a site to the others: megabits a second each way, and seconds that a packet travels."""

    mbit_s: float
    delay_s: float = 0.0


class Site:
    """A place of its own: what is started here reaches the other sites over its link, and nothing else.

    Args:
        namespace: name of its network namespace.
        address: its IPv4 address.
        link: how it is joined to the others.

    """

    def __init__(self, namespace: str, address: str, link: Link) -> None:
        self.namespace = namespace
        self.address = address
        self.link = link

    def start(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, output: IO[Any] | int | None = None
    ) -> subprocess.Popen[str]:
        """Start a process here; `env` is laid over this process's own, `output` takes what it prints, errors too."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", "--", *map(str, command)]
        errors = None if output is None else subprocess.STDOUT
        return subprocess.Popen(inside, env={**os.environ, **(env or {})}, stdout=output, stderr=errors, text=True)

    def bytes(self) -> tuple[int, int]:
        """Bytes that have gone out over the link, and that have come in, headers and all."""
        (device,) = json.loads(_run("ip", "-n", self.namespace, "-j", "-s", "link", "show", DEVICE))
        counters = device["stats64"]
        return int(counters["tx"]["bytes"]), int(counters["rx"]["bytes"])


class Network:
    """Sites that reach each other, while the context lasts. Every process in them ends with it.

    Args:
        links: one for each site.

    """

    def __init__(self, links: Sequence[Link]) -> None:
        prefix = f"hypha-{os.getpid()}-{next(_numbers)}"
        self._bridge = f"{prefix}-bridge"
        self._cables: list[subprocess.Popen[str]] = []
        self.sites = [Site(f"{prefix}-{n}", f"10.77.0.{n + 1}", link) for n, link in enumerate(links)]

    def __enter__(self) -> Network:
        remove_leftovers()
        try:
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", self._bridge, "address", "add", "10.77.0.254/24", "dev", "bridge0")
            _run("ip", "-n", self._bridge, "link", "set", "bridge0", "up")
            for number, site in enumerate(self.sites):
                self._join(site, f"port{number}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the sites, and remove them."""
        there = _namespaces()
        for name in (*(site.namespace for site in self.sites), self._bridge):
            if name in there:
                _remove(name)
        for cable in self._cables:
            cable.communicate()

    def _join(self, site: Site, port: str) -> None:
        _run("ip", "netns", "add", site.namespace)
        inside = ("ip", "-n", site.namespace)
        outside = ("ip", "-n", self._bridge)
        _run(*inside, "link", "set", "lo", "up")
        if site.link.delay_s:
            self._stretch(site, port)
        else:
            _run(*outside, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", site.namespace)
        _run(*inside, "address", "add", f"{site.address}/24", "dev", DEVICE)
        _run(*inside, "link", "set", DEVICE, "up")
        _run(*inside, "route", "add", "default", "via", "10.77.0.254")  # Programs find out their address by it.
        _run(*outside, "link", "set", port, "master", "bridge0", "up")
        _limit(site.namespace, DEVICE, site.link)
        _limit(self._bridge, port, site.link)

    def _stretch(self, site: Site, port: str) -> None:
        """Lay a cable that takes its time; it ends with the bridge's namespace."""
        ends = (site.namespace, DEVICE, self._bridge, port)
        command = [sys.executable, delayed_link.__file__, *ends, str(site.link.delay_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self._cables.append(process)
        if process.stdout.readline() != "ready\n":
            raise subprocess.CalledProcessError(process.wait(), command, stderr="no TAP device")


@cache
def missing() -> str | None:
    """Reason that there can be no network here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if absent := [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(absent)}"
    try:
        with Network([Link(100)]):
            return None
    except subprocess.CalledProcessError as error:
        return f"no throttled link can be made here: {str(error.stderr).strip()}"


def remove_leftovers() -> list[str]:
    """Remove namespaces of processes that are gone, with all that runs there; returns their names."""
    removed = []
    for name in _namespaces():
        match = _OURS.fullmatch(name)
        if match and not _alive(int(match[1])):
            removed.append(name)
    for name in removed:
        _remove(name)
    return removed


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _limit(namespace: str, device: str, link: Link) -> None:
    rate = f"{link.mbit_s * 1e6:.0f}bit"
    queue = f"{QUEUE_S * 1e3:.0f}ms"
    bucket = ("tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", queue)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _namespaces() -> list[str]:
    namespaces = json.loads(_run("ip", "-j", "netns", "list") or "[]")
    return [namespace["name"] for namespace in namespaces]


def _processes(namespace: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def _remove(namespace: str) -> None:
    """Kill all processes there, until none is left: no other program puts processes into it."""
    deadline = time.monotonic() + END_S
    while (pids := _processes(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    _run("ip", "netns", "delete", namespace)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
