"""The scheduler's client of telemetry: what is handed on, in which calls, and what is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from hypha_ray.config.training import Alert
from hypha_ray.errors import ClusterError
from hypha_ray.scheduler.runtime import telemetry_client as telemetry
from hypha_ray.scheduler.runtime.telemetry_client import BACKLOG, BATCH, TelemetryClient
from hypha_ray.types import Commit, Contribution, Rejection

ROUND = {"kind": "round", "round": 0}
JOIN = {"kind": "join", "worker": 1, "device": "cpu", "monotonic_s": 1.0}


def timeless(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items without the time of day, after a look at it."""
    now = datetime.now(UTC)
    for item in items:
        assert abs((now - datetime.fromisoformat(item["wall_time"])).total_seconds()) < 60
    return [{key: value for key, value in item.items() if key != "wall_time"} for item in items]


def step(number: int) -> dict[str, Any]:
    return {"kind": "step", "worker": number}


class Actor:
    """In the place of the telemetry actor and of what keeps it alive: takes calls, some of which fail."""

    def __init__(self, problems: Sequence[Sequence[str]] = (), fails: bool = False) -> None:
        self.calls: list[tuple[list[Any], list[Any]]] = []
        self.ended: dict[str, Any] | None = None
        self._problems, self._fails = list(problems), fails

    async def ask(self, call: Callable[[Any], Any]) -> Awaitable[Any]:
        if self._fails:
            raise ClusterError("NET004", "telemetry died 4 times in a row")
        remote = SimpleNamespace
        return answered(call(remote(write=remote(remote=self._write), finish=remote(remote=self._finish))))

    def _write(self, records: list[Any], events: list[Any]) -> list[str]:
        self.calls.append((timeless(records), timeless(events)))
        return list(self._problems.pop(0)) if self._problems else []

    def _finish(self, figures: dict[str, Any]) -> dict[str, Any]:
        self.ended = figures
        return figures


async def answered(value: Any) -> Any:
    return value


async def settled(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0)


def told(actor: Any, tell: Callable[[TelemetryClient], Awaitable[None]]) -> None:
    async def run() -> None:
        client = TelemetryClient()
        client.telemetry = actor
        await tell(client)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_figures_of_steps_wait_for_each_other_and_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BATCH_S", 0.01)
    actor = Actor()

    async def tell(client: TelemetryClient) -> None:
        client.open()
        for number in range(3):
            client.record(step(number))
            await asyncio.sleep(0)
        await settled(lambda: bool(actor.calls))

    told(actor, tell)
    assert actor.calls == [([step(0), step(1), step(2)], [])]


@pytest.mark.parametrize("kind", ["record", "event"])
def test_anything_else_is_sent_at_once_with_the_steps_before_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BATCH_S", 3600.0)
    actor = Actor()

    async def tell(client: TelemetryClient) -> None:
        client.open()
        client.record(step(0))
        getattr(client, kind)(ROUND if kind == "record" else JOIN)
        await settled(lambda: bool(actor.calls))

    told(actor, tell)
    assert actor.calls == [([step(0), ROUND], [])] if kind == "record" else [([step(0)], [JOIN])]


def test_many_steps_wait_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BATCH_S", 3600.0)
    actor = Actor()

    async def tell(client: TelemetryClient) -> None:
        client.open()
        for number in range(BATCH):
            client.record(step(number))
        await settled(lambda: bool(actor.calls))

    told(actor, tell)
    assert [len(records) for records, _ in actor.calls] == [BATCH]


def test_what_is_told_before_the_files_are_open_waits_and_the_end_of_a_run_waits_for_nothing() -> None:
    actor = Actor()

    async def tell(client: TelemetryClient) -> None:
        client.event(JOIN)
        client.record(ROUND)
        await asyncio.sleep(0)
        assert not actor.calls
        client.open()
        await settled(lambda: bool(actor.calls))
        client.record(step(0))
        assert await client.finish({"attempt": 1}) == {"attempt": 1, "dropped": 0}

    told(actor, tell)
    assert actor.calls == [([ROUND], [JOIN]), ([step(0)], [])]


def test_problems_of_sinks_are_events_and_news_and_none_is_lost_at_the_end() -> None:
    actor = Actor(problems=[["the disk is full"]])

    async def tell(client: TelemetryClient) -> None:
        client.record(ROUND)
        await client.finish({})
        assert client.for_driver(everything=True) == [ROUND, {"kind": "news", "text": "the disk is full"}]

    told(actor, tell)
    (_, events) = actor.calls[1]
    assert [(event["kind"], event["text"]) for event in events] == [("problem", "the disk is full")]


@pytest.mark.slow
def test_more_than_the_backlog_and_calls_that_fail_are_dropped_and_counted() -> None:
    actor = Actor()

    async def overflow(client: TelemetryClient) -> None:
        for number in range(BACKLOG + 3):
            client.record(step(number))
        assert (await client.finish({}))["dropped"] == 3

    told(actor, overflow)
    assert [record["worker"] for records, _ in actor.calls for record in records] == list(range(BACKLOG))

    async def failing(client: TelemetryClient) -> None:
        client.telemetry = Actor(fails=True)  # type: ignore[assignment]
        client.open()
        client.event(JOIN)
        client.record(ROUND)
        await asyncio.sleep(0.0)
        client.telemetry = actor  # type: ignore[assignment]
        assert (await client.finish({}))["dropped"] == 2

    told(actor, failing)


def test_the_driver_is_shown_steps_with_whatever_comes_next_or_once_they_have_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def tell(client: TelemetryClient) -> None:
        client.record(step(0))
        assert client.for_driver() == []
        client.record(ROUND)
        assert client.for_driver() == [step(0), ROUND]
        client.record(step(1))
        client.event({**JOIN, "kind": "loss"})
        shown = client.for_driver()
        assert shown[0] == step(1) and shown[1]["kind"] == "news"
        monkeypatch.setattr(telemetry, "BATCH_S", 1e-9)
        client.record(step(2))
        await settled(lambda: client.for_driver() == [step(2)])
        assert client.for_driver(everything=True) == []

    told(Actor(), tell)


def test_an_event_has_the_time_of_day_at_which_it_happened() -> None:
    written: list[dict[str, Any]] = []

    class Writing(Actor):
        def _write(self, records: list[Any], events: list[Any]) -> list[str]:
            written.extend(events)
            return []

    async def tell(client: TelemetryClient) -> None:
        before = datetime.now(UTC)
        client.note("join", worker=1, device="cpu")
        after = datetime.now(UTC)
        await client.finish({})
        at = datetime.fromisoformat(written[0]["wall_time"])
        assert at.tzinfo is UTC and before.replace(microsecond=before.microsecond // 1000 * 1000) <= at <= after
        assert next(iter(written[0])) == "wall_time"

    told(Writing(), tell)


def test_alert_is_an_event_after_the_record_that_caused_it_and_a_line_for_the_driver() -> None:
    actor = Actor()
    alert = Alert(metric="loss", op=">", value=5, for_rounds=1, message="too high")

    async def run() -> None:
        client = TelemetryClient(None, [alert])
        client.telemetry = actor  # type: ignore[assignment]
        for number, loss in enumerate((1.0, 7.0, 8.0, 2.0)):
            client.record({"kind": "round", "round": number, "loss": loss})
        await client.finish({})
        news = [record["text"] for record in client.for_driver(everything=True) if record["kind"] == "news"]
        first = "alert: too high: loss is 7, above 5, after round 2"
        assert news == [first, "alert over: too high: loss is 2, after round 4"]

    asyncio.run(asyncio.wait_for(run(), 60))
    ((_, events),) = actor.calls
    times = [event.pop("monotonic_s") for event in events]
    assert times == sorted(times)
    common = {"alert": "loss > 5", "metric": "loss", "op": ">", "limit": 5.0, "worker": None}
    assert events == [
        {"kind": "alert", **common, "value": 7.0, "round": 1, "text": "too high: loss is 7, above 5, after round 2"},
        {"kind": "alert_over", **common, "value": 2.0, "round": 3, "text": "too high: loss is 2, after round 4"},
    ]


def test_alert_about_the_last_commit_comes_though_nothing_happens_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "CLOCK_S", 0.001)
    actor = Actor()

    async def run() -> None:
        client = TelemetryClient(None, [Alert(metric="commit_age_s", op=">", value=0.01, for_s=0)])
        client.telemetry = actor  # type: ignore[assignment]
        client.open()
        await settled(lambda: bool(actor.calls))
        for _ in range(50):
            await asyncio.sleep(0.001)
        await client.finish({})

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [event["kind"] for _, events in actor.calls for event in events] == ["alert"]


def response(round: int, worker: int, incarnation: int, text: str) -> dict[str, Any]:
    source = {"round": round, "worker": worker, "incarnation": incarnation}
    return {"kind": "rollout", **source, "sample": 7, "response": text, "monotonic_s": 1.0}


def commit(round: int, *sources: tuple[int, int], rejected: tuple[int, ...] = ()) -> Commit:
    deltas = tuple(Contribution(worker, incarnation, 8, 1.0) for worker, incarnation in sources)
    return Commit(round, None, "", "", deltas, (), {}, 0, {}, tuple(Rejection(worker, "late") for worker in rejected))


def shown(is_async: bool, *events: dict[str, Any] | Commit) -> list[str]:
    """Responses that telemetry has received after these events."""
    actor = Actor()

    async def run() -> None:
        client = TelemetryClient(is_async=is_async)
        client.telemetry = actor
        for event in events:
            if isinstance(event, Commit):
                client.committed(event)
            else:
                client.event(event)
        client.open()
        await client.finish({})

    asyncio.run(asyncio.wait_for(run(), 60))
    told = [event for _, events in actor.calls for event in events]
    return [event["response"] for event in told if event["kind"] == "rollout"]


@pytest.mark.parametrize("is_async", [False, True])
def test_responses_to_a_prompt_are_those_of_the_delta_that_was_committed(is_async: bool) -> None:
    first, second = response(3, 0, 1, "of a lost worker"), response(3, 0, 2, "of its successor")
    other = response(3, 1, 1, "of another worker")
    assert shown(is_async, first, other, second, commit(3, (0, 2), (1, 1))) == ["of its successor", "of another worker"]
    assert shown(is_async, first, second, commit(3, (0, 1))) == ["of a lost worker"]
    assert shown(is_async, first, second) == []


def test_responses_of_a_rejected_delta_are_not_shown_with_the_next_one() -> None:
    late, next_one = response(3, 0, 1, "late"), response(4, 0, 1, "next")
    for is_async in (False, True):
        assert shown(is_async, late, next_one, commit(3, rejected=(0,)), commit(4, (0, 1))) == ["next"]


def test_responses_of_local_rounds_without_a_barrier_come_in_their_order() -> None:
    events = [response(2, 0, 1, "first"), response(3, 0, 1, "second"), response(4, 0, 1, "third")]
    assert shown(True, *events, commit(4, (0, 1), (0, 1))) == ["first", "second"]
    assert shown(False, *events, commit(3, (0, 1))) == ["second"]
