"""Files and flags become one job: precedence, values of flags, the training guide's shape, and the way back to TOML."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import Loaded, differences, job_of_run, load, resolved_toml
from hypha_ray.errors import ConfigError

Write = Callable[[str, str], str]
ROOT = Path(__file__).parents[3]

GUIDE = {
    "train-executor": """
        [[executors]]
        class = "train"
        name = "diloco-transformer"
        runtime = "process"
        cmd = "uv"
        args = [
            "run", "--no-project",
            "--with", "https://example.org/<version>/executor.whl",
            # a comment between the arguments
            "--", # N.B. ends the options
            "-m", "hypha.accelerate_executor.training",
            "--socket", "{SOCKET_PATH}",
            "--job", "{JOB_JSON}",
        ]
        """,
    "aggregate-executor": """
        [[executors]]
        class = "aggregate"
        name = "parameter-server"
        runtime = "parameter-server"
        """,
    "job": """
        [scheduler.job]
        dataset_name = "my-dataset"  # Must match data node announcement

        [scheduler.job.model]
        repository = "microsoft/resnet-50"
        type = "vision-classification"
        # For private models:
        # token = "hf_..."

        [scheduler.job.preprocessor]
        repository = "microsoft/resnet-50"

        [scheduler.job.inner_optimizer]
        learning_rate = 0.001
        schedule = "cosine-with-warmup"
        warmup_steps = 2000
        total_steps = 500000

        [scheduler.job.outer_optimizer]
        learning_rate = 0.7
        momentum = 0.9
        """,
    "resources": """
        [scheduler.job.resources]
        min_memory_mb = 8192
        min_gpus = 1
        gpu_type = "nvidia"  # or "amd", "any"
        """,
    "model-type": """
        [scheduler.job.model]
        repository = "microsoft/resnet-50"
        type = "vision-classification"
        """,
    "status-bridge": """
        [scheduler]
        status_bridge = "0.0.0.0:61000"
        """,
}
HYPHA = """
[scheduler.job]
type = "diloco"
[scheduler.job.model]
repository = "hypha-space/lenet"
filenames = ["config.json", "model.safetensors"]
type = "image-classification"
input_names = ["pixel_values", "labels"]
[scheduler.job.preprocessor]
repository = "hypha-space/lenet"
type = "image"
input_names = ["images"]
[scheduler.job.dataset]
dataset = "mnist"
[scheduler.job.rounds]
update_rounds = 100
avg_samples_between_updates = 1500
max_batch_size = 600
[scheduler.job.inner_optimizer]
learning-rate = 0.002
[scheduler.job.outer_optimizer]
learning-rate = 0.6
momentum = 0.8
[scheduler.job.resources]
num_workers = 3
worker = {gpu = 10.0, cpu = 2.0, memory = 1.5, storage = 1.0}
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        return str(path)

    return write


@pytest.mark.parametrize("example", GUIDE)
def test_load_every_example_of_the_training_guide_loads(example: str, write: Write) -> None:
    loaded = load(["@", write("guide.toml", GUIDE[example]), "--dry-run"])
    assert loaded.dry_run
    assert [note for note in loaded.notes if "executor" not in note] == []


def test_load_the_guide_as_a_whole_means_what_it_says(write: Write) -> None:
    arguments = [word for name, text in GUIDE.items() for word in ("@", write(f"{name}.toml", text))]
    loaded = load(arguments)
    job = loaded.job
    assert (job.model.repository, job.model.type) == ("microsoft/resnet-50", "vision-classification")
    assert (job.dataset.name, job.preprocessor.repository) == ("my-dataset", "microsoft/resnet-50")
    inner, outer = job.inner_optimizer, job.outer_optimizer
    assert (inner.learning_rate, inner.schedule) == (0.001, "cosine-with-warmup")
    assert (inner.warmup_steps, inner.total_steps) == (2000, 500000)
    assert (outer.learning_rate, outer.momentum) == (0.7, 0.9)
    assert job.telemetry.status_bridge == "0.0.0.0:61000"
    (needs,) = job.worker_groups
    assert (needs.gpu, needs.memory_gb, needs.gpu_type, needs.cpu) == (1.0, 8.192, "nvidia", 1.0)
    assert [note.split(": ", 1)[1] for note in loaded.notes] == [
        "executors is ignored: a Ray worker needs no executor command"
    ] * 2


def test_load_names_of_hypha_are_read_as_ours_and_noted(write: Write) -> None:
    loaded = load(["@", write("hypha.toml", HYPHA)])
    job = loaded.job
    assert job.dataset.name == "mnist"
    assert job.rounds.samples_between_updates == 1500
    assert (job.inner_optimizer.learning_rate, job.outer_optimizer.learning_rate) == (0.002, 0.6)
    assert (job.resources.worker.gpu, job.resources.worker.memory_gb) == (10.0, 1.5)
    assert job.model.input_names == ["pixel_values", "labels"]
    notes = "\n".join(loaded.notes)
    assert "hypha.toml:17: rounds.avg_samples_between_updates is read as rounds.samples_between_updates" in notes
    assert "hypha.toml:20: inner_optimizer.learning-rate is read as inner_optimizer.learning_rate" in notes
    for name in ("model.filenames", "preprocessor.type", "preprocessor.input_names", "resources.worker.storage"):
        assert f"{name} is ignored" in notes


def test_load_nothing_gives_the_defaults() -> None:
    assert load([]) == Loaded(Job())


def test_load_later_files_win_and_flags_win_over_files(write: Write) -> None:
    base = write("base.toml", "[rounds]\nupdate_rounds = 1\nmax_batch_size = 1\nsamples_between_updates = 1\n")
    over = write("over.toml", "[rounds]\nupdate_rounds = 2\nmax_batch_size = 2\n")
    loaded = load(["--rounds.update_rounds", "3", "@", base, f"@{over}"])
    rounds = loaded.job.rounds
    assert (rounds.update_rounds, rounds.max_batch_size, rounds.samples_between_updates) == (3, 2, 1)
    assert rounds.evaluate_every == Job().rounds.evaluate_every
    assert loaded.files == (base, over)
    assert load(["@", over, "@", base]).job.rounds.update_rounds == 1


def test_load_the_last_of_equal_flags_wins() -> None:
    assert load(["--run.seed", "1", "--run.seed=2"]).job.run.seed == 2


def test_load_model_config_is_merged_key_by_key(write: Write) -> None:
    base = write("base.toml", "[model.config]\nmodel_type = 'llama'\nhidden-size = 1\nrope = {type = 'x', base = 2}\n")
    over = write("over.toml", "model.config.rope.base = 3\n")
    job = load(["@", base, "@", over, "--model.config.layers", "4", "--model.config.rope.scale", "0.5"]).job
    rope = {"type": "x", "base": 3, "scale": 0.5}
    assert job.model.config == {"model_type": "llama", "hidden-size": 1, "rope": rope, "layers": 4}


@pytest.mark.parametrize("value", [None, "3", "[1, 2]"])
def test_load_model_config_value_gives_way_to_a_table_and_back(value: str | None, write: Write) -> None:
    base, over = write("base.toml", "model.config.a = 1\n"), write("over.toml", "model.config.a.b = 2\n")
    flags = [] if value is None else ["--model.config.a", value]
    config = load(["@", base, "@", over, *flags]).job.model.config
    assert config == {"a": {None: {"b": 2}, "3": 3, "[1, 2]": [1, 2]}[value]}


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--run.name", "123"], "run.name", "123"),
        (["--run.name=tiny-3"], "run.name", "tiny-3"),
        (["--dataset.path", "${HOME}/$(rm -rf ~)/{0}/`x`"], "dataset.path", "${HOME}/$(rm -rf ~)/{0}/`x`"),
        (["--dataset.path", 'a "b" \\n c'], "dataset.path", 'a "b" \\n c'),
        (["--dataset.path=--odd"], "dataset.path", "--odd"),
        (["--dataset.path=a=b"], "dataset.path", "a=b"),
        (["--dataset.path="], "dataset.path", ""),
        (["--dataset.name", "none"], "dataset.name", "none"),
        (["--run.seed", "1_000"], "run.seed", 1000),
        (["--run.seed", "0x10"], "run.seed", 16),
        (["--inner_optimizer.learning_rate", "1e-3"], "inner_optimizer.learning_rate", 1e-3),
        (["--inner_optimizer.learning_rate", "1"], "inner_optimizer.learning_rate", 1.0),
        (["--inner-optimizer.learning-rate", "0.5"], "inner_optimizer.learning_rate", 0.5),
        (["--inner_optimizer.betas", "0.8, 0.9"], "inner_optimizer.betas", (0.8, 0.9)),
        (["--inner_optimizer.betas", "[0.8, 0.9]"], "inner_optimizer.betas", (0.8, 0.9)),
        (["--inner_optimizer.clip_norm", "none"], "inner_optimizer.clip_norm", None),
        (["--sync.quorum", "none"], "sync.quorum", None),
        (["--sync.quorum", "auto"], "sync.quorum", "auto"),
        (["--sync.grace_s", "auto"], "sync.grace_s", "auto"),
        (["--sync.grace_s", "9"], "sync.grace_s", 9.0),
        (["--rl.reward.deadline_s", "2.5"], "rl.reward.deadline_s", 2.5),
        (["--rl.reward.deadline_s", "none"], "rl.reward.deadline_s", "none"),
        (["--worker.compile"], "worker.compile", True),
        (["--worker.compile", "--run.seed", "1"], "worker.compile", True),
        (["--worker.compile", "false"], "worker.compile", False),
        (["--worker.compile=true"], "worker.compile", True),
        (["--resources.worker.cpu", "0.5"], "resources.worker.cpu", 0.5),
        (["--resources.worker", "{cpu = 0.5, gpu = 1}"], "resources.worker.gpu", 1.0),
        (["--telemetry.sinks", '["jsonl"]'], "telemetry.sinks", ["jsonl"]),
        (["--telemetry.sinks", "jsonl,aim"], "telemetry.sinks", ["jsonl", "aim"]),
        (["--telemetry.sinks", "otel"], "telemetry.sinks", ["otel"]),
        (["--run.tags", "2026,long run,true,2026"], "run.tags", ["2026", "long run", "true"]),
        (["--run.tags", '["a", "2"]'], "run.tags", ["a", "2"]),
        (["--run.notes", "none, so far"], "run.notes", "none, so far"),
        (["--telemetry.sinks", ""], "telemetry.sinks", []),
        (["--model.input_names", "images,labels"], "model.input_names", ["images", "labels"]),
        (["--model.input_names", "none"], "model.input_names", None),
        (["--model.repository", "none"], "model.repository", None),
        (["--resources.worker.gpu_type", "none"], "resources.worker.gpu_type", None),
        (["--testing.slowdown", "1,2.5"], "testing.slowdown", [1.0, 2.5]),
        (["--telemetry.status_bridge", "[::1]:61000"], "telemetry.status_bridge", "[::1]:61000"),
        (["--dataset_name", "mnist"], "dataset.name", "mnist"),
        (["--scheduler.job.model.type", "ctc"], "model.type", "ctc"),
        (["--model.config.model_type", "gpt2"], "model.config", {"model_type": "gpt2"}),
        (["--model.config.hidden_size", "64"], "model.config", {"hidden_size": 64}),
        (["--model.config.tied", "true"], "model.config", {"tied": True}),
        (["--model.config.x", "1\ny = 2"], "model.config", {"x": "1\ny = 2"}),
        (["--model.config.x", "none"], "model.config", {"x": "none"}),
        (["--model.config", "{a = {b = 1}}"], "model.config", {"a": {"b": 1}}),
        (["--model.config.a", "1", "--model.config", "none"], "model.config", None),
    ],
)
def test_load_flag_is_parsed_by_the_type_of_its_key(arguments: list[str], name: str, value: object) -> None:
    found: Any = load(arguments).job
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_load_without_resume_begins_a_run(write: Write) -> None:
    assert load(["@", write("empty.toml", "")]).resume is False


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--dry-run"], True), (["--dry_run=true"], True), (["--dry-run=false"], False), ([], False)],
)
def test_dry_run_is_a_switch(arguments: list[str], expected: bool) -> None:
    assert load(arguments).dry_run is expected


@pytest.mark.parametrize("arguments", [["--resume"], ["--resume", "--dry-run"], ["--resume", "@", "FILE"]])
def test_load_resume_alone_means_the_run_of_that_name(arguments: list[str], write: Write) -> None:
    words = [write("empty.toml", "") if word == "FILE" else word for word in arguments]
    loaded = load(["--run.name", "mine", *words])
    assert loaded.resume is True and loaded.job.run.name == "mine"


def test_load_resume_without_any_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CFG015.*--resume names no run"):
        load(["--resume"])


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    """A run of a job file that differs from the defaults in a few keys."""
    directory = tmp_path / "runs" / "tiny-3"
    directory.mkdir(parents=True)
    job = load(["--run.seed", "5", "--rounds.update_rounds", "7", "--sync.quorum", "4", "--resources.num_workers", "4"])
    (directory / "config.toml").write_text(resolved_toml(job.job))
    return directory


def test_load_resume_of_a_run_lays_files_and_flags_over_its_own_job_file(a_run: Path, write: Write) -> None:
    asked: list[tuple[str, str | None, str | None]] = []

    def find_run(wanted: str, name: str | None, parent: str | None) -> Path:
        asked.append((wanted, name, parent))
        return a_run

    file = write("more.toml", "[rounds]\nupdate_rounds = 20\nmax_batch_size = 2\n")
    loaded = load(["--resume=tiny-3", "@", file, "--rounds.max_batch_size", "3", "--run.dir", "elsewhere"], find_run)
    assert asked == [("tiny-3", None, "elsewhere")]
    job = loaded.job
    assert loaded.resume is True and (job.run.name, job.run.dir) == ("tiny-3", str(a_run.parent))
    assert (job.run.seed, job.sync.quorum, job.num_workers) == (5, 4, 4)
    assert (job.rounds.update_rounds, job.rounds.max_batch_size) == (20, 3)


def test_load_resume_of_a_run_under_another_name_is_refused(a_run: Path) -> None:
    with pytest.raises(ConfigError, match=r"CFG011.*mean different runs: 'other'"):
        load(["--resume", str(a_run), "--run.name", "other"], lambda *_: a_run)
    assert load(["--resume", str(a_run), "--run.name", "tiny-3"], lambda *_: a_run).job.run.name == "tiny-3"


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ((), ("data/texts", "base"), ("THERE/data/texts", "THERE/base")),
        (("data/texts",), ("data/texts", "base"), ("data/texts", "THERE/base")),
        ((), (), ("data/texts", "base")),
    ],
    ids=["left behind", "moved in part", "gone"],
)
def test_files_of_a_run_that_are_not_here_are_those_where_it_was_started(
    a_run: Path, monkeypatch: pytest.MonkeyPatch, here: list[str], there: list[str], expected: list[str]
) -> None:
    """A run goes on, and is exported, from any folder; and nothing of that is a change of the job."""
    folders = {"HERE": a_run / "here", "THERE": a_run / "there"}
    for folder, names in ((folders["HERE"], here), (folders["THERE"], there)):
        folder.mkdir()
        for name in names:
            (folder / name).mkdir(parents=True)
    monkeypatch.chdir(folders["HERE"])
    flags = ["--dataset.path", "data/texts", "--model.repository", "base", "--preprocessor.repository", "org/hub-name"]
    (a_run / "config.toml").write_text(resolved_toml(load(flags).job))
    (a_run / "provenance.json").write_text(json.dumps({"folder": str(folders["THERE"])}))
    paths = [path.replace("THERE", str(folders["THERE"])) for path in expected]
    resumed = load(["--resume", str(a_run)], lambda *_: a_run).job
    assert [resumed.dataset.path, resumed.model.repository] == paths
    assert resumed.preprocessor.repository == "org/hub-name"
    of_run = job_of_run(a_run)
    assert [change.path for change in differences(resumed, of_run)] in ([], [("run", "name")])
    assert load(["--resume", str(a_run), "--dataset.path", "x"], lambda *_: a_run).job.dataset.path == "x"


@pytest.mark.parametrize("provenance", ["", "[]", '{"folder": 3}', "{}"])
def test_run_without_a_record_of_its_start_has_its_files_as_they_are_named(a_run: Path, provenance: str) -> None:
    (a_run / "config.toml").write_text(resolved_toml(load(["--dataset.path", "data/texts"]).job))
    (a_run / "provenance.json").write_text(provenance)
    assert job_of_run(a_run).dataset.path == "data/texts"


def test_load_resume_of_a_run_where_none_can_be_named_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CFG015.*--resume takes no value here"):
        load(["--resume", "tiny-3"])


def test_load_file_with_byte_order_mark_and_crlf_loads(write: Write) -> None:
    assert load(["@", write("windows.toml", "\ufeff[run]\r\nseed = 5\r\n")]).job.run.seed == 5


def test_load_text_that_looks_like_interpolation_is_taken_literally(write: Write) -> None:
    text = "${HOME} $(id) `id` {env:USER} %(x)s {{ x }}"
    job = load(["@", write("text.toml", f"dataset.path = '{text}'\n")]).job
    assert job.dataset.path == text
    assert load(["@", write("again.toml", resolved_toml(job))]).job == job


@pytest.mark.parametrize(("mode", "advice"), [(0o600, "it isn't stored"), (0o644, "chmod 600 the file")])
def test_load_secret_in_a_file_is_noted_and_shown_nowhere(mode: int, advice: str, write: Write) -> None:
    file = write("secret.toml", "[model]\nrepository = 'a/b'\ntoken = 'hf_secret'\n")
    Path(file).chmod(mode)
    loaded = load(["@", file])
    assert loaded.job.model.token is not None
    assert loaded.job.model.token.get_secret_value() == "hf_secret"
    assert len(loaded.notes) == 1
    assert f"CFG101: {file}:3: model.token is a secret in a file: {advice}" in loaded.notes[0]
    shown = [repr(loaded), str(loaded), resolved_toml(loaded.job), loaded.job.model_dump_json()]
    assert "hf_secret" not in "".join(shown)


def test_worker_needs_of_two_minima_the_larger_counts() -> None:
    flags = ["--resources.worker.gpu", "0.5", "--resources.min_gpus", "2", "--resources.worker.memory_gb", "9"]
    (needs,) = load([*flags, "--resources.min_memory_mb", "8000", "--resources.gpu_type", "amd"]).job.worker_groups
    assert (needs.gpu, needs.memory_gb, needs.gpu_type) == (2.0, 9.0, "amd")
    (own,) = load(["--resources.gpu_type", "any", "--resources.worker.gpu_type", "nvidia"]).job.worker_groups
    assert own.gpu_type == "nvidia"


@pytest.mark.parametrize("file", sorted(ROOT.glob("jobs/configs/*.toml")), ids=lambda file: file.name)
def test_load_job_files_of_the_repository_load_without_notes(file: Path) -> None:
    loaded = load(["@", str(file)])
    assert loaded.notes == ()
    assert loaded.job != Job()


@pytest.mark.parametrize(
    ("arguments", "labels"),
    [
        (["--model.num_labels", "5"], {"num_labels": 5}),
        (["--model.config.num_labels", "5"], {"num_labels": 5}),
        (["--model.id2label", '{0 = "no", 1 = "yes"}'], {"id2label": {"0": "no", "1": "yes"}}),
        (
            ["--model.problem-type", "regression", "--model.num-labels", "1"],
            {"problem_type": "regression", "num_labels": 1},
        ),
        (["--model.config.pad_token_id", "0"], {"pad_token_id": 0}),
    ],
)
def test_labels_and_special_tokens_may_stand_beside_a_repository(arguments: list[str], labels: dict[str, Any]) -> None:
    job = load(["--model.repository", "owner/name", *arguments]).job
    assert (job.model.repository, job.model.config) == ("owner/name", labels)


def test_labels_of_a_job_file_are_the_same_in_both_tables(write: Callable[[str, str], str]) -> None:
    ours = load(["@", write("a.toml", "[model]\nnum_labels = 3\n[model.id2label]\n0 = 'a'\n1 = 'b'\n2 = 'c'\n")])
    theirs = load(["@", write("b.toml", "[model.config]\nnum_labels = 3\nid2label = {0 = 'a', 1 = 'b', 2 = 'c'}\n")])
    assert ours.job == theirs.job
    assert load(["@", write("c.toml", resolved_toml(ours.job))]).job == ours.job
