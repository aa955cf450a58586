"""Workers whose trainer is a process elsewhere, without Ray: its endpoint, what it is told, and what comes of it."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.bridge.paths import PREFIX, sweep
from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.market.requirements import needs, worker_needs
from hypha_ray.store.snapshots import digest, named
from hypha_ray.types import (
    Delta,
    Entry,
    Evaluated,
    Flat,
    FragmentUpdate,
    Layout,
    Left,
    Merged,
    Plan,
    Ready,
    Report,
    Source,
    Span,
)
from hypha_ray.types.events import HandOver
from hypha_ray.worker.bridged import process
from hypha_ray.worker.bridged.loop import BridgedLoop
from hypha_ray.worker.bridged.process import TrainerGone, address_of, check, listen_for_trainer, tls, token_of
from hypha_ray.worker.incarnation import BatchSource, Closed, Inbox, Retired, epoch_order

SOURCE = Source("test", 0, 7)
SAMPLES = 64
LAYOUT = Layout(
    (
        Entry("w", "float32", (4,), 0, "parameters/float32", 0, 4),
        Entry("n", "int64", (1,), 0, "buffers/int64", 0, 1),
    )
)
THETA: Flat = {"parameters/float32": np.zeros(4, np.float32), "buffers/int64": np.array([5])}
TRAINER = Path(__file__).parents[2] / "support" / "bridge_trainer.py"


def job(tmp_path: Path, *commands: str, **bridge: Any) -> Job:
    (tmp_path / "run").mkdir(exist_ok=True)
    tables = {"run": {"name": "run", "dir": str(tmp_path)}, "resources": {"num_workers": 4}}
    return Job.model_validate({**tables, "bridge": {"commands": list(commands), **bridge}})


def test_places_that_wait_have_ports_one_after_the_other(tmp_path: Path) -> None:
    one = job(tmp_path, "", "python x.py", " ", listen="127.0.0.1:6000")
    assert [one.group_of(worker).bridged for worker in range(4)] == [False, True, True, True]
    assert [one.group_of(worker).dials_in for worker in range(4)] == [False, True, False, True]
    assert address_of(one, 1) == "127.0.0.1:6000" and address_of(one, 3) == "127.0.0.1:6001"
    free = job(tmp_path, "", "", listen="[::1]:0")
    assert address_of(free, 2) == address_of(free, 3) == "[::1]:0"


def test_place_that_waits_needs_nothing_of_the_cluster(tmp_path: Path) -> None:
    one = job(tmp_path, "")
    assert worker_needs(one)[3].bundle() == {} and worker_needs(one)[2].bundle() == {"CPU": 1.0}
    assert {need.cpu: count for need, count in needs(one, 4).items() if need.role == "worker"} == {1.0: 3, 0.0: 1}


def test_token_of_a_place_stays_the_same_and_is_its_owners_alone(tmp_path: Path) -> None:
    one = job(tmp_path, "")
    assert token_of(one, 3) == token_of(one, 3)
    assert stat.S_IMODE((tmp_path / "run/bridge").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run/bridge/worker-3.token").stat().st_mode) == 0o600


def test_free_port_of_a_place_stays_the_same_until_somebody_else_has_it(tmp_path: Path) -> None:
    one, file = job(tmp_path, ""), tmp_path / "run/bridge/worker-3.address"
    first = listen_for_trainer(one, 3)
    trainer = socket.create_connection(("127.0.0.1", int(first.address.rpartition(":")[2])))
    first.close()
    again = listen_for_trainer(one, 3)
    assert again.address == first.address == file.read_text().strip()
    other = listen_for_trainer(one, 3)
    assert other.address != first.address and other.address == file.read_text().strip()
    trainer.close()
    again.close()
    other.close()
    file.write_text("nothing\n")
    last = listen_for_trainer(one, 3)
    assert last.address == file.read_text().strip()
    last.close()


@pytest.mark.parametrize(
    ("bridge", "message"),
    [
        ({"listen": "0.0.0.0:6000"}, "SEC001.*only by TLS"),
        ({"listen": "6000"}, "CFG020"),
        ({"listen": "unix:/tmp/x"}, "CFG020.*no address to dial"),
        ({"certificate": "a.pem"}, "CFG012.*but not both"),
        ({"key": "a.pem"}, "CFG012.*but not both"),
        ({"listen": "0.0.0.0:6000", "certificate": "absent.pem", "key": "absent.pem"}, "SEC005"),
    ],
)
def test_door_that_cannot_be_opened_is_refused_before_anything_starts(
    bridge: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(job(tmp_path, "", **bridge))
    check(job(tmp_path, "python x.py", **bridge))  # Nobody listens there.


def test_door_without_certificate_speaks_no_tls(tmp_path: Path) -> None:
    assert tls(job(tmp_path, "")) is None


def plan_of(*spans: Span, number: int = 0, version: int = 0, evaluate: int = 0, final: bool = False) -> Plan:
    share = (Span(0, 0, 0, evaluate),) if evaluate else ()
    return Plan(number, version, spans, 8, share, frozenset({0}), final)


class Bench:
    """One loop and its trainer; `on_event` is told all that the loop says."""

    def __init__(self, way: str, lease_s: float = 5.0) -> None:
        self.job = Job.model_validate(
            {
                "run": {"name": "test"},
                "resources": {"num_workers": 1},
                "worker": {"lease_s": lease_s, "report_every_s": 0.01},
                "bridge": {"commands": [f"{sys.executable} {TRAINER} {way}"]},
            }
        )
        self.batch_source, self.inbox, self.said = BatchSource(0), Inbox(), list[Any]()
        self.on_event: Any = lambda event: None
        self.batch_source.put(0, {"x": np.arange(SAMPLES)})
        self.inbox.describe(LAYOUT)
        self.inbox.merge(FragmentUpdate(0, 0), THETA)

    def run(self, *plans: Plan) -> Bench:
        for plan in plans:
            self.inbox.assign(plan)
        BridgedLoop(self.job, SOURCE, self.batch_source, self.inbox, self._hear).run()
        return self

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.said if isinstance(event, kind)]

    def close(self, why: type[Closed] = Closed) -> None:
        self.inbox.close(why)
        self.batch_source.close(why)

    def _hear(self, event: Any) -> None:
        items = (event.delta, *event.parts) if isinstance(event, HandOver) else (event,)
        for item in items:
            self.said.append(item)
            self.on_event(item)


def test_trainer_is_one_worker_among_others_and_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    bench = Bench("good")

    def go_on(event: Any) -> None:
        if isinstance(event, dict):
            bench.inbox.merge(FragmentUpdate(1, 0), {name: array + 1 for name, array in THETA.items()})
            bench.inbox.assign(plan_of(number=1, evaluate=10, final=True))

    bench.on_event = go_on
    bench.run(plan_of(Span(0, 0, 0, 20), Span(0, 0, 30, 40), evaluate=10))
    (ready,) = bench.of(Ready)
    assert (ready.source, ready.layout, ready.device, ready.parameters) == (SOURCE, LAYOUT.sha256(), "cpu", 4)
    assert [(one.version, one.theta_sha256) for one in bench.of(Merged)] == [
        (0, digest(named(LAYOUT, [THETA]))),
        (1, None),
    ]
    assert [(one.round, one.sums) for one in bench.of(Evaluated)] == [(n, {"val_loss": (45.0, 1)}) for n in (0, 1)]
    (delta,) = bench.of(Delta)
    assert (delta.samples, delta.batches, delta.tokens, delta.fragments) == (30, 4, None, 1)
    assert delta.spans == (Span(0, 0, 0, 20), Span(0, 0, 30, 40))
    samples = epoch_order(0, 0, 0, SAMPLES)
    assert delta.loss == pytest.approx(np.concatenate([samples[:20], samples[30:40]]).mean())
    assert sum(report.samples for report in bench.of(Report)) == 30
    assert bench.of(Report)[0].timed_batches == 0
    (flat,) = bench.of(dict)
    assert flat["parameters/float32"].tolist() == [4.0] * 4 and flat["buffers/int64"].tolist() == [5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("early", "exit code 3 before it has connected"),
        ("exit", "FRM008"),
        ("nan", "MSG001.*metric loss"),
        ("greedy", "MSG005.*got 10000, allowed up to 32"),
        ("boast", "MSG005.*got 10000, allowed up to 32"),
        ("elsewhere", "PATH009.*token isn't welcome"),
        ("absent", "PATH006"),
        ("link", "PATH002"),
        ("fifo", "PATH003.*FIFO"),
        ("garbage", "DLT001"),
        ("header", "DLT001"),
        ("changed", "PATH005"),
        ("missing", "DLT002.*'w'.*missing|DLT002.*is missing"),
        ("foreign", "DLT002.*is unexpected"),
        ("shape", "DLT003.*w has another shape"),
        ("dtype", "DLT004.*w has another dtype"),
        ("large", "PATH009.*too large"),
    ],
)
def test_trainer_that_goes_wrong_is_lost_with_its_reason_and_nothing_of_it_counts(way: str, reason: str) -> None:
    bench = Bench(way)
    with pytest.raises(TrainerGone, match=reason):
        bench.run(plan_of(Span(0, 0, 0, 32)))
    assert not bench.of(Delta) and not bench.of(dict)


@pytest.mark.parametrize(("way", "reason"), [("obstacle", "PATH010"), ("removed", "PATH006"), ("replaced", "PATH002")])
def test_trainer_in_whose_directory_nothing_can_be_written_is_lost_and_ends_nothing_else(way: str, reason: str) -> None:
    bench = Bench(way)

    def go_on(event: Any) -> None:
        if isinstance(event, dict):
            bench.inbox.merge(FragmentUpdate(1, 0), THETA)
            bench.inbox.assign(plan_of(Span(0, 0, 32, 64), number=1))

    bench.on_event = go_on
    with pytest.raises(TrainerGone, match=reason):
        bench.run(plan_of(Span(0, 0, 0, 32)))
    assert len(bench.of(Delta)) == 1


def test_trainer_that_leaves_on_its_own_is_lost_at_once() -> None:
    with pytest.raises(TrainerGone, match="it wasn't told to"):
        Bench("leave").run(plan_of(Span(0, 0, 0, 32)))


def test_trainer_that_hangs_is_given_up_after_the_lease() -> None:
    bench = Bench("stop", lease_s=0.5)
    with pytest.raises(TrainerGone, match=r"FRM003.*sent nothing for 0.5 s"):
        bench.run(plan_of(Span(0, 0, 0, 32)))


def test_trainer_may_take_its_time_to_take_the_last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "END_S", 0.05)
    bench = Bench("late").run(plan_of(final=True))
    assert [one.version for one in bench.of(Merged)] == [0]


def test_trainer_that_has_to_leave_hands_over_what_it_has() -> None:
    bench = Bench("slow")

    def leave(event: Any) -> None:
        if isinstance(event, Report) and not bench.inbox._interruption:
            bench.close(Retired)

    bench.on_event = leave
    bench.run(plan_of(*(Span(0, 0, start, start + 8) for start in range(0, SAMPLES, 8))))
    (delta,), (left,) = bench.of(Delta), bench.of(Left)
    assert 8 <= delta.samples < SAMPLES and bench.said.index(left) > bench.said.index(delta)
    assert bench.of(dict)[0]["parameters/float32"].tolist() == [delta.batches] * 4


def test_correction_reaches_the_trainer() -> None:
    bench = Bench("slow")
    longer = plan_of(Span(0, 0, 0, 32), Span(0, 0, 32, 48), version=1)

    def correct(event: Any) -> None:
        if isinstance(event, Report):
            bench.inbox.assign(longer)
        if isinstance(event, dict):
            bench.close()

    bench.on_event = correct
    with pytest.raises(Closed):
        bench.run(plan_of(Span(0, 0, 0, 32)))
    assert bench.of(Delta)[0].samples == 48 and bench.of(Delta)[0].spans == longer.spans


def test_stopped_loop_ends_its_trainer_at_once() -> None:
    bench = Bench("slow")
    bench.on_event = lambda event: isinstance(event, Report) and bench.close()
    ended: list[type] = []

    def run() -> None:
        try:
            bench.run(plan_of(Span(0, 0, 0, SAMPLES)))
        except Closed as closed:
            ended.append(type(closed))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=10)
    assert ended == [Closed]
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(TRAINER).encode() in line and b"slow" in line for line in lines)


def test_directories_of_workers_that_were_killed_are_swept_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        pass
    names = (f"{PREFIX}{ended.pid}-x", f"{PREFIX}{os.getpid()}-x", f"{PREFIX}x", "other")
    for name in names:
        (tmp_path / name / "slices").mkdir(parents=True)
    sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_what_a_trainer_prints_is_kept_up_to_a_limit_and_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_BYTES", 1000)
    (tmp_path / "r" / "logs").mkdir(parents=True)
    for size, whole in ((900, True), (3_000_000, False), (10, True)):
        program = f"import sys; sys.stdout.write('x' * {size}); sys.stderr.write('y')"
        tables = {"run": {"name": "r", "dir": str(tmp_path)}, "resources": {"num_workers": 1}}
        job = Job.model_validate({**tables, "bridge": {"commands": [f'{sys.executable} -c "{program}"']}})
        trainer = process.TrainerProcess(job, 0)
        with pytest.raises(TrainerGone, match="exit code 0"):
            trainer.connect(lambda: None)
        trainer.close()
        text = (tmp_path / "r" / "logs" / "worker-0.log").read_text()
        assert text.endswith("xy" if whole else "left out]\n")
    assert text == "x" * 10 + "y", "the log before it was too long, and made room"
    before = (tmp_path / "r" / "logs" / "worker-0.log.1").read_text()
    assert before.count("x") == 900 + 1000 and len(before) < 2000


def test_nothing_is_left_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TrainerGone):
        Bench("exit").run(plan_of(Span(0, 0, 0, 32)))
    assert list(tmp_path.iterdir()) == []
