"""The exchange's actor: hears the standing of each run, and answers with a ruling.

It may end at any time: leases stay, and the next one knows all once each run has spoken again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread

from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util import list_named_actors

from hypha_ray.market.exchange.allotment import Allotment, Holding, Order, Ruling, Standing
from hypha_ray.market.exchange.attendance import CHECK_S, Attendance
from hypha_ray.market.groups import LeaseEntry, lease_entries, reclaim
from hypha_ray.market.nodes import cluster_nodes


class Exchange:
    """Rules on the runs of a cluster.

    Args:
        order: "bid" serves the highest bid first; "fair" gives each run a share in the ratio of its bid.

    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._attendance = Attendance(time.monotonic(), {entry.run for entry in lease_entries()})
        self._lock = Lock()
        self._rulings: dict[str, Ruling] = {}
        self._demand: list[dict[str, float]] | None = None
        """Bundles that Ray's autoscaler was asked for last; None before the first time."""
        Thread(target=self._check, name="exchange-check", daemon=True).start()

    def ping(self) -> int:
        """Return the process id, as a sign of life."""
        return os.getpid()

    def attend(self, standing: Standing) -> Ruling:
        """Take in the standing of a run, and rule on it."""
        with self._lock:
            self._forget_ended()
            self._attendance.hear(standing, time.monotonic())
            runs = self._attendance.standings
            held = _holdings(lease_entries(), runs)
            self._rulings = Allotment(cluster_nodes(), runs, held, self._order).rulings()
            self._ask_for_machines()
            return self._rulings[standing.run]

    def overview(self) -> list[tuple[Standing, int]]:
        """Standing and quota of each run, in the order in which they came."""
        with self._lock:
            self._forget_ended()
            runs = self._attendance.standings
            return [(one, self._rulings[one.run].quota) for one in runs if one.run in self._rulings]

    def _forget_ended(self) -> None:
        """Forget runs that have no actors any more."""
        self._attendance.forget_all_but({actor["namespace"] for actor in list_named_actors(all_namespaces=True)})

    def _ask_for_machines(self) -> None:
        """Ask Ray's autoscaler for room for all workers, as long as some of them have none."""
        runs = [one for one in self._attendance.standings if one.run in self._rulings]
        short = any(self._rulings[one.run].quota < len(one.needs) for one in runs)
        demand = [need.bundle() for one in runs for need in one.needs] if short else []
        if demand != self._demand:
            request_resources(bundles=demand)
            self._demand = demand

    def _check(self) -> None:
        """End the leases of runs that have fallen silent, in a thread of its own."""
        while True:
            time.sleep(CHECK_S)
            with self._lock, suppress(RayError):  # The control service doesn't answer: there will be a next check.
                for run in self._attendance.check(time.monotonic()):
                    reclaim(run)
                self._forget_ended()
                self._ask_for_machines()


def _holdings(entries: Sequence[LeaseEntry], runs: Sequence[Standing]) -> dict[str, list[Holding]]:
    """Leases of the runs' workers that are placed."""
    found: dict[str, list[Holding]] = {one.run: [] for one in runs}
    for entry in entries:
        if entry.run in found and entry.node is not None and entry.name.startswith("worker-"):
            since_s = entry.agreement.since_s if entry.agreement else 0.0
            found[entry.run].append(Holding(entry.name, entry.node, entry.amounts, since_s))
    return found
