"""The Python interface: what a notebook shows of runs, callbacks, and messages without flags. Nothing is trained."""

from __future__ import annotations

import html
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hypha_ray
from hypha_ray.config.load import Loaded
from hypha_ray.config.schema import Job
from hypha_ray.driver import launch
from hypha_ray.driver.evaluation import find_model
from hypha_ray.driver.training import flagless, in_python
from hypha_ray.errors import CheckpointError, ConfigError, HyphaError
from hypha_ray.history.report import report_of
from hypha_ray.store.snapshots import write_snapshot
from hypha_ray.telemetry.sinks.files import NewRecords

ROUNDS = [
    {"kind": "round", "round": 0, "loss": 4.0, "rounds": 3, "workers": 2, "batches": {"0": 3, "1": 5}},
    {"kind": "step", "round": 1, "worker": 0, "loss": 3.5},
    {"kind": "eval", "round": 0, "val_loss": 4.25},
    {"kind": "round", "round": 1, "loss": 3.25, "rounds": 3, "workers": 2, "batches": {"0": 4, "1": 4}},
]
WRONG_TYPES: list[tuple[str, Callable[[hypha_ray.Run], object]]] = [
    ("run has the wrong type — got 3", lambda run: hypha_ray.Run(3)),  # type: ignore[arg-type]
    ("folder has the wrong type — got 3", lambda run: hypha_ray.runs(3)),  # type: ignore[arg-type]
    ("kind has the wrong type — got 3", lambda run: run.events(3)),  # type: ignore[arg-type]
    ("folder has the wrong type — got 3", lambda run: run.export(3)),  # type: ignore[arg-type]
    ("round has the wrong type — got True, allowed a whole number", lambda run: run.export(round=True)),
    ("round has the wrong type — got '2'", lambda run: run.load_model("2")),  # type: ignore[arg-type]
    ("dataset has the wrong type — got None", lambda run: run.evaluate(None)),  # type: ignore[arg-type]
    ("batch_size has the wrong type — got 'x'", lambda run: run.evaluate("d", batch_size="x")),
    ("metrics has the wrong type — got 'm:f', allowed a list", lambda run: run.evaluate("d", metrics="m:f")),
    ("prompt has the wrong type — got None", lambda run: run.generate(None)),  # type: ignore[arg-type]
    ("raw has the wrong type — got 'x'", lambda run: run.generate("a", raw="x")),  # type: ignore[arg-type]
    ("top_k has the wrong type — got 1.5", lambda run: run.generate("a", top_k=1.5)),  # type: ignore[arg-type]
    ("top_p has the wrong type — got 'x'", lambda run: run.generate("a", top_p="x")),  # type: ignore[arg-type]
    ("job has the wrong type — got 3", lambda run: hypha_ray.train(3)),  # type: ignore[call-overload]
    ("wait has the wrong type — got 'no'", lambda run: hypha_ray.train(JOB, wait="no")),  # type: ignore[call-overload]
    ("callbacks has the wrong type", lambda run: hypha_ray.train(JOB, callbacks=Told())),  # type: ignore[call-overload]
    ("Fix: write Told(), an object of the class", lambda run: hypha_ray.train(JOB, callbacks=[Told])),  # type: ignore[list-item]
    ("callbacks[1] has the wrong type", lambda run: hypha_ray.train(JOB, callbacks=[Told(), print])),  # type: ignore[list-item]
]
EVENTS = [{"kind": "join", "worker": 0}, {"kind": "loss", "worker": 1, "reason": "killed"}]


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hypha_ray.Run:
    """A run of two rounds, as it lies on disk."""
    monkeypatch.setenv("HYPHA_RAY_HOME", str(tmp_path))
    folder = tmp_path / "texts-1"
    folder.mkdir()
    (folder / "config.toml").write_text('[run]\nname = "texts-1"\n[rounds]\nupdate_rounds = 3\n')
    (folder / "metrics.jsonl").write_text(lines(ROUNDS))
    (folder / "events.jsonl").write_text(lines(EVENTS))
    an_hour_ago = time.time() - 3600
    for file in folder.iterdir():
        os.utime(file, (an_hour_ago, an_hour_ago))
    return hypha_ray.Run("texts-1")


def test_tab_shows_the_interface_and_every_name_of_it_is_there() -> None:
    assert {"train", "Run", "runs", "Callback", "Training", "StopTraining"} <= set(dir(hypha_ray))
    assert all(getattr(hypha_ray, name).__doc__ for name in dir(hypha_ray) if name != "__version__")
    with pytest.raises(AttributeError, match="trian"):
        _ = hypha_ray.trian  # type: ignore[attr-defined]


def test_runs_are_a_table_in_text_and_html(run: hypha_ray.Run) -> None:
    listed = hypha_ray.runs()
    assert [one.path for one in listed] == [run.path]
    title, row = repr(listed).splitlines()
    assert title.split()[:3] == ["run", "state", "round"] and row.split()[:2] == ["texts-1", "interrupted"]
    assert "val_loss 4.2500" in row and row in listed._repr_html_()
    assert hypha_ray.runs(run.path) == [] and repr(hypha_ray.runs(run.path)) == "no runs"
    with pytest.raises(ConfigError, match="CFG003") as refusal:
        hypha_ray.runs("nowhere")
    assert "--" not in str(refusal.value)


def test_frame_has_a_row_for_each_round_and_a_column_for_each_worker(run: hypha_ray.Run) -> None:
    frame = run.frame("round")
    assert list(frame.index) == [0, 1] and list(frame["loss"]) == [4.0, 3.25]
    assert list(frame["batches.1"]) == [5, 4]
    assert list(run.frame("eval")["val_loss"]) == [4.25] and list(run.frame("step")["worker"]) == [0]
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(lines([{**ROUNDS[3], "loss": 3.0}]))
    assert list(run.frame()["loss"]) == [4.0, 3.0], "a round that was trained again counts once"
    with pytest.raises(ConfigError, match=r"allowed round \| eval \| step"):
        run.frame("rounds")  # type: ignore[arg-type]


def test_run_shows_its_events_configuration_and_account(run: hypha_ray.Run) -> None:
    assert run.events() == EVENTS and run.events("loss") == EVENTS[1:]
    assert run.config["rounds"]["update_rounds"] == 3
    (run.path / "plots").mkdir()
    (run.path / "plots" / "loss.png").write_bytes(b"picture")
    page = run._repr_html_()
    assert "data:image/png;base64,cGljdHVyZQ==" in page
    head = html.unescape(page).partition("<header>")[2].partition("</dl>")[0]
    assert "texts-1" in head and "interrupted" in head and 'title="3.25"' in head
    for line in head.splitlines():
        assert line.encode() in report_of(run.path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("give --resume to go on", "give resume=True to go on"),
        ("--max-new-tokens is out of range", "max_new_tokens is out of range"),
        ("choose another --rounds.update_rounds", "choose another rounds.update_rounds"),
        ("python jobs/prepare.py --source stdlib", "python jobs/prepare.py --source stdlib"),
        ("a -- b", "a -- b"),
    ],
)
def test_messages_speak_of_arguments_and_keys(text: str, expected: str) -> None:
    assert in_python(text) == expected


def test_error_keeps_its_class_code_and_parts_without_flags() -> None:
    with pytest.raises(CheckpointError) as caught, flagless():
        raise CheckpointError("STORE006", "no --round here", "7", "1", "leave --round out")
    error = caught.value
    assert error.code == "STORE006" and error.got == "7" and error.allowed == "1"
    assert (error.what, error.fix) == ("no round here", "leave round out")


def test_saved_model_that_is_older_than_its_run_has_a_note(run: hypha_ray.Run) -> None:
    for round in (2, 6):
        (run.path / "checkpoints" / f"round_{round:06d}").mkdir(parents=True)
    run.model.mkdir()
    task = run.model / "task.json"
    (run.model / "config.json").write_text("{}")
    for saved_round, notes in ((2, 1), (6, 0), (None, 0)):
        task.write_text(json.dumps({"type": "causal-lm"} | ({} if saved_round is None else {"round": saved_round})))
        for model in ("texts-1", str(run.model)):
            assert len(list(find_model(model).notes())) == notes
    task.write_text('{"type": "causal-lm", "round": 2}')
    (note,) = find_model("texts-1").notes()
    assert "saved model is of round 3, and the run has gone on to round 7" in note
    assert "--round 7" in note


def test_run_without_a_good_snapshot_says_whether_it_has_none_or_damaged_ones_and_names_no_flag(
    run: hypha_ray.Run,
) -> None:
    with pytest.raises(CheckpointError, match=r"CKPT006.*no checkpoint yet. Fix: [^-=]*$"):
        run.newest_snapshot  # noqa: B018
    for round_number in (2, 3):
        write_snapshot(run.path, round_number, {"a": np.zeros(8, np.float32)}, {}, {}, {})
    assert run.newest_snapshot == 3
    for file in run.path.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"STORE004.*checkpoint round 4: model.safetensors has other bytes"):
        run.newest_snapshot  # noqa: B018


def test_settings_of_generation_and_evaluation_are_refused_by_their_names(run: hypha_ray.Run) -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*: max_new_tokens is out of range"):
        run.generate("a", max_new_tokens=0)
    with pytest.raises(ConfigError, match=r"CFG003.*: seed is out of range"):
        run.generate("a", seed=-1)
    with pytest.raises(CheckpointError, match="CKPT006"):
        run.generate("a")
    with pytest.raises(TypeError, match=r"^evaluate\(\) got .* 'splt'; did you mean 'split'\?"):
        run.evaluate("data", splt="train")
    with pytest.raises(TypeError, match=r"^evaluate\(\) got .* 'xyz'; its settings are split, batch_size, "):
        run.evaluate("data", xyz=1)
    with pytest.raises(TypeError, match=r"^generate\(\) got .* 'topk'; did you mean 'top_k'\?"):
        run.generate("a", topk=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(("text", "call"), WRONG_TYPES, ids=range(len(WRONG_TYPES)))
def test_argument_of_a_wrong_type_is_refused_by_its_name(
    run: hypha_ray.Run, text: str, call: Callable[[hypha_ray.Run], object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        call(run)
    assert caught.value.code == "CFG002" and text in str(caught.value)


def test_choices_of_the_interface_are_refused_with_those_that_there_are(run: hypha_ray.Run) -> None:
    with pytest.raises(ConfigError, match=r"kind is out of range — got 'rounds', .*Fix: write round$"):
        run.records("rounds")
    with pytest.raises(ConfigError, match=r"dtype is out of range — got 'bf16', .*Fix: write bfloat16$"):
        run.export(dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"compatible is out of range — got 9, allowed None \| 4"):
        run.export(compatible=9)
    assert run.records() == ROUNDS and run.records("step") == ROUNDS[1:2]


def test_round_of_a_table_is_taken_as_a_round(run: hypha_ray.Run) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of round 2"):
        run.export(round=run.frame().index.to_numpy()[-1])


@pytest.mark.parametrize(
    "use",
    [
        lambda run, round: run.export(round=round),
        lambda run, round: run.load_model(round),
        lambda run, round: run.evaluate("d", round=round),
        lambda run, round: run.generate("a", round=round),
    ],
)
def test_refused_round_is_told_with_the_argument_that_python_takes(
    run: hypha_ray.Run, use: Callable[[hypha_ray.Run, int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "checkpoints" / "round_000002").mkdir(parents=True)
    monkeypatch.setattr("hypha_ray.store.snapshots.newest_good", lambda folder: 2)
    with pytest.raises(CheckpointError) as missing:
        use(run, 3)
    assert "no checkpoint of round 4" in missing.value.what
    assert "newest good checkpoint: round 3" in missing.value.fix
    assert missing.value.fix.endswith("; Python counts rounds from 0, so round 3 is round=2")


def test_refused_round_of_a_command_is_counted_from_1_alone(run: hypha_ray.Run) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of round 4") as missing:
        find_model(str(run.path), 3)
    assert "Python" not in missing.value.fix


def test_new_records_are_those_of_complete_lines_since_the_last_call(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    new = NewRecords(path)
    assert new.read() == []
    path.write_text(lines(ROUNDS[:1]) + '{"kind": "ev')
    assert new.read() == ROUNDS[:1]
    with path.open("a") as file:
        file.write('al", "round": 0}\n')
    assert new.read() == [{"kind": "eval", "round": 0}] and new.read() == []
    path.write_text("")  # An attempt begins, and cuts off what isn't committed.
    assert new.read() == []
    path.write_text(lines(ROUNDS[3:]))
    assert new.read() == ROUNDS[3:]
    assert NewRecords(path).read() == [], "what is there already isn't new"


class Told(hypha_ray.Callback):
    """Keeps what it is told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.stop_at = stop_at

    def on_round(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if record["round"] == self.stop_at:
            raise hypha_ray.StopTraining

    def on_eval(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def on_event(self, record: dict[str, Any]) -> None:
        self.records.append(record)


class Broken(Told):
    """Raises an error at once."""

    def on_round(self, record: dict[str, Any]) -> None:
        super().on_round(record)
        raise ZeroDivisionError("no mean")


class Leaving(Told):
    """Ends the process, as it thinks."""

    def on_round(self, record: dict[str, Any]) -> None:
        raise SystemExit(3)


JOB: dict[str, Any] = {"run": {"name": "new"}, "model": {"repository": "m"}, "dataset": {"path": "d"}}


@pytest.fixture
def trained(run: hypha_ray.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that write their records without training."""

    def write(loaded: Loaded, job_name: str, check: Any = None) -> Path:
        job: Job = loaded.job
        folder = Path(str(job.run.dir), str(job.run.name))
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text('[run]\nname = "new"\n[rounds]\nupdate_rounds = 3\n')
        (folder / "events.jsonl").write_text(lines(EVENTS[:1]))
        with (folder / "metrics.jsonl").open("a") as file:
            for record in ROUNDS:
                file.write(lines([record]))
                file.flush()
                check()
        if job.run.seed == 13:
            raise CheckpointError("CKPT006", "no --round", fix="give --resume")
        return folder

    monkeypatch.setattr(launch, "run_job", write)


@pytest.mark.usefixtures("trained")
def test_callbacks_are_told_of_rounds_evaluations_and_events_in_order() -> None:
    told = Told()
    run = hypha_ray.train(JOB, callbacks=[told])
    assert run.path.name == "new"
    assert told.records == [ROUNDS[0], EVENTS[0], ROUNDS[2], ROUNDS[3]]


@pytest.mark.usefixtures("trained")
def test_callback_that_raises_an_error_is_left_out_with_a_warning_and_the_run_goes_on() -> None:
    broken = Broken()
    told = Told()
    with pytest.warns(RuntimeWarning, match="callback Broken is left out.*ZeroDivisionError: no mean"):
        hypha_ray.train(JOB, callbacks=[broken, told])
    assert broken.records == ROUNDS[:1] and told.records[-1] == ROUNDS[3]


@pytest.mark.usefixtures("trained")
def test_callback_stops_the_run() -> None:
    told = Told(stop_at=0)
    training = hypha_ray.train(JOB, callbacks=[told], wait=False)
    assert training.result(60).path.name == "new"
    assert training.progress.state == "stopped" and training.done
    assert told.records == [ROUNDS[0], EVENTS[0]]


@pytest.mark.usefixtures("trained")
def test_training_in_the_background_shows_its_progress_and_result() -> None:
    training = hypha_ray.train(JOB, wait=False)
    assert training.result(60).path == training.run.path
    progress = training.progress
    assert (progress.state, progress.total_rounds, progress.last_round) == ("finished", 3, ROUNDS[3])
    assert "'new', finished, round 0 of 3" in repr(training) and "<progress" in training._repr_html_()
    training.stop()
    assert training.progress.state == "finished", "what has ended can't be stopped"


@pytest.mark.usefixtures("trained")
def test_error_of_a_run_in_the_background_is_raised_by_its_result() -> None:
    training = hypha_ray.train({**JOB, "run": {"name": "new", "seed": 13}}, wait=False)
    with pytest.raises(CheckpointError, match="Fix: give resume=True"):
        training.result(60)
    assert training.progress.state == "failed"


@pytest.mark.usefixtures("trained")
def test_process_trains_one_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nested(hypha_ray.Callback):
        errors: list[str] = []  # noqa: RUF012

        def on_round(self, record: dict[str, Any]) -> None:
            try:
                hypha_ray.train(JOB)
            except ConfigError as error:
                self.errors.append(error.code)

    nested = Nested()
    with warnings.catch_warnings(action="error"):
        hypha_ray.train(JOB, callbacks=[nested])
    assert nested.errors == ["API001", "API001"]
    hypha_ray.train(JOB)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(("callbacks", "error"), [(Told(), ConfigError), ([Leaving()], SystemExit)])
def test_another_run_trains_after_one_that_its_callbacks_have_ended(callbacks: Any, error: type[BaseException]) -> None:
    with pytest.raises(error):
        hypha_ray.train(JOB, callbacks=callbacks)
    hypha_ray.train(JOB)


@pytest.mark.usefixtures("trained")
def test_callback_may_stop_the_run_by_its_handle() -> None:
    handles: list[hypha_ray.Training] = []
    has_handle = threading.Event()

    class Stopping(hypha_ray.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            has_handle.wait(60)
            handles[0].stop()

    handles.append(hypha_ray.train(JOB, callbacks=[Stopping()], wait=False))
    has_handle.set()
    handles[0].result(60)
    assert handles[0].progress.state == "stopped"


@pytest.mark.usefixtures("trained")
def test_wait_that_is_broken_off_ends_no_training() -> None:
    goes_on = threading.Event()

    class Waiting(hypha_ray.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            goes_on.wait(60)

    training = hypha_ray.train(JOB, callbacks=[Waiting()], wait=False)
    waiter = threading.main_thread().ident
    assert waiter is not None
    threading.Timer(0.2, signal.pthread_kill, (waiter, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        training.result(60)
    assert not training.done and training.progress.state == "running"
    goes_on.set()
    assert training.result(60).path.name == "new"


def test_wrong_job_is_refused_before_anything_trains_in_the_background() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        hypha_ray.train({"rounds": {"update_ronds": 3}}, wait=False)
    with pytest.raises(ConfigError):
        hypha_ray.train({}, wait=False)


def test_error_of_a_training_ends_its_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook goes on after the error, and would be told once a minute that the check still goes on."""
    monkeypatch.setenv("HYPHA_RAY_HOME", str(tmp_path))
    before = set(threading.enumerate())
    with pytest.raises(HyphaError, match="DATA001"):
        hypha_ray.train({**JOB, "dataset": {"path": str(tmp_path / "nothing")}})
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert "heartbeat" not in {thread.name for thread in set(threading.enumerate()) - before}
