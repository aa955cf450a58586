"""Members that users bring, in a job: its file, its checks before the start, its identity, and its sinks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.config.checks import plugin_uses
from hypha_ray.config.keys import keys
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.driver.preflight.checks import check_plugins
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model.sources import changes, identity_of, is_replaceable, require_same
from hypha_ray.telemetry.sinks.base import build
from tests.support.plugins import Written, install

LINES = """
import json
from hypha_ray.plugins import Options

class Lines:
    class Options(Options):
        kinds: list[str] = ["round"]

    def __init__(self, place, options):
        self.path, self.kinds = place.directory / f"{place.run}.lines", options.kinds
    def start(self, config):
        self.file = self.path.open("w")
    def record(self, record):
        if record["kind"] in self.kinds:
            self.file.write(json.dumps(record) + "\\n")
    def event(self, event): pass
    def summary(self, figures): pass
    def close(self):
        self.file.close()
"""


def job_of(sink: str, **options: object) -> Job:
    return Job.model_validate({"telemetry": {"sinks": ["jsonl", sink], "sinks_options": options or None}})


def test_job_file_names_a_sink_and_its_options(tmp_path: Path, written: Written) -> None:
    name = f"{written(LINES)}:Lines"
    file = tmp_path / "job.toml"
    file.write_text(f'[telemetry]\nsinks = ["{name}"]\n[telemetry.sinks_options."{name}"]\nkinds = ["eval"]\n')
    job = load(["@", str(file)]).job
    (use,) = plugin_uses(job)
    assert (use.family, use.key, use.name, use.options) == ("sinks", "telemetry.sinks", name, {"kinds": ["eval"]})
    check_plugins(job)
    (tmp_path / "resolved.toml").write_text(resolved_toml(job))
    assert load(["@", str(tmp_path / "resolved.toml")]).job == job


def test_names_that_help_shows_are_those_of_the_table() -> None:
    kind = keys()["telemetry", "sinks"].kind
    assert kind.startswith("list of console | jsonl | prometheus") and kind.endswith("mlflow | trackio | module:object")


@pytest.mark.parametrize("key", ["sync.codec", "model.loss", "outer_optimizer.name"])
def test_name_of_a_package_that_is_not_here_has_its_installation_as_remedy(key: str) -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*got 'of_a_package'.*or install the package that has it"):
        load([f"--{key}", "of_a_package"])


def test_mistyped_name_of_a_package_has_those_of_packages_as_remedy(tmp_path: Path, written: Written) -> None:
    install(tmp_path, "schedules", "sawtooth", f"{written('def saw(step, steps): return 1.0')}:saw")
    with pytest.raises(ConfigError, match=r"CFG003.*allowed .* sawtooth \| module:object\. Fix: write sawtooth"):
        load(["--inner_optimizer.schedule", "sawtoth"])


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("jsonl", {"jsonl": {"x": 1}}, r"CFG001.*telemetry sink jsonl has no options — got x"),
        ("jsonl", {"jsonll": {"x": 1}}, r"CFG001.*no such sink in telemetry.sinks.*did you mean `jsonl`"),
        ("not_here:Sink", {}, r"PLG002.*not_here:Sink can't be loaded.*ModuleNotFoundError"),
    ],
)
def test_job_with_a_wrong_sink_is_refused_before_the_start(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_plugins(job_of(name, **options))


def test_sink_of_a_user_gets_records_beside_the_files(tmp_path: Path, written: Written) -> None:
    name = f"{written(LINES)}:Lines"
    sinks = build(tmp_path, "fleet", ["jsonl", name], options={name: {"kinds": ["eval"]}}, patience_s=60.0)
    sinks.start({})
    for record in ({"kind": "round", "round": 0}, {"kind": "eval", "round": 0, "val_loss": 2.0}):
        sinks.record(record)
    sinks.close()
    lines = (tmp_path / "fleet.lines").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"kind": "eval", "round": 0, "val_loss": 2.0}]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert sinks.losses()[name] == {"failed": 0, "dropped": 0}


def test_sink_that_cannot_be_made_harms_no_other_sink(tmp_path: Path, written: Written) -> None:
    broken = LINES.replace("self.path, self.kinds =", "raise OSError('gone')\n        _ =")
    sinks = build(tmp_path, "run-1", ["jsonl", f"{written(broken)}:Lines", f"{written(LINES)}:Lines"])
    sinks.start({})
    sinks.record({"kind": "round", "round": 0})
    sinks.close()
    assert json.loads((tmp_path / "run-1.lines").read_text())["round"] == 0
    assert any("can't be started yet (OSError: gone)" in problem for problem in sinks.problems())


def test_source_of_a_member_is_part_of_the_runs_identity(tmp_path: Path, written: Written) -> None:
    module = written(LINES)
    job = job_of(f"{module}:Lines")
    before = identity_of(job)
    (tmp_path / f"{module}.py").write_text(LINES + "\n")
    (changed,) = changes(identity_of(job), before)
    assert changed == f"telemetry.sinks {module}:Lines" and is_replaceable(changed)
    with pytest.raises(CheckpointError, match=r"CKPT007.*:Lines.*--resume goes on"):
        require_same(job, before)


def test_source_behind_a_key_that_defines_the_training_cannot_be_replaced() -> None:
    assert is_replaceable("telemetry.sinks mine:Sink") and is_replaceable("rl.reward.model.repository")
    assert is_replaceable("trainer 'python train.py'")
    assert not is_replaceable("model.repository") and not is_replaceable("dataset's tokenizer")
