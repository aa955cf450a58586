"""Leases of a cluster's resources: one placement group for each actor.

    acquire ──placed──► lease ──options──► an actor on it ──release──► gone, the actor too
       └──not placed by the deadline──► CapacityError, and nothing stays behind

A placement group outlives the actor that made it. So a resumed run first reclaims what was held before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hypha_ray.errors import CapacityError, ClusterError, first_line
from hypha_ray.market.leases import Lease, LeaseBook
from hypha_ray.market.requirements import Need, NodeResources, shortage

__all__ = ["Lease", "Leases", "cluster_nodes", "draining_nodes", "on_this_node", "reclaim"]


def cluster_nodes(leased: Mapping[str, Mapping[str, float]] | None = None) -> list[NodeResources]:
    """The nodes that are alive, and what is free on them at this moment.

    Args:
        leased: amounts by node id that are to be counted as free.

    """
    free, leased = available_resources_per_node(), leased or {}
    return [
        NodeResources(
            node["NodeManagerAddress"],
            node["Resources"],
            Counter(free.get(node["NodeID"], {})) + Counter(leased.get(node["NodeID"], {})),
            node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def draining_nodes() -> frozenset[str]:
    """Ids of nodes that Ray is about to take away, such as spot machines with notice."""
    return frozenset(state.get_draining_nodes())


def on_this_node() -> dict[str, Any]:
    """Options that place an actor on the node of this process, where it reserves nothing."""
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": node}


def reclaim(run: str, spared: Container[str] = ()) -> int:
    """End all leases of a run but placed ones of some names; returns their number."""
    found = [row for name, row in _rows(run) if row["state"] != "CREATED" or name not in spared]
    for row in found:
        remove_placement_group(_group(row))
    return len(found)


def _rows(run: str) -> list[tuple[str, dict[str, Any]]]:
    """Names of the run's leases, and what Ray knows of them."""
    rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED"]
    return [(row["name"].removeprefix(f"{run}/"), row) for row in rows if row["name"].startswith(f"{run}/")]


def _group(row: dict[str, Any]) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(row["placement_group_id"])))


class Leases:
    """The leases of one run. Ray counts what is free; the book says which leases are good.

    Args:
        run: name of the run; its groups are called ``<run>/<name>``.

    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._book = LeaseBook()
        self._groups: dict[str, tuple[Need, PlacementGroup]] = {}
        """Placement groups of all leases, and of those that still wait for room."""
        self._looking: asyncio.Task[list[NodeResources]] | None = None
        """The latest look at the cluster's nodes."""

    async def acquire(self, name: str, need: Need, deadline_s: float) -> Lease:
        """Lease what `need` says, under the name of the actor that will live there.

        Raises:
            CapacityError: the cluster had no room within `deadline_s` seconds.
            ClusterError: a group of that name is there already, or Ray doesn't answer.

        """
        group = self._open(name, need, await self._look())
        lease = None
        try:
            await asyncio.wait_for(group.ready(), deadline_s)
            lease = self._book.grant(name, need.bundle(), time.monotonic())
        except TimeoutError:
            raise self._no_room(name, need, await self._look()) from None
        except RayError as error:
            raise _refused(f"{self._run}/{name}", error) from error
        finally:
            if lease is None:
                self._close(name)
        return lease

    def adopt(self, needs: Mapping[str, Need]) -> dict[str, Lease]:
        """Take over what an earlier holder of the run has leased under these names, and what has been placed."""
        found = {name: _group(row) for name, row in _rows(self._run) if name in needs and row["state"] == "CREATED"}
        for name, group in found.items():
            self._groups[name] = needs[name], group
        return {name: self._book.grant(name, needs[name].bundle(), time.monotonic()) for name in found}

    def nodes(self) -> list[NodeResources]:
        """The nodes that are alive, and what would be free there without these leases."""
        amounts = {lease.holder: lease.amounts for lease in self._book.leases}
        held: dict[str, Counter[str]] = {}
        for name, row in _rows(self._run):  # One look at the table for all leases.
            node = row["bundles_to_node_id"].get(0)
            if name in amounts and node is not None:
                held.setdefault(node, Counter()).update(amounts[name])
        return cluster_nodes(held)

    def options(self, lease: Lease) -> dict[str, Any]:
        """Options that place an actor on the lease and give it all that is leased.

        Raises:
            ClusterError: the lease is over, or its node is gone; an actor would wait there for ever.

        """
        group = self._groups[lease.holder][1] if self._book.holds(lease) else None
        if group is None or placement_group_table(group)["state"] != "CREATED":
            raise ClusterError("CAP004", f"the lease {self._run}/{lease.holder} is over", fix="acquire a new one")
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        amounts = lease.amounts
        memory = {"memory": int(amounts["memory"])} if "memory" in amounts else {}
        cores = {"num_cpus": amounts.get("CPU", 0.0), "num_gpus": amounts.get("GPU", 0.0)}
        return {**cores, **memory, "scheduling_strategy": place}

    def placed(self) -> dict[str, str]:
        """Id of the node that each lease is on, by name: one look at Ray's table for all of them."""
        return {name: node for name, row in _rows(self._run) if (node := row["bundles_to_node_id"].get(0))}

    def release(self, lease: Lease) -> None:
        """Give a lease back, which ends the actors on it; nothing happens if it is over."""
        if self._book.release(lease):
            self._close(lease.holder)

    def release_all(self) -> None:
        """Give back every lease of this object, and whatever still waits for room."""
        for lease in self._book.leases:
            self.release(lease)
        for name in list(self._groups):
            self._close(name)

    async def _look(self) -> list[NodeResources]:
        """Look at the cluster's nodes: one look for all leases that are asked for at the same time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(cluster_nodes))
        return await asyncio.shield(self._looking)

    def _open(self, name: str, need: Need, nodes: list[NodeResources]) -> PlacementGroup:
        """Ask Ray for the group; it says at once if the name is taken."""
        try:
            labels = [need.selector(nodes)]
            group = placement_group([need.bundle()], "PACK", f"{self._run}/{name}", bundle_label_selector=labels)
        except RayError as error:
            raise _refused(f"{self._run}/{name}", error) from error
        self._groups[name] = need, group
        return group

    def _close(self, name: str) -> None:
        found = self._groups.pop(name, None)
        if found is not None:
            remove_placement_group(found[1])

    def _no_room(self, name: str, need: Need, nodes: list[NodeResources]) -> CapacityError:
        """Reason of a failed lease: this run asks for too much, or others hold the resources."""
        idle = [replace(node, free=node.total) for node in nodes]
        missing = shortage(Counter(wanted for wanted, _ in self._groups.values()), idle) or shortage({need: 1}, nodes)
        if missing is not None:
            return missing.error()
        return CapacityError(
            "CFG004", f"Ray placed {self._run}/{name} too late", fix="raise resources.start_deadline_s"
        )


def _refused(group: str, error: RayError) -> ClusterError:
    what = f"Ray refused the lease {group}: {first_line(error)}"
    return ClusterError("CAP003", what, fix="end the run of that name first")
