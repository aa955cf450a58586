"""Keys that are set and have no effect are noted, and only those."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hypha_ray.config.keys import EACH, keys
from hypha_ray.config.load import CONFIG, load, resolved_toml

ROOT = Path(__file__).parents[3]
IDLE = [
    ("sync.period=3", "sync.strategy=async", "sync.strategy = 'diloco'"),
    ("sync.delayed_nesterov=false", "sync.strategy=async", "sync.strategy = 'diloco'"),
    ("sync.arrival_grace_s=1", "sync.strategy=async", "sync.strategy = 'diloco'"),
    ("sync.max_staleness=4", "sync.strategy=async", "sync.strategy = 'diloco'"),
    ("sync.stagger=false", "sync.fragments=2", "sync.fragments = 1"),
    ("sync.partition=strided", "sync.fragments=2", "sync.fragments = 1"),
    ("sync.grace_s=9", "sync.quorum=1", "no sync.quorum"),
    ("sync.trim=0.2", "sync.merge=trimmed_mean", "sync.merge = 'mean'"),
    ("inner_optimizer.muon_learning_rate=0.1", "inner_optimizer.name=muon", "inner_optimizer.name = 'adamw'"),
    ("inner_optimizer.muon_step_length=match_rms_adamw", "inner_optimizer.name=muon", "inner_optimizer.name = 'adamw'"),
    ("inner_optimizer.momentum=0.9", "inner_optimizer.name=sgd", "inner_optimizer.name = 'adamw'"),
    ("inner_optimizer.min_lr_rate=0.1", "inner_optimizer.schedule=linear", "inner_optimizer.schedule = 'constant'"),
    ("inner_optimizer.total_steps=9", "inner_optimizer.schedule=linear", "inner_optimizer.schedule = 'constant'"),
    ("outer_optimizer.betas=[0.8, 0.9]", "outer_optimizer.name=adam", "outer_optimizer.name = 'nesterov'"),
    ("outer_optimizer.epsilon=1e-6", "outer_optimizer.name=adam", "outer_optimizer.name = 'nesterov'"),
    ("outer_optimizer.final_learning_rate=0", "outer_optimizer.schedule=cosine", "outer_optimizer.schedule = 'const"),
    ("bridge.listen=0.0.0.0:4000", "bridge.commands=['']", "bridge.commands = []"),
    ("telemetry.aim_repository=runs", "telemetry.sinks=aim", "telemetry.sinks = ['console', 'jsonl'"),
    ("telemetry.trackers=all", "telemetry.sinks=tensorboard", "telemetry.sinks = ['console', 'jsonl'"),
    ("model.revision=main", "model.repository=a/b", "no model.repository"),
    ("model.trust_remote_code=true", "preprocessor.repository=a/b", "no model.repository"),
    ("sync.error_feedback=0.5", "sync.codec=int8", "sync.codec = 'fp32'"),
    ("preference.beta=0.5", "preference.loss=dpo", "no preference.loss"),
    ("preference.gamma=1", "preference.loss=simpo", "no preference.loss"),
    ("preference.desirable_weight=2", "preference.loss=kto", "no preference.loss"),
    ("dataset.cache_gb=5", "dataset.path=s3://bucket/texts", "no dataset.path"),
    ("preprocessor.revision=main", "preprocessor.repository=a/b", "no preprocessor.repository"),
]
"""A setting that does nothing by itself, one that gives it an effect, and why it has none without."""

IDLE_BESIDE = [
    ("sync.weighting=uniform", "sync.merge=median", "sync.merge = 'median'"),
    ("inner_optimizer.epsilon=1e-6", "inner_optimizer.name=sgd", "inner_optimizer.name = 'sgd'"),
    ("outer_optimizer.momentum=0.5", "outer_optimizer.name=average", "outer_optimizer.name = 'average'"),
    ("outer_optimizer.learning_rate=0.5", "outer_optimizer.name=average", "outer_optimizer.name = 'average'"),
    ("outer_optimizer.schedule=cosine", "outer_optimizer.name=average", "outer_optimizer.name = 'average'"),
    ("outer_optimizer.momentum=0.5", "outer_optimizer.name=adam", "outer_optimizer.name = 'adam'"),
    ("outer_optimizer.learning_rate=0.5", "sync.strategy=sync", "sync.strategy = 'sync'"),
    ("sync.dynamic_local_steps=false", "sync.strategy=sync", "sync.strategy = 'sync'"),
    ("sync.dynamic_local_steps=false", "run.mode=replay", "run.mode = 'replay'"),
    ("worker.compile=true", "bridge.commands=['a', 'b']", "bridge.commands = ['a', 'b']"),
    ("rounds.accumulation=2", "bridge.commands=['a', 'b']", "bridge.commands = ['a', 'b']"),
]
"""A setting with an effect of its own, one that takes it away, and the reason as it is shown."""


def notes(*settings: str) -> list[str]:
    return [note for note in load([f"--{setting}" for setting in settings]).notes if note.startswith("CFG103")]


@pytest.mark.parametrize(("setting", "other", "why"), IDLE)
def test_setting_without_effect_is_noted_until_another_gives_it_one(setting: str, other: str, why: str) -> None:
    (note,) = notes(setting)
    assert note.startswith(f"CFG103: --{setting.partition('=')[0]} has no effect beside {why}")
    assert notes(setting, other) == []


@pytest.mark.parametrize(("setting", "other", "why"), IDLE_BESIDE)
def test_setting_with_an_effect_is_noted_where_another_takes_it_away(setting: str, other: str, why: str) -> None:
    assert notes(setting) == []
    assert notes(setting, other) == [f"CFG103: --{setting.partition('=')[0]} has no effect beside {why}"]


def test_tables_of_an_array_without_effect_are_noted_each(tmp_path: Path) -> None:
    tasks = [f"rl.reward.tasks.{number}.name={name}" for number, name in enumerate("ab")]
    functions = [f"rl.reward.tasks.{number}.functions=exact" for number in range(2)]
    why = "has no effect beside no rl.algorithm"

    found = {note for note in notes(*tasks, *functions) if "functions" not in note}
    assert found == {f"CFG103: --rl.reward.tasks.{number}.name {why}" for number in range(2)}
    assert notes(*tasks, *functions, "rl.algorithm=grpo") == []


def test_models_that_no_reward_function_asks_are_noted() -> None:
    judge, model = "rl.reward.judge.model=grader", "rl.reward.model.batch_size=4"
    found = {note.partition(" ")[2] for note in notes("rl.algorithm=grpo", judge, model)}
    why = "has no effect beside rl.reward.functions = ['exact']"
    assert found == {f"--{setting.partition('=')[0]} {why}" for setting in (judge, model)}
    assert notes("rl.algorithm=grpo", 'rl.reward.functions=["judge", "model"]', judge, model) == []


@pytest.mark.parametrize("setting", ["rl.reward.processes=2", "rl.reward.deadline_s=5"])
def test_limits_of_reward_functions_that_have_none_are_noted(setting: str) -> None:
    (note,) = notes("rl.algorithm=grpo", 'rl.reward.functions=["exact", "format"]', setting)
    why = "rl.reward.functions = ['exact', 'format']"
    assert note == f"CFG103: --{setting.partition('=')[0]} has no effect beside {why}"
    for limited in ("math", "code", "own:reward"):
        assert notes("rl.algorithm=grpo", f'rl.reward.functions=["exact", "{limited}"]', setting) == []


def test_dropout_of_the_adapter_of_a_policy_is_noted() -> None:
    adapter = ("model.repository=a/b", "model.lora.rank=4", "model.lora.dropout=0.1")
    assert notes(*adapter) == notes(*adapter, "preference.loss=dpo") == []
    assert notes(*adapter, "rl.algorithm=grpo") == [
        "CFG103: --model.lora.dropout has no effect beside rl.algorithm = 'grpo'"
    ]


def test_settings_that_a_loss_of_preferences_does_not_read_are_noted() -> None:
    settings = ["preference.gamma=1", "preference.label_smoothing=0.1", "preference.undesirable_weight=2"]
    found = notes(*settings, "preference.loss=orpo", "preference.reference=dataset")
    assert len(found) == 4
    assert all("has no effect beside preference.loss = 'orpo'" in note for note in found)
    assert notes(*settings, "preference.loss=own:loss", "preference.reference=dataset") == []


def test_fragments_take_no_turns_asynchronously() -> None:
    (note,) = notes("sync.fragments=2", "sync.stagger=false", "sync.strategy=async")
    assert note == "CFG103: --sync.stagger has no effect beside sync.strategy = 'async'"


def test_setting_without_effect_is_noted_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[sync]\nstrategy = 'async'\nperiod = 4\n", encoding="utf-8")
    assert load(["@", str(file)]).notes == ()
    (note,) = load(["@", str(file), "--sync.strategy", "diloco"]).notes
    assert note == f"CFG103: {file}:3: sync.period has no effect beside sync.strategy = 'diloco'"


def test_job_file_that_a_run_keeps_has_notes_only_for_what_its_user_set(tmp_path: Path) -> None:
    for given, expected in (([], 0), (["--sync.trim", "0.2", "--outer_optimizer.schedule", "cosine"], 1)):
        (tmp_path / CONFIG).write_text(resolved_toml(load(given).job), encoding="utf-8")
        assert len(load(["--resume", str(tmp_path)], lambda *_: tmp_path).notes) == expected


def read_outside_of_the_configuration() -> set[str]:
    """Keys whose last name is read as an attribute in a file that speaks of their table, too."""
    files = [
        file for file in (ROOT / "hypha_ray").rglob("*.py") if file.parent.name != "config" or file.name in METHODS
    ]
    found = set()
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        spoken = {name.replace("_", "").lower() for name in attributes | names}
        read = (key for key in keys().values() if key.path[-1] in attributes)
        tables = {key.name: [part for part in key.path if part != EACH][-2].replace("_", "") for key in read}
        found |= {name for name, table in tables.items() if table in spoken}
    return found


METHODS = ("schema.py", "resources.py")
"""Modules of the configuration that compute something of a job for those that carry it out."""


@pytest.mark.slow
def test_every_key_is_read_where_the_job_is_carried_out_or_noted() -> None:
    assert {key.name for key in keys().values()} - read_outside_of_the_configuration() == set()
