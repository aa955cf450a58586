"""Look-up of the data nodes of a cluster: their names in Ray are the catalogue."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from hypha_ray.config.value_types import CLUSTER
from hypha_ray.data.actor import PROTOCOL, Announcement
from hypha_ray.data.catalogue import local_names
from hypha_ray.data.manifest import Manifest, parse_manifest
from hypha_ray.data.mixture import whole
from hypha_ray.errors import ClusterError, DataError, HyphaError, first_line
from hypha_ray.types import SLICES_PER_PART

PREFIX = "data"
"""First part of the names of data nodes; the others are the dataset's name and the beginning of the node's id."""
ANSWER_S = 30.0
"""Longest wait for a data node's description: a process that Ray has just restarted has to load its libraries."""


def actor_name(dataset: str, node_id: str) -> str:
    """Ray's name of the data node that serves a dataset from a node."""
    return f"{PREFIX}/{dataset}/{node_id[:8]}"


@dataclass(frozen=True, slots=True)
class Replica:
    """A data node that answers; `name` is its name in Ray, which another actor may get later."""

    name: str
    actor: Any
    actor_id: str
    node_id: str
    address: str
    manifest: Manifest
    readers: tuple[str, ...] = ()

    def has(self, index: int) -> bool:
        """Whether the data node serves a slice; it lacks those of other parts."""
        part = self.manifest.part
        return part is None or part[0] == index // SLICES_PER_PART


@dataclass(frozen=True, slots=True)
class LostReplica:
    """A data node whose name is there, but that doesn't serve its dataset, with the reason."""

    name: str
    error: HyphaError


def names() -> dict[str, list[str]]:
    """Names in Ray of all data nodes, by dataset."""
    by_dataset: dict[str, list[str]] = {}
    for row in list_named_actors(all_namespaces=True):
        prefix, *names_below = row["name"].split("/")
        if row["namespace"] == CLUSTER and prefix == PREFIX and len(names_below) > 1:
            actors = by_dataset.setdefault(names_below[0], [])
            actors.append(row["name"])
    return {dataset: sorted(actors) for dataset, actors in sorted(by_dataset.items())}


def described(name: str) -> Replica:
    """The data node of a name in Ray.

    Raises:
        DataError: its dataset is missing or damaged, or it is of another release.
        ClusterError: it doesn't answer.

    """
    try:
        actor = ray.get_actor(name, namespace=CLUSTER)
        announcement: Announcement = ray.get(actor.describe.remote(), timeout=ANSWER_S)
    except DataError as error:
        raise _cause(error) from None
    except (ValueError, RayError) as error:
        fix = "wait until its machine is back, or serve the dataset from another one"
        raise ClusterError("DATA061", f"the data node {name} doesn't answer", first_line(error), fix=fix) from None
    if announcement.protocol != PROTOCOL:
        problem = f"the data node {name} is of another release of hypha_ray"
        fix = "withdraw it and serve it again"
        raise DataError("DATA041", problem, f"protocol {announcement.protocol}", f"{PROTOCOL}", fix)
    manifest = parse_manifest(announcement.manifest.encode(), f"the manifest of {name}")
    return Replica(
        name=name,
        actor=actor,
        actor_id=announcement.actor_id,
        node_id=announcement.node_id,
        address=announcement.address,
        manifest=manifest,
        readers=announcement.readers,
    )


def _cause(error: DataError) -> DataError:
    """Error as an actor raised it, without the traceback that Ray adds."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, DataError):
        return cause
    return error


def look_up(dataset: str) -> tuple[list[Replica], list[LostReplica]]:
    """The data nodes of a dataset.

    Raises:
        DataError: there is no such dataset.

    """
    names_by_dataset = names()
    replicas = list[Replica]()
    lost_replicas = list[LostReplica]()
    if dataset not in names_by_dataset:
        raise unknown(dataset, names_by_dataset)
    for name in names_by_dataset[dataset]:
        try:
            replicas.append(described(name))
        except HyphaError as error:
            lost_replicas.append(LostReplica(name, error))
    return replicas, lost_replicas


def replicas_of(dataset: str) -> list[Replica]:
    """The data nodes of a dataset that answer; they serve the same samples, or all parts of a dataset.

    Raises:
        DataError: there is no such dataset, its data nodes serve different ones, or parts are missing.
        HyphaError: none of its data nodes serves it.

    """
    replicas, lost_replicas = look_up(dataset)
    if not replicas:
        raise lost_replicas[0].error
    require_equal(dataset, replicas)
    whole([replica.manifest for replica in replicas])
    return replicas


def require_equal(dataset: str, replicas: Sequence[Replica]) -> None:
    """Refuse data nodes of one name that serve different samples, or parts of different divisions.

    Raises:
        DataError: they serve different samples.

    """
    if not replicas:
        return
    first_replica = replicas[0]
    by_part = {first_replica.manifest.part: first_replica}
    for replica in replicas[1:]:
        if _division(replica.manifest) != _division(first_replica.manifest):
            raise _conflict(dataset, first_replica, replica)
        same_part = by_part.setdefault(replica.manifest.part, replica)
        if same_part.manifest.identity != replica.manifest.identity:
            raise _conflict(dataset, same_part, replica)


def _division(manifest: Manifest) -> int | None:
    """Number of parts of the dataset that a manifest is a part of; None if it is undivided."""
    return None if manifest.part is None else manifest.part[1]


def _conflict(dataset: str, first: Replica, second: Replica) -> DataError:
    """Error of two data nodes of one name that serve different samples."""
    first_node = f"{first.address} ({first.name})"
    second_node = f"{second.address} ({second.name})"
    problem = f"two datasets are served as {dataset!r}: on {first_node} and on {second_node}"
    fix = "withdraw one of them, or serve it under another --name"
    return DataError("DATA040", problem, _shown(second.manifest), _shown(first.manifest), fix)


def _shown(manifest: Manifest) -> str:
    identity = manifest.identity[:12]
    if manifest.part is None:
        return identity
    return f"{identity} (part {manifest.part[0]}/{manifest.part[1]})"


def unknown(dataset: str, served: Iterable[str]) -> DataError:
    """Error that no data node serves a dataset of that name."""
    similar = difflib.get_close_matches(dataset, [*served, *local_names()], n=1, cutoff=0.5)
    if similar:
        fix = f"did you mean {similar[0]!r}?"
    else:
        fix = "see `python jobs/data.py --list`, or serve it by `python jobs/data.py --serve DIR` on its machine"
    return DataError(
        "DATA001", f"neither a data node of this cluster nor a folder here has a dataset {dataset!r}", fix=fix
    )
