"""Proposals for jobs: they load behind the job's files, agree with its other settings, and rest on cited figures."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import from_tables, load
from hypha_ray.driver.preflight.checks import advice, check_settings
from hypha_ray.errors import ConfigError
from hypha_ray.simulation import proposal
from hypha_ray.simulation.advice_report import overlay_text
from hypha_ray.simulation.exchange import DECODE_GB_S, ENCODE_GB_S, Circumstances, Link, ModelShape
from hypha_ray.simulation.ladder import choose
from hypha_ray.simulation.options import batch_times, parse_advise, require_fast, split_arguments
from hypha_ray.simulation.proposal import (
    Evidence,
    Proposal,
    check_advisable,
    limits_of,
    long_samples,
    loss_beside_data_parallelism,
    proposals,
    with_proposals,
)
from tests.support.prose import ROOT

COMMUNICATION = (ROOT / "docs/communication.md").read_text(encoding="utf-8")
BASE = {"model": {"config": {"model_type": "gpt2"}}, "resources": {"num_workers": 8}, "rounds": {"max_batch_size": 8}}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replay": {"run": {"mode": "replay"}},
    "async": {"sync": {"strategy": "async"}},
    "bridged": {"bridge": {"commands": ["", ""]}},
    "short": {"rounds": {"update_rounds": 10, "samples_between_updates": 1024, "warmup_rounds": 3}},
    "adapter": {"model": {"repository": "some/model", "config": None, "lora": {"rank": 16}}},
    "average": {"outer_optimizer": {"name": "average"}},
    "scheduled": {"outer_optimizer": {"schedule": "cosine"}, "inner_optimizer": {"total_steps": 400}},
    "fragments": {"sync": {"fragments": 6, "in_flight": 3, "delay_steps": 2, "mixing": 0.5, "partition": "strided"}},
    "at-once": {"sync": {"fragments": 4, "stagger": False}},
    "median": {"sync": {"merge": "median", "codec": "int8", "error_feedback": 0.5}},
    "patient": {"rounds": {"patience": 5, "evaluate_every": 2}, "checkpoint": {"best": True, "every_rounds": 7}},
    "policies": {"rl": {"algorithm": "grpo"}},
    "groups": {"resources": {}, "workers": [{"count": 2, "gpu": 1}, {"count": 3}]},
    "one": {"resources": {"num_workers": 1}},
}
LINKS = (5, 20, 100, 1000, 10_000)
SIZES = ((0.48e6, 2), (150e6, 12), (1.1e9, 24), (10e9, None))


def tables(name: str) -> dict[str, Any]:
    merged = {table: dict(keys) for table, keys in BASE.items()}
    for table, keys in JOBS[name].items():
        if isinstance(keys, list) or not keys:
            merged[table] = keys
        else:
            merged[table] = {**merged.get(table, {}), **keys}
    model = merged["model"]
    if model.get("config", "") is None:
        del model["config"]
    return merged


def proposed(
    job: Job, parameters: float = 150e6, layers: int | None = 12, mbps: float = 100, fails_every_h: float | None = None,
    batch_s: Sequence[float] = (1.0,),
) -> list[Proposal]:  # fmt: skip
    link = Link(mbps, mbps, 0.02)
    case = Circumstances(ModelShape(int(parameters), layers), batch_times(batch_s, job), link, link, fails_every_h)
    return proposals(job, case, choose(case, limits_of(job), 0.1))


def advised(name: str, members: Sequence[Proposal], folder: Path) -> Job:
    import tomli_w

    base = folder / "job.toml"
    overlay = folder / "overlay.toml"
    base.write_text(tomli_w.dumps(tables(name)), encoding="utf-8")
    overlay.write_text(overlay_text(members, ["a heading"]), encoding="utf-8")
    loaded = load(["@", str(base), "@", str(overlay)])
    notes = [note for note in loaded.notes if "CFG103" in note and "overlay.toml" in note]
    assert notes == [], "a proposed key has no effect"
    return loaded.job


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_proposals_load_behind_the_job_and_pass_its_checks(name: str, tmp_path: Path) -> None:
    job = from_tables(tables(name))
    for mbps, (parameters, layers), fails_every_h in itertools.product(LINKS, SIZES, (None, 12.0)):
        members = proposed(job, parameters, layers, mbps, fails_every_h)
        with_them = advised(name, members, tmp_path)
        check_settings(with_them)
        assert with_proposals(job, members) == with_them
        for member in members:
            table, _, key = member.key.partition(".")
            assert getattr(getattr(with_them, table), key) == member.value
        assert [text for text in advice(with_them) if "momentum" in text or "dropped" in text] == []
        added = long_samples(with_them) - long_samples(job)
        assert 0 <= added < with_them.rounds.samples_between_updates


def test_short_run_keeps_ten_outer_steps_and_says_so() -> None:
    job = from_tables({**BASE, "rounds": {"update_rounds": 10, "samples_between_updates": 1024, "max_batch_size": 8}})
    values = {member.key: member.value for member in proposed(job, mbps=5)}
    assert values["rounds.update_rounds"] >= 10
    assert values["outer_optimizer.momentum"] <= 0.5


def test_interval_of_evaluations_stays_as_many_samples() -> None:
    job = from_tables({**BASE, "rounds": {"samples_between_updates": 64_000, "max_batch_size": 8, "evaluate_every": 1}})
    values = {member.key: member.value for member in proposed(job, 0.48e6, 2, 10_000)}
    samples = values["rounds.samples_between_updates"] * values["rounds.evaluate_every"]
    assert samples == pytest.approx(64_000, rel=0.05)


def test_unreliable_fleet_gets_a_quorum_and_a_time_that_covers_the_slowest() -> None:
    job = from_tables({**BASE})
    reliable = {member.key for member in proposed(job)}
    members = {member.key: member for member in proposed(job, fails_every_h=6, batch_s=[1, 1, 1, 1, 1, 1, 1, 4.0])}
    assert "sync.quorum" not in reliable
    assert members["sync.quorum"].value == 6
    assert members["sync.grace_s"].value >= 8
    assert "2.1 %" in members["sync.quorum"].evidence[0]


def test_unequal_but_reliable_fleet_gets_batches_by_speed_and_no_quorum() -> None:
    members = {member.key: member for member in proposed(from_tables({**BASE}), batch_s=[1, 1, 1, 1, 2, 2, 2, 2])}
    assert members["sync.dynamic_local_steps"].value is True
    assert "sync.quorum" not in members


def test_synchronous_steps_and_codecs_of_unknown_size_are_refused() -> None:
    for sync in ({"strategy": "sync"}, {"codec": "mine:Codec"}, {"downward_codec": "mine:Codec"}):
        with pytest.raises(ConfigError, match=r"CFG011.*Fix:"):
            check_advisable(from_tables({**BASE, "sync": sync}))


def test_overlay_is_toml_with_its_reasons_as_comments() -> None:
    members = [
        Proposal("sync.codec", "int4", "a reason " * 40, ("a figure (a source)",)),
        Proposal("rounds.update_rounds", 3, ""),
    ]
    text = overlay_text(members, ["first line", ""])
    assert tomllib.loads(text) == {"sync": {"codec": "int4"}, "rounds": {"update_rounds": 3}}
    assert text.startswith("# first line\n#\n")
    assert "# a figure (a source)\ncodec" in text
    assert max(map(len, text.splitlines())) <= 118


def test_coding_rates_are_those_of_the_page() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \|$", COMMUNICATION)
    assert {codec: float(encode) for codec, encode, _ in rows} == ENCODE_GB_S
    assert {codec: float(decode) for codec, _, decode in rows} == DECODE_GB_S


def test_figures_of_the_page_stand_there() -> None:
    cited = [
        value for value in vars(proposal).values() if isinstance(value, Evidence) and value.source == proposal.QUALITY
    ]
    assert len(cited) >= 5
    for figure in cited:
        (number,) = re.findall(r"\d\.\d+(?= %)?", figure.figure.replace("6.1 %", "1.061"))
        assert number in COMMUNICATION


def test_every_figure_has_a_source() -> None:
    figures = [value for value in vars(proposal).values() if isinstance(value, Evidence)]
    for figure in figures:
        assert re.search(r"arXiv \d{4}\.\d{5}|docs/\w+\.md", figure.source)
        assert figure.least_parameters <= figure.most_parameters


def test_figure_far_from_its_model_sizes_is_called_an_extrapolation() -> None:
    figure = Evidence("a figure", "a source", 150e6, 1e9)
    assert figure.text(400e6) == "a figure (a source)"
    assert "an extrapolation to 7 billion" in figure.text(7e9)
    assert "an extrapolation to 1 million" in figure.text(1e6)


def test_published_loss_is_named_only_near_what_was_measured() -> None:
    text = loss_beside_data_parallelism(2e9, 8)
    assert text is not None
    assert "+1.1 %" in text  # 2.351 ÷ 2.326
    assert loss_beside_data_parallelism(0.5e6, 8) is None
    assert loss_beside_data_parallelism(2e9, 1000) is None


def test_standard_output_is_a_value_of_an_option() -> None:
    own, of_job = split_arguments(["@", "tiny", "--link", "1gbit", "--json", "-", "--run.seed", "3"])
    assert own == ["--link", "1gbit", "--json", "-"] and of_job == ["@", "tiny", "--run.seed", "3"]


def test_link_is_refused_that_is_too_slow_for_the_model() -> None:
    link, slow = Link(100.0, 100.0, 0.01), Link(1e-3, 100.0, 0.01)
    model = ModelShape(300_000_000)  # 1.2 GB, which takes 111 days at a kilobit per second, up or down.
    require_fast(Circumstances(model, (1.0,), link, link))
    with pytest.raises(ConfigError, match=r"CFG003.*--link is too low for the model.*takes 111 days"):
        require_fast(Circumstances(model, (1.0,), slow, link))
    with pytest.raises(ConfigError, match=r"CFG003.*--head-link is too low for the model.*takes 111 days"):
        require_fast(Circumstances(model, (1.0,), link, slow))


def test_negative_value_of_an_option_is_its_value_and_not_a_flag() -> None:
    own, of_job = split_arguments(["--latency", "-5ms", "--batch-s", "1", "-2", "--run.seed", "3", "-x"])
    assert own == ["--latency", "-5ms", "--batch-s", "1", "-2"] and of_job == ["--run.seed", "3", "-x"]
    with pytest.raises(ConfigError, match=r"CFG003.*--overhead is out of range — got -0\.1, allowed 0\.001 to 0\.9"):
        parse_advise(["--link", "1gbit", "--overhead", "-0.1"], None)


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.00069, "0.069 %"), (0.1, "10 %"), (0.37, "37 %"), (0.9999, "100 %"), (1.0, "100 %"), (1.52, "152 %")],
)
def test_percentages_have_no_exponent(part: float, text: str) -> None:
    assert proposal.percent(part) == text
