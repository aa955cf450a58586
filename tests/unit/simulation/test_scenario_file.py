"""Scenario files: a mistake is one error with its line and the nearest key; sweeps, overrides, numbers of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.simulation.scenario_file import read_scenarios, scenario_names
from tests.support.plugins import Written, written
from tests.support.scenarios import EXACT, read_text

__all__ = ["written"]


def line_of(text: str, part: str) -> int:
    (number,) = [number for number, line in enumerate(text.split("\n"), 1) if part in line]
    return number


@pytest.mark.parametrize(
    ("old", "new", "code", "parts"),
    [
        ("parameters = 1.0e6", "paramters = 1.0e6", "CFG001", ["model.paramters", "did you mean model.parameters?"]),
        ("{ median = 1 }", "{ meadian = 1 }", "CFG001", ["batch_s.meadian", "did you mean machines.0.batch_s.median?"]),
        ("max_batch_size = 4", "max_batch_sise = 4", "CFG001", ["rounds.max_batch_sise", "rounds.max_batch_size"]),
        ("count = 2", 'count = "two"', "CFG002", ["machines.0.count", "'two'", "integer"]),
        ("up_mbps = 32", "up_mbps = -1", "CFG003", ["machines.0.up_mbps", "-1", "> 0"]),
        ("max_batch_size = 4", "max_batch_size = 0", "CFG003", ["rounds.max_batch_size", "0"]),
        (
            "batch_s = { median = 1 }",
            "batch_s = { median = 1, drift = 1.0 }",
            "CFG003",
            ["machines.0.batch_s.drift", "< 1"],
        ),
        ("count = 2", 'count = 2\nsite = "eu"', "CFG003", ["machines.0.site", "'eu'"]),
        ("price = 3.6", "price = 3.6\nfailures = { every_h = 1, kinds = {} }", "CFG003", ["failures.kinds"]),
        ("price = 3.6", 'price = 3.6\navailable = "t"\ndiurnal = { least = 1 }', "CFG011", ["available", "diurnal"]),
        ("parameters = 1.0e6", "parameters = 1.5", "CFG002", ["model.parameters", "1.5", "integer"]),
        ("count = 2", "count = 9223372036854775808", "CFG003", ["machines.0.count", "allowed 64 bits"]),
        ("count = 2", "count = 1_000_000_000", "CFG003", ["machines.0.count", "got 1000000000", "≤ 100000"]),
        ("batch_s = { median = 1 }", "batch_s = { median = 1e308 }", "CFG003", ["batch_s.median", "≤ 1000000000000"]),
        ("{ median = 1 }", "{ median = 1, jitter = 1000 }", "CFG003", ["machines.0.batch_s.jitter", "≤ 10"]),
        ("price = 3.6", "price = 1e308", "CFG003", ["machines.0.price", "1e+308"]),
        ("price = 3.6", "failures = { every_h = 1e308 }", "CFG003", ["machines.0.failures.every_h", "1e+308"]),
        ("price = 3.6", "failures = { kinds = { kill = 1e308 } }", "CFG003", ["machines.0.failures.kinds.kill"]),
        ("reduce_gb_s = 0.008", "reduce_gb_s = 1e-300", "CFG003", ["head.reduce_gb_s", "1e-300"]),
        ("parameters = 1.0e6", "parameters = 1.0e300", "CFG003", ["model.parameters", "1000000000000000"]),
        ("slice_samples = 1024", "slice_samples = 1\nsamples = 1.0e12", "CFG003", ["too many slices", "1000000000000"]),
        ("up_mbps = 32", "up_mbps = 1e-300", "CFG003", ["machines.0.up_mbps is too low", "4.00MB takes 3.7e+296 days"]),
        ("down_mbps = 64", "down_mbps = 3e-6", "CFG003", ["machines.0.down_mbps is too low", "4.00MB takes 123 days"]),
        ("reduce_gb_s = 0.008", "up_gbps = 3e-9", "CFG003", ["head.up_gbps is too low", "123 days", "up to 100 days"]),
        ("price = 3.6", "failures = { every_h = 1e-9 }", "CFG003", ["machines.0.failures.every_h", "≥ 0.001"]),
        ("price = 3.6", "stragglers = { share = 0.5, for_s = 1e-6 }", "CFG003", ["stragglers.for_s", "≥ 0.001"]),
        ("up_mbps = 32", 'up_mbps = "100mbit"', "CFG002", ["machines.0.up_mbps", "'100mbit'", "without a unit"]),
    ],
)
def test_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, code: str, parts: list[str]) -> None:
    text = EXACT.replace(old, new)
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, text)
    message = str(raised.value)
    assert raised.value.code == code
    assert raised.value.exit_code == 2
    assert f"scenario.toml:{line_of(text, new.splitlines()[-1])}: " in message or "\n" in new
    for part in parts:
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("rate", "parameters", "problem"),
    [
        (
            "reduce_gb_s = 1e-6",
            "5.0e9",
            "reduce_gb_s is too low .* got 1e-06 GB/s, .* a delta of 20.0GB takes 231 days",
        ),
        (
            "commit_mb_s = 1e-6",
            "5.0e6",
            "commit_mb_s is too low .* got 1e-06 MB/s, .* snapshot of 40.0MB takes 463 days",
        ),
    ],
)
def test_head_that_is_too_slow_for_the_model_is_refused(
    tmp_path: Path, rate: str, parameters: str, problem: str
) -> None:
    text = EXACT.replace("reduce_gb_s = 0.008", rate).replace("1.0e6", parameters)
    with pytest.raises(ConfigError, match=f"CFG003.*scenario.toml:{line_of(text, rate)}: head.{problem}"):
        read_text(tmp_path, text)


@pytest.mark.parametrize("key", ["varied", "zzz"])
def test_unknown_key_is_refused_and_only_keys_of_a_file_are_allowed(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"CFG001.*unknown key .*{key} — allowed name, seed") as raised:
        read_text(tmp_path, f"{key} = 3\n{EXACT}")
    assert "varied" not in str(raised.value).partition("allowed")[2]


def test_missing_key_is_named_with_its_meaning(tmp_path: Path) -> None:
    text = EXACT.replace("batch_s = { median = 1 }\n", "")
    with pytest.raises(ConfigError, match=r"CFG012.*machines\.0\.batch_s is missing"):
        read_text(tmp_path, text)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("[[job.workers]]\ncount = 2\n", "job.workers"),
        ('[job.rl]\nalgorithm = "grpo"\n', "job.rl.algorithm"),
        ('[job.run]\nmode = "replay"\n', "job.run.mode"),
        (
            "[job.worker]\nprobe_batch_size = true\n[job.resources.worker]\nmemory_gb = 1\n",
            "job.worker.probe_batch_size",
        ),
    ],
)
def test_job_that_cannot_be_simulated_is_refused(tmp_path: Path, table: str, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, EXACT + table)
    assert raised.value.code == "CFG011"
    assert key in str(raised.value)


UNSIZED = """
from hypha_ray.members.visible import Visible

class Mine(Visible):
    name = "mine"
"""


def test_codec_of_a_user_is_refused_only_if_its_size_depends_on_the_values(tmp_path: Path, written: Written) -> None:
    place = f"{written(UNSIZED)}:Mine"
    text = EXACT + f'[job.sync]\ncodec = "{place}"\n'
    with pytest.raises(ConfigError, match=rf"CFG003.*job.sync.codec has no known size — got {place}, allowed fp32"):
        read_text(tmp_path, text)
    with pytest.raises(ConfigError, match=r"PLG002.*not_here:Mine can't be loaded"):
        read_text(tmp_path, text.replace(place, "not_here:Mine"))
    place = f"{written('from hypha_ray.codec.formats import Bf16 as Mine')}:Mine"
    read_text(tmp_path, EXACT + f'[job.sync]\ncodec = "{place}"\n')


def test_more_workers_than_machines_are_refused(tmp_path: Path) -> None:
    text = EXACT + "[job.resources]\nnum_workers = 3\n"
    with pytest.raises(ConfigError, match=r"num_workers.*got 3, allowed up to 2"):
        read_text(tmp_path, text)


def test_samples_of_a_round_are_given_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"samples_per_worker.*samples_between_updates exclude each other"):
        read_text(tmp_path, "samples_per_worker = 4\n" + EXACT)


def test_unknown_name_names_the_nearest_scenario() -> None:
    with pytest.raises(ConfigError, match=r"CFG015.*did you mean three-regions\?"):
        read_scenarios("three-region")


def test_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CFG015\]: there is no such scenario.*or a TOML file"):
        read_scenarios(str(tmp_path / "absent.toml"))


def test_sweep_is_every_combination_in_order(tmp_path: Path) -> None:
    text = EXACT + '[sweep]\n"job.sync.codec" = ["fp32", "int4"]\n"machines.0.count" = [2, 3, 4]\nseed = [5]\n'
    scenarios = read_text(tmp_path, text)
    swept = [(scenario.job.sync.codec, scenario.machine_count) for scenario in scenarios]
    assert swept == [(codec, count) for codec in ("fp32", "int4") for count in (2, 3, 4)]
    assert {scenario.seed for scenario in scenarios} == {5}
    assert scenarios[0].varied == {"job.sync.codec": "fp32", "machines.0.count": 2, "seed": 5}


def test_keys_of_a_sweep_behind_a_comma_have_equal_values(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(EXACT + '[sweep]\n"machines.0.up_mbps, machines.0.down_mbps" = [10, 20]\n')
    rates = [(group.up_mbps, group.down_mbps) for scenario in read_scenarios(str(path)) for group in scenario.machines]
    assert rates == [(10, 10), (20, 20)]


def test_mistyped_key_of_a_sweep_is_named_with_its_line(tmp_path: Path) -> None:
    text = EXACT + '[sweep]\n"job.sync.codec" = ["fp32"]\n"model.paramters" = [1]\n'
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, text)
    assert f"scenario.toml:{line_of(text, 'paramters')}: model.paramters" in str(raised.value)
    assert "did you mean model.parameters?" in str(raised.value)


@pytest.mark.parametrize("key", ["modle.parameters", "machines.1.price"])
def test_key_of_a_sweep_in_a_table_that_is_not_there_is_named_with_its_line(tmp_path: Path, key: str) -> None:
    text = EXACT + f'[sweep]\n"{key}" = [1]\n'
    with pytest.raises(ConfigError, match=rf"scenario\.toml:{line_of(text, key)}: "):
        read_text(tmp_path, text)


@pytest.mark.parametrize("key", ["job.worker.compile", "job.inner_optimizer.learning_rate", "job.run.seed"])
def test_sweep_over_what_changes_nothing_is_refused(tmp_path: Path, key: str) -> None:
    text = EXACT + f'[sweep]\n"{key}" = [1, 2]\n'
    with pytest.raises(ConfigError, match=rf"SIM003.*:{line_of(text, key)}: {key} of the sweep changes nothing"):
        read_text(tmp_path, text)


def test_mistake_behind_a_comma_of_a_sweep_is_named_with_its_line(tmp_path: Path) -> None:
    text = EXACT + '[sweep]\nseed = [1]\n"machines.0.up_mbps, machines.0.down_mbs" = [10]\n'
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, text)
    assert f"scenario.toml:{line_of(text, 'down_mbs')}: machines.0.down_mbs" in str(raised.value)


def test_machines_in_one_table_are_asked_for_as_a_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowed list of tables\. Fix: write \[\[machines\]\]"):
        read_text(tmp_path, EXACT.replace("[[machines]]", "[machines]"))


@pytest.mark.parametrize(("values", "code"), [("2", "CFG002"), ("[]", "CFG003"), ("{}", "CFG002")])
def test_sweep_takes_lists_with_values(tmp_path: Path, values: str, code: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_text(tmp_path, EXACT + f"[sweep]\nseed = {values}\n")
    assert raised.value.code == code


def test_sweep_that_is_no_table_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scenario\.toml:1: sweep has the wrong type — got \[3\]"):
        read_text(tmp_path, "sweep = [3]\n" + EXACT)


def test_overrides_win_over_the_file_and_its_sweep(tmp_path: Path) -> None:
    text = EXACT + "[sweep]\nseed = [1]\n"
    (scenario,) = read_text(tmp_path, text, {"seed": 9, "rounds": 7, "machines.0.up_mbps": 5})
    assert scenario.seed == 9
    assert scenario.job.rounds.update_rounds == 7
    assert scenario.machines[0].up_mbps == 5


def test_points_of_a_sweep_that_differ_in_overridden_keys_alone_are_one_run(tmp_path: Path) -> None:
    text = EXACT + '[sweep]\nrounds = [1, 2, 3]\n"job.sync.codec" = ["fp32", "int4"]\n'
    scenarios = read_text(tmp_path, text, {"rounds": 7})
    assert [scenario.job.sync.codec for scenario in scenarios] == ["fp32", "int4"]
    assert {scenario.job.rounds.update_rounds for scenario in scenarios} == {7}


def test_mistyped_override_names_the_nearest_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key model\.paramters.*did you mean model\.parameters\?"):
        read_text(tmp_path, EXACT, {"model.paramters": 1})
    with pytest.raises(ConfigError, match=r"there is no machines\.3"):
        read_text(tmp_path, EXACT, {"machines.3.count": 1})


def test_workers_scale_groups_quorum_and_samples_alike() -> None:
    (whole,) = read_scenarios("spot-10000")
    (small,) = read_scenarios("spot-10000", {"workers": 100})
    assert [group.count for group in small.machines] == [50, 30, 20]
    assert small.workers == 100
    quorum = whole.job.sync.quorum
    assert quorum is not None
    assert small.job.sync.quorum == quorum // 100
    assert small.job.rounds.samples_between_updates * 100 == whole.job.rounds.samples_between_updates


def test_fewer_workers_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*got 2, allowed 3 or more"):
        read_scenarios("spot-10000", {"workers": 2})


def test_fleets_beyond_a_hundred_thousand_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*got 100001, allowed up to 100000.*fewer"):
        read_scenarios("spot-10000", {"workers": 100_001})
    text = EXACT.replace("count = 2", "count = 50_001")
    second = "[[machines]]\ncount = 50_000\nbatch_s = { median = 1 }\n"
    with pytest.raises(ConfigError, match=r"machines has too many machines — got 100001, allowed up to 100000"):
        read_text(tmp_path, text + second)


@pytest.mark.parametrize("name", scenario_names())
def test_scenario_of_the_package_is_what_its_name_says(name: str) -> None:
    scenarios = read_scenarios(name)
    assert {scenario.name for scenario in scenarios} == {name}
    _, _, number = name.rpartition("-")
    if number in ("1000", "10000"):
        assert {scenario.workers for scenario in scenarios} == {int(number)}
