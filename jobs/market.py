"""Show the machines of a Ray cluster with their owners' terms and leases, or change a machine's terms.

    python jobs/market.py                                       machines, terms, leases, prices, and what waits
    python jobs/market.py --offer --price 80 --floor 50         on the machine itself, or with --node
    python jobs/market.py --withdraw                            no further lease, and the present ones end
    python jobs/market.py --open                                let an exchange rule on runs that compete, until --close

Prices are per hour of the whole machine. An offer takes the place of the one before; for what it doesn't say, the
labels of `ray start --labels` hold. The cluster is the one of RAY_ADDRESS, by default the one that this machine is a
node of.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hypha_ray.config.entry_point import Phases, run, write_result
from hypha_ray.config.options import parse_options, refuse_strays
from hypha_ray.errors import ConfigError
from hypha_ray.market.leases import require_terms

OWNERS = {
    **dict.fromkeys(("price", "floor", "whole", "accepts", "max_lease_s", "throughput"), ("offer",)),
    "share": ("open",),
    "node": ("offer", "withdraw"),
}
"""Options that mean something beside others alone."""


@dataclass(frozen=True)
class Market:
    """Show a cluster's machines with terms and leases, or change a machine's terms."""

    offer: bool = False
    """post the terms that are given here"""
    price: float | None = None
    """price of the whole machine per hour"""
    floor: float | None = None
    """lowest bid for the whole machine per hour"""
    whole: bool = False
    """let the machine as a whole instead of in the parts that are asked for"""
    accepts: str | None = None
    """roles: worker, server or worker_server"""
    max_lease_s: float | None = None
    """longest lease in seconds"""
    throughput: float | None = None
    """speed of the whole machine, in a unit that all owners use"""
    withdraw: bool = False
    """let the machine no longer: its workers hand over their work and leave"""
    open: bool = False
    """open the exchange of the cluster"""
    share: Literal["bid", "fair"] | None = None
    """order at the exchange for --open: the highest bid first, or shares in the ratio of the bids; default: bid"""
    close: bool = False
    """close the exchange: leases stay"""
    node: str | None = None
    """address or beginning of the id of the machine for --offer or --withdraw; default: this one"""
    json: Path | None = None
    """file for all that is shown, as JSON; -: standard output"""

    def labels(self) -> dict[str, str]:
        """Labels of the terms that are given."""
        terms = {
            "price": self.price,
            "floor": self.floor,
            "offer": "whole" if self.whole else None,
            "accepts": self.accepts,
            "max_lease_s": self.max_lease_s,
            "throughput": self.throughput,
        }
        return {name: str(value) for name, value in terms.items() if value is not None}


def main() -> None:
    """Parse first, import later: `--help` and a mistyped flag answer at once."""
    options = parse_options(Market, __doc__, sys.argv[1:])
    actions = [f"--{name}" for name in ("offer", "withdraw", "open", "close") if getattr(options, name)]
    if len(actions) > 1:
        raise ConfigError("CFG011", f"{actions[0]} and {actions[1]} exclude each other", fix="give one of them")
    refuse_strays(options, OWNERS)
    require_terms(options.labels())
    phases = Phases()
    phases.begin("loading libraries")
    from hypha_ray.driver.cluster_offers import lines, overview, post
    from hypha_ray.driver.ray_cluster import connected, connecting
    from hypha_ray.market.auction import close_auction, open_auction

    phases.begin(f"{connecting('auto')} Ray")
    with connected("market", address_alone="auto"):
        phases.begin("asking the machines")
        if options.offer:
            print(post(options.node, options.labels()))
        elif options.withdraw:
            print(post(options.node, {"accepts": "none", "max_lease_s": "0"}))
        elif options.open:
            is_new = open_auction(options.share or "bid")
            print("the exchange is open" if is_new else "the exchange was open already")
        elif options.close:
            was_open = close_auction()
            print("the exchange is closed" if was_open else "no exchange was open")
        machines = overview()
        phases.end()
        if options.json is not None:
            write_result("--json", options.json, json.dumps(machines, indent=1) + "\n")
        if not actions:
            print(*lines(machines), sep="\n")


if __name__ == "__main__":
    run(main)
