"""Serve a prepared dataset to all jobs of a Ray cluster, from the machine where it lies.

    python jobs/data.py --serve ~/hypha_ray/datasets/stdlib --name stdlib     on the machine that has the folder
    python jobs/data.py --list                                                anywhere in the cluster
    python jobs/data.py --check stdlib                                        read and check all slices where they lie
    python jobs/data.py --withdraw stdlib

A job asks for it by `--dataset.name stdlib`. The dataset is served until it is withdrawn or the cluster ends, also
while no job runs. It may be served from several machines; jobs then read from the nearest one, and from another one if
that fails. The cluster is the one of RAY_ADDRESS, by default the one that this machine is a node of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config.entry_point import Phases, run, write_result
from hypha_ray.config.options import parse_options, refuse_strays
from hypha_ray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hypha_ray.scheduler.runtime.data_nodes import Replica


@dataclass(frozen=True)
class Data:
    """Serve a prepared dataset to all jobs of a Ray cluster, from the machine where it lies."""

    serve: str | None = None
    """folder of a prepared dataset to serve from this machine, or its URL"""
    name: str | None = None
    """name for --serve, by which jobs ask for the dataset; default: the folder's name"""
    node: str | None = None
    """address or beginning of the id of the node for --serve or --withdraw; default: this machine, or all nodes"""
    list: bool = False
    """list the data nodes of the cluster"""
    withdraw: str | None = None
    """name of a dataset to serve no longer"""
    check: str | None = None
    """name of a dataset whose slices are to be read and checked on its data nodes"""
    json: Path | None = None
    """file for the list, as JSON; -: standard output"""


def main() -> None:
    """Parse first, import later: `--help` and a mistyped flag answer at once."""
    options = parse_options(Data, __doc__, sys.argv[1:])
    actions = sum([options.serve is not None, options.list, options.withdraw is not None, options.check is not None])
    if actions != 1:
        allowed = "--serve, --list, --withdraw or --check"
        raise ConfigError("CFG012", "one thing has to be done", f"{actions} of them", allowed, "see --help")
    refuse_strays(options, {"name": ("serve",), "node": ("serve", "withdraw"), "json": ("list",)})
    from hypha_ray.config.value_types import CLUSTER, is_malformed, malformed

    if options.serve is not None and is_malformed(options.serve):
        raise malformed(options.serve)
    phases = Phases()
    phases.begin("loading libraries")
    from hypha_ray.driver.cluster_offers import serve, withdraw
    from hypha_ray.driver.ray_cluster import connected, connecting

    phases.begin(f"{connecting('auto')} Ray")
    with connected(CLUSTER, address_alone="auto"):
        phases.begin(doing(options))
        if options.serve is not None:
            replica = serve(options.serve, options.name, options.node)
            print(f"{replica.name} on {replica.address}: {size(replica)}")
        elif options.withdraw is not None:
            for name in withdraw(options.withdraw, options.node):
                print(f"withdrawn: {name}")
        elif options.check is not None:
            check(options.check)
        else:
            show(options.json)
    phases.end()


def doing(options: Data) -> str:
    """Words for what is asked of the data nodes."""
    if options.serve is not None:
        return "starting a data node, which reads the dataset"
    if options.check is not None:
        return "reading all slices"
    return "asking the data nodes"


def show(file: Path | None) -> None:
    """Print a line for each data node, and write them to a file."""
    from hypha_ray.driver.cluster_offers import served

    rows: list[dict[str, Any]] = []
    for dataset, (replicas, lost) in served().items():
        for replica in replicas:
            readers = f", read by {', '.join(replica.readers)}" if replica.readers else ""
            print(f"{dataset:<20} {replica.address:<16} {size(replica)}{readers}")
            rows.append({"dataset": dataset, "answers": True, **row(replica)})
        for lost_node in lost:
            error = lost_node.error
            print(f"{dataset:<20} {error}")
            rows.append({"dataset": dataset, "answers": False, "name": lost_node.name, "reason": error.what})
        conflict = conflict_of(dataset, replicas)
        if conflict is not None:
            print(f"{dataset:<20} {conflict}")
    if not rows:
        print("no dataset is served")
    if file is not None:
        write_result("--json", file, json.dumps(rows, indent=1) + "\n")


def conflict_of(dataset: str, replicas: Sequence[Replica]) -> DataError | None:
    """Error that data nodes of one name serve different samples, as after a folder was prepared anew; None if not."""
    from hypha_ray.scheduler.runtime.data_nodes import require_equal

    try:
        require_equal(dataset, replicas)
    except DataError as error:
        return error
    return None


def check(dataset: str) -> None:
    """Read all slices where they lie, and say what is damaged.

    Raises:
        DataError: there are damaged slices.

    """
    from hypha_ray.driver.cluster_offers import problems
    from hypha_ray.scheduler.runtime.data_nodes import look_up

    replicas, _ = look_up(dataset)
    problems_by_node = problems(replicas)
    damaged = 0
    for replica in replicas:
        node = f"{replica.name} on {replica.address}"
        texts = problems_by_node[replica.name]
        for text in texts:
            print(f"{node}: {text}")
        damaged += len(texts)
        print(f"{node}: {len(texts)} damaged of {size(replica)}")
    if damaged:
        raise DataError("DATA043", f"dataset {dataset!r} has damaged slices", f"{damaged}", "0", "copy them again")


def row(replica: Replica) -> dict[str, Any]:
    """Facts about a data node, for programs."""
    return {
        "name": replica.name,
        "node_id": replica.node_id,
        "address": replica.address,
        "slices": len(replica.manifest.slices),
        "bytes": tensor_bytes(replica),
        "identity": replica.manifest.identity,
        "readers": list(replica.readers),
    }


def size(replica: Replica) -> str:
    """Size of a data node's dataset, and its fingerprint."""
    slices = len(replica.manifest.slices)
    size_gb = tensor_bytes(replica) / 1e9
    return f"{slices:,} slices, {size_gb:,.3f} GB, {replica.manifest.identity[:12]}"


def tensor_bytes(replica: Replica) -> int:
    """Bytes of all tensors of a dataset."""
    samples = sum(info.samples for info in replica.manifest.slices)
    return samples * replica.manifest.sample_bytes


if __name__ == "__main__":
    run(main)
