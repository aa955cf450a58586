"""The link model against an exact max-min solution, written independently, and against times worked out by hand."""

from __future__ import annotations

import random

import pytest

from hypha_ray.config import Job
from hypha_ray.simulation.links import Links
from hypha_ray.simulation.scenario import BatchTimes, Head, MachineGroup, ModelSize, Scenario, Site
from hypha_ray.simulation.world import VirtualClock

Flow = tuple[int, str, int, float]
"""Machine, direction, bytes, and time of its beginning."""
MBPS = 1e6 / 8
"""Bytes per second."""


def scenario_of(groups: list[MachineGroup], sites: list[Site], head: Head) -> Scenario:
    return Scenario(
        name="net", job=Job(), model=ModelSize(parameters=1), machines=tuple(groups), sites=tuple(sites), head=head
    )


def group_of(
    count: int = 1, site: str | None = None, up: float | None = None, down: float | None = None
) -> MachineGroup:
    return MachineGroup(count=count, site=site, batch_s=BatchTimes(median=1), up_mbps=up, down_mbps=down)


def finishes(scenario: Scenario, flows: list[Flow]) -> list[float]:
    """Times at which the model ends each flow."""
    clock = VirtualClock()
    links = Links(scenario, clock)
    ends: dict[int, float] = {}

    def begin(index: int) -> None:
        machine, direction, size, _ = flows[index]
        links.send(machine, direction, size, lambda: ends.update({index: clock.now}))  # type: ignore[arg-type]

    for index, flow in enumerate(flows):
        clock.later(flow[3], lambda index=index: begin(index))  # type: ignore[misc]
    while len(ends) < len(flows):
        assert clock.advance(1e12), "a flow never ends"
    return [ends[index] for index in range(len(flows))]


def exact(capacities: dict[str, float], paths: list[list[str]], flows: list[Flow]) -> list[float]:
    """Times of the fluid max-min solution: each flow by itself, all rates anew at each beginning and end."""
    left = [float(flow[2]) for flow in flows]
    ends: dict[int, float] = {}
    now = 0.0
    while len(ends) < len(flows):
        active = [index for index, flow in enumerate(flows) if flow[3] <= now and index not in ends]
        rates = max_min(capacities, {index: paths[index] for index in active})
        arrivals = [flow[3] - now for flow in flows if flow[3] > now]
        completions = [left[index] / rates[index] for index in active]
        passed = min(arrivals + completions)
        now += passed
        for index in active:
            left[index] -= rates[index] * passed
            if left[index] <= 1e-6 * flows[index][2]:
                ends[index] = now
    return [ends[index] for index in range(len(flows))]


def max_min(capacities: dict[str, float], paths: dict[int, list[str]]) -> dict[int, float]:
    """Bottleneck by bottleneck: the link with the least share fixes the rates of its flows."""
    rates: dict[int, float] = {}
    spare = dict(capacities)
    while len(rates) < len(paths):
        shares: dict[str, float] = {}
        for link, capacity in spare.items():
            users = [index for index, path in paths.items() if link in path and index not in rates]
            if users:
                shares[link] = capacity / len(users)
        bottleneck = min(shares, key=lambda link: shares[link])
        for index, path in paths.items():
            if bottleneck in path and index not in rates:
                rates[index] = shares[bottleneck]
        for link in spare:
            used = sum(rate for index, rate in rates.items() if link in paths[index])
            spare[link] = max(0.0, capacities[link] - used)
    return rates


@pytest.mark.parametrize("seed", range(100))
def test_links_of_a_random_net_share_as_the_exact_solution_does(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c"][: rng.randint(1, 3)]
    sites = [Site(name=name, up_gbps=rng.uniform(0.01, 0.1), down_gbps=rng.uniform(0.01, 0.1)) for name in names]
    head = Head(site=rng.choice(names), up_gbps=rng.uniform(0.02, 0.2), down_gbps=rng.uniform(0.02, 0.2))
    groups = []
    for _ in range(rng.randint(1, 3)):
        groups.append(group_of(rng.randint(1, 4), rng.choice(names), rng.uniform(5, 60), rng.uniform(5, 60)))
    site_of = [group.site for group in groups for _ in range(group.count)]
    flows: list[Flow] = []
    for _ in range(rng.randint(2, 12)):
        begin = rng.choice([0.0, rng.uniform(0.0, 2.0)])
        flows.append((rng.randrange(len(site_of)), rng.choice(["up", "down"]), rng.randint(10**5, 10**7), begin))

    capacities: dict[str, float] = {"head up": head.up_gbps * 1000 * MBPS, "head down": head.down_gbps * 1000 * MBPS}
    for site in sites:
        capacities[f"{site.name} up"] = site.up_gbps * 1000 * MBPS
        capacities[f"{site.name} down"] = site.down_gbps * 1000 * MBPS
    machine = 0
    for group in groups:
        for _ in range(group.count):
            capacities[f"{machine} up"] = group.up_mbps * MBPS
            capacities[f"{machine} down"] = group.down_mbps * MBPS
            machine += 1
    paths = []
    for number, direction, _, _ in flows:
        other = {"up": "down", "down": "up"}[direction]
        path = [f"{number} {direction}", f"head {other}"]
        if site_of[number] != head.site:
            path += [f"{site_of[number]} {direction}", f"{head.site} {other}"]
        paths.append(path)

    assert finishes(scenario_of(groups, sites, head), flows) == pytest.approx(exact(capacities, paths, flows), rel=1e-3)


def test_transfer_alone_has_the_rate_of_the_narrowest_link() -> None:
    scenario = scenario_of([group_of(up=80)], [], Head(down_gbps=1))
    assert finishes(scenario, [(0, "up", 10_000_000, 0.0)]) == pytest.approx([1.0])


def test_transfers_share_the_head_and_speed_up_when_one_ends() -> None:
    # 10 MB/s for two: 5 MB/s each. The shorter one ends after 1 s; the other has 5 MB left, at 10 MB/s.
    scenario = scenario_of([group_of(2)], [], Head(down_gbps=0.08))
    flows = [(0, "up", 5_000_000, 0.0), (1, "up", 10_000_000, 0.0)]
    assert finishes(scenario, flows) == pytest.approx([1.0, 1.5])


def test_directions_do_not_share() -> None:
    scenario = scenario_of([group_of(up=80, down=80)], [], Head())
    flows = [(0, "up", 10_000_000, 0.0), (0, "down", 10_000_000, 0.0)]
    assert finishes(scenario, flows) == pytest.approx([1.0, 1.0])


def test_transfers_without_any_limit_end_at_once() -> None:
    scenario = scenario_of([group_of(2)], [], Head())
    assert finishes(scenario, [(0, "up", 10**12, 0.5), (0, "up", 10**12, 0.5)]) == [0.5, 0.5]


def test_cut_machine_waits_and_goes_on() -> None:
    clock = VirtualClock()
    links = Links(scenario_of([group_of(2, up=80)], [], Head()), clock)
    ends: dict[int, float] = {}
    for machine in (0, 1):
        links.send(machine, "up", 10_000_000, lambda machine=machine: ends.update({machine: clock.now}))  # type: ignore[misc]
    clock.later(0.25, lambda: links.set_cut(0, True))
    clock.later(3.0, lambda: links.set_cut(0, False))
    while len(ends) < 2:
        assert clock.advance(1e9)
    assert ends == pytest.approx({0: 3.75, 1: 1.0})


def test_cancelled_transfers_end_nothing_and_give_their_share_to_others() -> None:
    clock = VirtualClock()
    links = Links(scenario_of([group_of(2)], [], Head(down_gbps=0.08)), clock)
    ends: list[tuple[int, float]] = []
    for machine in (0, 1):
        links.send(machine, "up", 10_000_000, lambda machine=machine: ends.append((machine, clock.now)))  # type: ignore[misc]
    clock.later(1.0, lambda: links.cancel(0, "up"))
    while clock.advance(100.0):
        pass
    assert ends == [(1, pytest.approx(1.5))]


def test_many_transfers_end_as_the_sum_of_their_bytes_says() -> None:
    # 1000 equal transfers that begin within a second share a link that is never idle: the last ends after all bytes.
    rng = random.Random(1)
    scenario = scenario_of([group_of(1000, up=100)], [], Head(down_gbps=1))
    flows = [(machine, "up", 1_000_000, rng.uniform(0.0, 1.0)) for machine in range(1000)]
    ends = finishes(scenario, flows)
    first = min(flow[3] for flow in flows)
    assert max(ends) == pytest.approx(first + 1000 * 1_000_000 / (1000 * MBPS), rel=0.02)


def test_transfers_over_a_link_of_a_terabit_end_late_in_a_run() -> None:
    """Their last bytes take less time than the clock can tell."""
    flows: list[Flow] = [(index % 2, "up", 1_903_000, 1000.1 + 0.3 * index) for index in range(200)]
    ends = finishes(scenario_of([group_of(2, up=1e6)], [], Head()), flows)
    assert ends == pytest.approx([flow[3] + 1_903_000 / (1e6 * MBPS) for flow in flows], abs=1e-9)
