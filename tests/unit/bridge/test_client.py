"""The client of external trainers, against a driver of hand."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.access import make_token
from hypha_ray.bridge.channel import Channel, Listener
from hypha_ray.bridge.client import FOLDERS, Trainer
from hypha_ray.bridge.paths import WorkDirectory, content_of
from hypha_ray.bridge.round import Arrays, Round
from hypha_ray.errors import BridgeError, ConfigError

JOB = {"run": "hand", "worker": 0, "seed": 0, "report_every_s": 0.0}
BATCH = 4


class Driver:
    """Says what it is told to say, and collects what it hears."""

    def __init__(self, channel: Channel, folder: Path) -> None:
        self.channel, self.folder = channel, folder
        channel.attach(WorkDirectory(folder), lambda path, size: None)
        (folder / "job.json").write_text(json.dumps(JOB))
        self._say_with_file("job", "job.json", lambda content: pb.JobDefinition(path="job.json", content=content))

    def parameters(self, number: int, weights: dict[str, Any]) -> None:
        path = f"parameters/round_{number:06d}.safetensors"
        save_file(weights, self.folder / path)
        update = pb.WeightUpdate(model_path=path)
        self._say_with_file(
            "parameters", path, lambda content: pb.Parameters(round=number, update=update, content=content)
        )

    def assign(self, number: int, version: int, *sizes: int, evaluate: int = 0, **fields: Any) -> None:
        """Slices of so many samples; every sample is its number in the round."""
        train, start = [], 0
        for size in sizes:
            train.append(self._slice(f"slices/train_{number}_{start}_{size}", start, size))
            start += size
        validation = [self._slice(f"slices/evaluate_{number}", 0, evaluate)] if evaluate else []
        message = pb.Assignment(
            round=number, version=version, batch_size=BATCH, train=train, evaluate=validation, **fields
        )
        self.channel.send("assignment", message)

    def receive(self, wanted: str) -> Any:
        """The next message, which has to be of that kind."""
        content, message = self.channel.receive()
        assert content == wanted, message
        return message

    def hear_until(self, wanted: str) -> tuple[Any, list[Any]]:
        """The next message of that kind, and those before it."""
        before = []
        while True:
            content, message = self.channel.receive()
            if content == wanted:
                return message, before
            before.append(message)

    def _slice(self, path: str, start: int, size: int) -> pb.Slice:
        if not (self.folder / path).exists():
            save_file({"x": np.arange(start, start + size)}, self.folder / path)
            if not self.channel.shares_files:
                self.channel.send_file(path)
        return pb.Slice(path=path, samples=size, content=content_of(self.folder / path))

    def _say_with_file(self, content: str, path: str, message: Any) -> None:
        if not self.channel.shares_files:
            self.channel.send_file(path)
        self.channel.send(content, message(content_of(self.folder / path)))


@pytest.fixture(params=[True, False], ids=["shared", "sent"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Driver, Trainer]]:
    token = make_token(tmp_path / "token")
    for folder in FOLDERS:
        (tmp_path / "work" / folder).mkdir(parents=True)
    listener = Listener("127.0.0.1:0", token, silence_s=5.0)
    joined: list[Trainer] = []
    work_dir = tmp_path / "work" if request.param else None
    joining = threading.Thread(
        target=lambda: joined.append(Trainer.connect("test", listener.address, tmp_path / "token", work_dir))
    )
    joining.start()
    channel = listener.admit(5.0)
    assert channel is not None
    driver = Driver(channel, tmp_path / "work")
    joining.join()
    yield driver, joined[0]
    joined[0].close()
    driver.channel.close()
    listener.close()


def train(work: Round) -> list[list[int]]:
    """Go through a round's batches; returns their samples."""
    seen = []
    for batch in work.batches():
        seen.append(batch["x"].tolist())
        work.step(1.0 + len(seen))
    return seen


def begun(driver: Driver, trainer: Trainer) -> tuple[Iterator[Round], Round, Iterator[Arrays]]:
    """A long round, of which the trainer has done one batch."""
    rounds = trainer.rounds()
    driver.parameters(0, {"w": np.zeros(1)})
    driver.assign(0, 1, 400)
    work = next(rounds)
    batches = work.batches()
    next(batches)
    work.step(1.0)
    return rounds, work, batches


def test_round_is_gone_through_as_assigned(both: tuple[Driver, Trainer]) -> None:
    driver, trainer = both
    assert trainer.job == JOB
    trainer.ready("cpu", 2)
    assert driver.receive("ready").parameters == 2
    weights = {"w": np.arange(2, dtype=np.float32), "n": np.array([7])}
    driver.parameters(3, weights)
    driver.assign(3, 1, 6, 5, evaluate=6, learning_rate=1.0, last_learning_rate=0.0)
    work = next(trainer.rounds())
    assert work.number == 3 and not work.gradient
    found = work.parameters()
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
    work.merged(0.5)
    assert work.evaluates
    assert [batch["x"].tolist() for batch in work.evaluation()] == [[0, 1, 2, 3], [4, 5]]
    work.evaluated(12.0, 6, 4)
    rates = []
    for batch in work.batches():
        rates.append(work.learning_rate)
        work.step(float(batch["x"].mean()), gradient_norm=0.1)
    assert rates == pytest.approx([1.0, 7 / 11, 3 / 11])
    work.hand_over({name: array + 1 for name, array in weights.items()})
    assert driver.receive("merged").seconds == 0.5
    assert driver.receive("evaluation") == pb.Evaluation(round=3, loss_sum=12.0, count=6, correct=4)
    update, metrics = driver.hear_until("update")
    assert (update.round, update.samples, update.tokens, update.batches) == (3, 11, 0, 3)
    assert update.loss == pytest.approx(5.0)
    assert sum(one.data_processed for one in metrics) == 11 and {one.local_round for one in metrics} == {3}
    assert sum(one.items["loss"] * one.data_processed for one in metrics) == pytest.approx(55.0)
    assert metrics[0].items["gradient_norm"] == 0.1
    sent = driver.folder / update.update.model_path
    assert content_of(sent) == update.content
    assert {name: array.tolist() for name, array in load_file(sent).items()} == {"w": [1.0, 2.0], "n": [8]}


def test_assignment_that_is_corrected_ends_later_or_earlier(both: tuple[Driver, Trainer]) -> None:
    driver, trainer = both
    driver.parameters(0, {"w": np.zeros(1)})
    driver.assign(0, 1, 8)
    work = next(trainer.rounds())
    batches = work.batches()
    assert next(batches)["x"].tolist() == [0, 1, 2, 3]
    work.step(1.0)
    driver.assign(0, 2, 8, 3)
    _until(lambda: work._driver.assignment.version == 2)
    assert next(batches)["x"].tolist() == [4, 5, 6, 7]
    work.step(1.0)
    assert next(batches)["x"].tolist() == [8, 9, 10]
    work.step(1.0)
    assert list(batches) == []
    work.hand_over({"w": np.ones(1)})
    assert driver.hear_until("update")[0].samples == 11
    driver.parameters(1, {"w": np.zeros(1)})
    driver.assign(1, 1, 40)
    work = next(trainer.rounds())


def test_round_without_work_waits_for_some_or_for_the_next_round(both: tuple[Driver, Trainer]) -> None:
    driver, trainer = both
    rounds = trainer.rounds()
    driver.parameters(0, {"w": np.zeros(1)})
    driver.assign(0, 1)
    work = next(rounds)
    threading.Timer(0.1, lambda: driver.assign(0, 2, 4)).start()
    assert train(work) == [[0, 1, 2, 3]]
    driver.parameters(1, {"w": np.zeros(1)})
    driver.assign(1, 1)
    work = next(rounds)
    threading.Timer(0.1, lambda: driver.parameters(2, {"w": np.zeros(1)})).start()
    assert train(work) == [] and next(rounds).number == 2


def test_round_that_the_others_have_left_behind_is_dropped(both: tuple[Driver, Trainer]) -> None:
    driver, trainer = both
    rounds, work, batches = begun(driver, trainer)
    driver.parameters(1, {"w": np.zeros(1)})
    _until(lambda: work._driver.has_newer(0))
    assert list(batches) == []
    work.hand_over({"w": np.ones(1)})
    assert next(rounds).number == 1
    driver.channel.send("done")
    assert list(rounds) == []
    trainer.close()
    with pytest.raises(BridgeError):
        while True:
            content, _ = driver.channel.receive()
            assert content == "metrics"


def test_trainer_that_has_to_leave_hands_over_what_it_has(both: tuple[Driver, Trainer]) -> None:
    driver, trainer = both
    rounds, work, batches = begun(driver, trainer)
    driver.channel.send("leave", pb.Leave(reason="SIGTERM"))
    _until(lambda: work._driver.leaving)
    assert list(batches) == []
    work.hand_over({"w": np.ones(1)})
    assert list(rounds) == []
    assert driver.hear_until("update")[0].samples == BATCH
    driver.receive("left")


def test_driver_that_is_gone_is_said(both: tuple[Driver, Trainer]) -> None:
    driver, trainer = both
    driver.channel.close()
    with pytest.raises(BridgeError, match="FRM008"):
        next(trainer.rounds())


@pytest.mark.slow
def test_trainer_lives_while_it_computes(both: tuple[Driver, Trainer]) -> None:
    driver, trainer = both
    driver.channel.silence_s = 1.5
    threading.Timer(2.5, lambda: trainer.ready("cpu", 1)).start()
    assert driver.receive("ready").device == "cpu"


def test_own_folder_is_gone_afterwards(tmp_path: Path, both: tuple[Driver, Trainer]) -> None:
    _, trainer = both
    folder = trainer._directory.path
    trainer.close()
    assert folder.exists() == (folder == (tmp_path / "work").resolve())


def test_address_and_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPHA_BRIDGE_SOCKET", raising=False)
    with pytest.raises(ConfigError, match=r"CFG021.*no address of the driver.*set HYPHA_BRIDGE_SOCKET"):
        Trainer.connect("test")
    monkeypatch.setenv("HYPHA_BRIDGE_SOCKET", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"CFG021.*no file with the token"):
        Trainer.connect("test")


def test_client_needs_neither_ray_nor_torch() -> None:
    code = "import sys, hypha_ray.bridge.client; print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
