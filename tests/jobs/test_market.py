"""Owners' prices as users see them: offers in a dry run, a machine that gets dearer, refusals, and a run that pays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from hypha_ray.config.load import resolved_toml
from tests.jobs.test_guide_examples import EXAMPLES
from tests.support.clusters import cluster_of
from tests.support.job_scripts import Jobs
from tests.support.jobs import job_of
from tests.support.prose import ROOT

TERMS = ({"price": "5"}, {"price": "1"}, {"price": "2"}, {"price": "3", "floor": "200"}, {"price": "4"})
THREE = ("--resources.num-workers", "3", "--resources.worker-price.bid", "100", "--dry-run")


@pytest.fixture(scope="module")
def market() -> Iterator[tuple[str, list[str]]]:
    """Address of a cluster, and ids of its five nodes with owners' terms."""
    with cluster_of([{"num_cpus": 1, "labels": terms} for terms in TERMS]) as cluster:
        asked = {node["Labels"].get("price"): node["NodeID"] for node in ray.nodes()}
        yield cluster.address, [asked[terms["price"]] for terms in TERMS]


@pytest.mark.long
def test_dry_run_lists_every_offer_and_follows_an_owner_that_raises_a_price(
    run_job: Jobs, market: tuple[str, list[str]]
) -> None:
    (address, nodes), host = market, market[0].partition(":")[0]

    def verdicts() -> tuple[list[str], str]:
        done = run_job(*THREE, env={"RAY_ADDRESS": address})
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        told = {node: line for node in nodes for line in lines if line.startswith(f"  {host} ({node[:8]}): ")}
        return [told[node].partition("): ")[2] for node in nodes], lines[-2]

    assert verdicts() == (
        [
            "5 an hour each, room for 1; none chosen",
            "1 an hour each, room for 1; 1 chosen",
            "2 an hour each, room for 1; 1 chosen",
            "refused, the bid 100 is below its floor, 200",
            "4 an hour each, room for 1; 1 chosen",
        ],
        "price: 7.00 an hour",
    )
    words = ("--offer", "--price", "9", "--node", nodes[1])
    posted = run_job(*words, script="market", env={"RAY_ADDRESS": address})
    assert posted.stdout == f"{host} ({nodes[1][:8]}): price 9.0\n"
    answers, price = verdicts()
    assert [answer.rpartition("; ")[2] for answer in answers[:3]] == ["1 chosen", "none chosen", "1 chosen"]
    assert (answers[4].rpartition("; ")[2], price) == ("1 chosen", "price: 11.00 an hour")
    run_job("--offer", "--price", "1", "--node", nodes[1], script="market", env={"RAY_ADDRESS": address})


@pytest.mark.parametrize(
    ("bid", "limit", "code", "error"),
    [
        (
            "0.5",
            "0.5",
            75,
            "error[CFG004]: no node is cheap enough — got 1 per hour at the cheapest, allowed 0.5. Fix: ",
        ),
        ("2", "1", 2, "error[CFG003]: "),
    ],
)
def test_price_that_no_owner_takes_is_refused_before_anything_starts(
    run_job: Jobs, market: tuple[str, list[str]], bid: str, limit: str, code: int, error: str
) -> None:
    prices = ("--resources.worker-price.bid", bid, "--resources.worker-price.max", limit)
    done = run_job(*prices, "--dry-run", env={"RAY_ADDRESS": market[0]})
    assert (done.returncode, done.stderr.splitlines()[-1][: len(error)]) == (code, error)
    assert "Traceback" not in done.stderr and not run_job.home.exists()


def test_run_with_the_guides_prices_pays_what_its_machines_ask(
    run_job: Jobs, market: tuple[str, list[str]], corpus: Path, tmp_path: Path
) -> None:
    """The example's server reserves a CPU too: it has the cheapest machine, and the workers the next two."""
    prices, job = tmp_path / "prices.toml", tmp_path / "job.toml"
    prices.write_text(EXAMPLES["prices"][0])
    job.write_text(resolved_toml(job_of("paid", corpus, rounds={"update_rounds": 3, "evaluate_every": 0})))
    done = run_job("@", job, "@", prices, env={"RAY_ADDRESS": market[0]})
    assert done.returncode == 0, done.stderr
    run = Path(done.stdout.splitlines()[-1].removeprefix("run: "))
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    leases = {line["node"]: line["price"] for line in lines if line["kind"] == "lease"}
    assert leases == {market[1][2]: 2.0, market[1][4]: 4.0}
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    paid = [record["cost"] for record in rounds if record["kind"] == "round"]
    summary = json.loads((run / "summary.json").read_text())
    assert len(paid) == 3 and 0 < sum(paid) <= summary["cost"]
    seconds = max(line["monotonic_s"] for line in lines) - min(line["monotonic_s"] for line in lines)
    assert summary["cost"] <= 7.0 * seconds / 3600


def test_documentation_can_be_followed_as_written(run_job: Jobs, market: tuple[str, list[str]], tmp_path: Path) -> None:
    text = (ROOT / "docs" / "market.md").read_text(encoding="utf-8")
    job, address = tmp_path / "job.toml", {"RAY_ADDRESS": market[0]}
    job.write_text(text.partition("```toml\n")[2].partition("```")[0])
    planned = run_job("@", job, "--dry-run", env=address)
    assert (planned.returncode, planned.stdout.splitlines()[-2]) == (0, "price: 12.00 an hour"), planned.stderr
    commands = [line.partition("#")[0].split()[2:] for line in text.splitlines() if line.startswith("python jobs/m")]
    answers = [run_job(*words, script="market", env=address) for words in commands]
    assert [answer.returncode for answer in answers] == [0] * len(commands)
    told = [answer.stdout.strip().rpartition("): ")[2] for answer in answers]
    assert told == [
        "floor 50.0, price 90.0",
        "accepts none, max_lease_s 0",
        "the exchange is open",
        "the exchange was open already",
        "the exchange is closed",
    ]
