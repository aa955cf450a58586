"""Figures that a trainer from outside gives: whatever they are, they cost the run no more than that trainer."""

from __future__ import annotations

import dataclasses
import json
import math
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.conversation import check
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.codec import encoders
from hypha_ray.config import Job
from hypha_ray.config.rl import RL
from hypha_ray.errors import BridgeError
from hypha_ray.model.tokenizers import PackedTokenizer, pack
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.epoch import LedgerError
from hypha_ray.scheduler.ledger import Ledger
from hypha_ray.scheduler.planner import Pace, plan
from hypha_ray.scheduler.worker_state import BatchTime
from hypha_ray.store.snapshots import chunks
from hypha_ray.types import Entry, Evaluated, Layout, Merged, Plan, Report, Source, Span
from hypha_ray.types.events import HandOver
from hypha_ray.worker.bridged.messages import Inbound
from hypha_ray.worker.bridged.process import job_definition
from hypha_ray.worker.bridged.round_report import SampleLimits, figure_bounds, limits_of
from tests.support.fleet import Fleet, job_of, slices_of
from tests.support.rl import tokenizer

SOURCE = Source("virtual", 1, 1)
PLAN = Plan(3, 0, (Span(0, 0, 0, 32),), 8, (Span(0, 1, 0, 10),))
TEXT = SampleLimits(tokens=16, positions=16)
LAYOUT = Layout((Entry("w", "float32", (4,), 0, "parameters/float32", 0, 4),))
FINITE = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -1.0, 1e-300, 1e-12, 1e-9, 1.0, 1e6, 1e9, 1e12, 1e15, 1e300, -1e300, 1.7e308]),
)
NAMES = ("loss", "batches", "tokens", "scored", "seconds", "data_wait_s", "learning_rate", "gradient_norm", "else")
COUNTS = st.one_of(st.integers(0, 40), st.sampled_from([2**31 - 1, 2**63 - 1]))


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def results_of(clock: Clock, directory: Any = None, contents: SampleLimits = TEXT) -> Inbound:
    found = Inbound(SOURCE, directory, encoders(job_of().sync), clock)
    found.layout = LAYOUT
    found.begin(3)
    found.assigned(PLAN, contents)
    return found


def report(results: Inbound, samples: int, **items: float) -> list[Any]:
    message = pb.MetricSet(items=items, data_processed=samples, local_round=3)
    check("metrics", message)
    return list(results.events_of("metrics", message))


# ── what is taken, and what isn't ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("samples", "items", "refusal"),
    [
        (33, {}, r"MSG005.*samples of round 4 — got 33, allowed up to 32"),
        (8, {"batches": 9}, r"MSG005.*batches"),
        (32, {"batches": 6}, r"MSG005.*batches of round 4 — got 6, allowed up to 5"),
        (8, {"batches": 0.0}, r"MSG005.*batches"),
        (8, {"batches": -3.0}, r"MSG005.*batches"),
        (8, {"tokens": 8 * 16 + 1}, r"MSG005.*tokens — got 129.0, allowed up to 128"),
        (8, {"tokens": -1}, r"MSG005.*tokens"),
        (8, {"scored": 8 * 16 + 1}, r"MSG005.*scored positions — got 129.0, allowed up to 128"),
        (8, {"scored": -1}, r"MSG005.*scored"),
        (8, {"seconds": 11.2}, r"MSG005.*seconds of all batches — got 11.2, allowed up to 11.1"),
        (8, {"seconds": -1e-9}, r"MSG005.*metric seconds"),
        (8, {"data_wait_s": 11.2}, r"MSG005.*waits for data"),
        (8, {"learning_rate": -0.1}, r"MSG005.*learning_rate"),
        (8, {"gradient_norm": -1.0}, r"MSG005.*gradient_norm"),
        (8, {"loss": 1e300}, r"MSG003.*metric loss"),
        (8, {"loss": -1e13}, r"MSG003.*metric loss"),
        (8, {"gradient_norm": 1e13}, r"MSG003.*metric gradient_norm"),
        (8, {"anything": 1e13}, r"MSG003.*metric anything"),
    ],
)
def test_report_of_what_cannot_be_is_refused(samples: int, items: dict[str, float], refusal: str) -> None:
    clock = Clock()
    results = results_of(clock)
    clock.now += 10  # Ten seconds, 1 % more for clocks that differ, and one more second.
    with pytest.raises(BridgeError, match=refusal):
        report(results, samples, **items)


def test_reports_are_bounded_together_not_one_by_one() -> None:
    clock = Clock()
    results = results_of(clock)
    clock.now += 10
    report(results, 16, batches=2, seconds=6.0)
    for samples, items in ((17, {}), (16, {"batches": 4}), (16, {"seconds": 6.0}), (16, {"data_wait_s": 12.0})):
        with pytest.raises(BridgeError, match=r"MSG005"):
            report(results, samples, **items)


def test_report_is_what_was_said_and_first_batch_is_not_timed() -> None:
    clock = Clock()
    results = results_of(clock)
    clock.now += 10
    items = {"loss": 2.0, "batches": 2, "tokens": 200, "scored": 190, "seconds": 6.0, "learning_rate": 0.5}
    (first,) = report(results, 16, **items)
    assert (first.batches, first.samples, first.tokens, first.scored, first.loss_sum) == (2, 16, 200, 190, 380.0)
    assert (first.seconds, first.timed_batches, first.learning_rate, first.gradient_norm) == (3.0, 1, 0.5, None)
    (second,) = report(results, 8)
    assert (second.batches, second.timed_batches, second.tokens) == (1, 0, None), "nobody has said how long it took"
    assert second.scored == 0, "nobody has said what the loss is"


def test_data_without_tokens_has_none_whatever_a_trainer_says() -> None:
    clock = Clock()
    images = limits_of({"images": np.zeros((8, 3, 4, 4), np.float32), "labels": np.zeros(8, np.int64)})
    assert images == SampleLimits(tokens=0, positions=1)
    (said,) = report(results_of(clock, contents=images), 8, loss=1.0, tokens=8)
    assert said.tokens is None and said.scored == 8
    patches = limits_of({"images": np.zeros((8, 1, 8, 8), np.float32), "masks": np.zeros((8, 4), bool)})
    assert patches == SampleLimits(0, 4)
    text = limits_of({"input_ids": np.zeros((8, 16), np.int32), "labels": np.zeros((8, 20), np.int32)})
    assert text == SampleLimits(tokens=16, positions=20)


def test_words_of_other_rounds_and_repeated_ones_have_no_effect() -> None:
    results = results_of(Clock())
    merged, evaluation = pb.Merged(round=3, seconds=0.5), pb.Evaluation(round=3, loss_sum=9.0, count=10)
    assert [type(one) for one in results.events_of("merged", merged)] == [Merged]
    assert [type(one) for one in results.events_of("evaluation", evaluation)] == [Evaluated]
    for again in (("merged", merged), ("evaluation", evaluation), ("metrics", pb.MetricSet(local_round=3))):
        assert list(results.events_of(*again)) == []
    for early in ("merged", pb.Merged(round=2)), ("metrics", pb.MetricSet(local_round=2, data_processed=8)):
        assert list(results.events_of(*early)) == []
    for late in ("merged", pb.Merged(round=4)), ("metrics", pb.MetricSet(local_round=4, data_processed=8)):
        with pytest.raises(BridgeError, match=r"MSG005.*round of the m"):
            list(results.events_of(*late))


@pytest.mark.parametrize(("count", "loss_sum", "code"), [(161, 1.0, "MSG005"), (10, 1e300, "MSG003")])
def test_evaluation_of_more_than_was_given_or_beyond_all_losses_is_refused(
    count: int, loss_sum: float, code: str
) -> None:
    with pytest.raises(BridgeError, match=code):
        message = pb.Evaluation(round=3, loss_sum=loss_sum, count=count)
        check("evaluation", message)
        list(results_of(Clock()).events_of("evaluation", message))


def policy_results(**reward: Any) -> Inbound:
    """Results of a trainer of policies, each of whose 10 validation prompts has 2 responses of up to 5 tokens."""
    tables = {"group_size": 4, "generation": {"max_response_tokens": 5}, "evaluation": {"samples": 2}, "reward": reward}
    figures = figure_bounds(RL.model_validate({"algorithm": "grpo", **tables}))
    found = Inbound(SOURCE, None, encoders(job_of().sync), Clock(), figures)  # type: ignore[arg-type]
    found.layout = LAYOUT
    found.begin(3)
    found.assigned(PLAN, TEXT)
    return found


def judged(**figures: tuple[float, float]) -> list[Any]:
    given = {name: pb.Figure(total=total, weight=weight) for name, (total, weight) in figures.items()}
    message = pb.Evaluation(round=3, figures=given)
    check("evaluation", message)
    return list(policy_results().events_of("evaluation", message))


def test_evaluation_of_a_policy_has_its_figures_and_no_loss() -> None:
    figures = {"reward": (-7.5, 20.0), "pass@1": (3.5, 10.0), "pass@2": (5.0, 10.0), "entropy": (1e9, 1e9)}
    (event,) = judged(**figures)

    assert event.sums == {name: figures[name] for name in ("reward", "pass@1", "pass@2")}
    (event,) = judged()
    assert event.sums == {}


@pytest.mark.parametrize(("first", "shared"), [("model", False), ("exact", True)])
def test_evaluation_of_a_policy_by_a_reward_model_has_no_share_of_right_responses(first: str, shared: bool) -> None:
    functions = [first, *({"model", "exact"} - {first})]
    message = pb.Evaluation(round=3, figures={"pass@1": pb.Figure(total=3.0, weight=10.0)})
    (event,) = policy_results(functions=functions, model={"repository": "a/b"}).events_of("evaluation", message)
    assert event.sums == ({"pass@1": (3.0, 10.0)} if shared else {})


@pytest.mark.parametrize(
    ("figures", "refusal"),
    [
        ({"reward": (1.0, 20.5)}, r"MSG005.*weight of reward — got 20.5, allowed up to 20"),
        ({"reward": (1.0, -1.0)}, r"MSG003.*weight of reward"),
        ({"reward": (math.inf, 1.0)}, r"MSG001.*total of reward"),
        ({"reward": (1.0, 0.0)}, r"MSG005.*total of reward"),
        ({"pass@1": (3.5, 3.0)}, r"MSG005.*total of pass@1"),
        ({"pass@1": (1.0, 11.0)}, r"MSG005.*weight of pass@1"),
        ({"truncated": (-1.0, 20.0)}, r"MSG005.*total of truncated"),
        ({"response_tokens": (101.0, 20.0)}, r"MSG005.*total of response_tokens"),
        ({"pass 1": (1.0, 1.0)}, r"MSG002.*figures.*'pass 1'"),
    ],
)
def test_figures_of_a_policy_that_cannot_be_are_refused(figures: dict[str, Any], refusal: str) -> None:
    with pytest.raises(BridgeError, match=refusal):
        judged(**figures)


def test_a_trainer_of_policies_is_told_of_the_algorithm_and_the_tokenizer_but_of_no_servers() -> None:
    tables = {"generation": {"server": {"command": "x {port}"}}, "reward": {"judge": {"key_variable": "KEY"}}}
    job = Job.model_validate({"rl": {"algorithm": "grpo", "group_size": 4, **tables}})
    told = json.loads(json.dumps(job_definition(job, 1, pack(tokenizer()))))

    assert told["rl"]["group_size"] == 4
    assert "server" not in told["rl"]["generation"] and "judge" not in told["rl"]["reward"]
    files = tuple((name, b64decode(content)) for name, content in told["tokenizer"].items())
    assert PackedTokenizer(None, (), files).load().decode([2, 3]) == tokenizer().decode([2, 3])


@pytest.mark.parametrize(
    "fields",
    [{"samples": 33}, {"batches": 6}, {"samples": 2, "batches": 3}, {"tokens": 513}, {"loss": 1e300}, {"loss": -1e13}],
)
def test_update_of_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    known = {"round": 3, "samples": 32, "batches": 4, "tokens": 512, "loss": 1.0}
    message = pb.Update(**{**known, **fields}, update=pb.WeightUpdate(model_path="updates/x"))
    message.content.CopyFrom(pb.Content(size=1, sha256=b"5" * 32))
    with pytest.raises(BridgeError, match=r"MSG00[35]"):
        check("update", message)
        list(results_of(Clock()).events_of("update", message))


def test_times_of_a_delta_are_those_of_our_clock(tmp_path: Path) -> None:
    (tmp_path / "updates").mkdir()
    directory, clock = WorkDirectory(tmp_path), Clock()
    results = results_of(clock, directory)
    clock.now += 4
    list(results.events_of("merged", pb.Merged(round=3)))
    list(results.events_of("evaluation", pb.Evaluation(round=3, loss_sum=9.0, count=10)))
    clock.now += 2.5
    report(results, 8, loss=1.0, scored=100, seconds=1e-12, data_wait_s=3.0)
    clock.now += 100
    content = directory.write("updates/x", chunks({"w": np.ones(4, np.float32)}))
    message = pb.Update(round=3, update=pb.WeightUpdate(model_path="updates/x"), content=content, samples=16, batches=2)
    result = next(iter(results.events_of("update", message)))
    assert isinstance(result, HandOver)
    delta = result.delta
    assert (delta.train_s, delta.data_wait_s) == (2.5, 2.5)
    assert (delta.scored, delta.tokens) == (100 + 8, None), "eight samples were in no report"


# ── the layers behind that ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seconds", [1e-300, 9e-10, 1.1e9, 1e300])
def test_batch_time_is_one_that_can_be_planned_with(seconds: float) -> None:
    known = BatchTime()
    known.observe(seconds)
    assert known.mean is None
    known.observe(1e-9)
    for _ in range(100):
        known.fade(0.5)
    assert known.mean == 1e-9 and plan([Pace(0, known.mean, 4)], 8).batches == {0: 2}


def test_ledger_refuses_more_than_anybody_is_given_at_once() -> None:
    ledger = Ledger(slices_of(train=2, samples=10, validation=0), 0, most_samples=24)
    with pytest.raises(LedgerError, match=r"LED005.*25 samples, allowed up to 24"):
        ledger.assign(0, 25)
    assert sum(span.samples for span in ledger.assign(0, 24)) == 24


def job_with(**tables: dict[str, Any]) -> Job:
    rounds = {"update_rounds": 3, "samples_between_updates": 96, "max_batch_size": 4}
    return job_of(rounds=rounds, resources={"min_workers": 1}, **tables)


@pytest.mark.parametrize("strategy", ["diloco", "async"])
def test_word_that_the_core_cannot_take_costs_its_worker_and_not_the_run(strategy: str) -> None:
    fleet = Fleet(job_with(sync={"strategy": strategy}), [0.1, 0.1, 0.1], slices_of())

    def attack() -> None:
        worker = fleet.workers[1]
        assert worker.plan is not None
        words = Report(worker.source, worker.plan.round, 1, "many", 4, 4, 1.0, 1.0, 1, 0.0, 0.1)  # type: ignore[arg-type]
        fleet.tell(words)

    fleet.later(0.6, attack)
    fleet.run()
    assert fleet.error is None
    losses = [note["reason"] for note in fleet.noted("loss")]
    assert len(losses) == 1 and losses[0].startswith("its Report event can't be handled")
    assert len(fleet.persisted) == 3


@pytest.mark.parametrize("strategy", ["diloco", "async"])
@pytest.mark.parametrize("batches", [10**6, 10**15])
def test_progress_beyond_a_plan_gives_nobody_epochs_of_work(strategy: str, batches: int) -> None:
    fleet = Fleet(job_with(sync={"strategy": strategy}), [0.1, 0.1, 0.1], slices_of())

    def attack() -> None:
        worker = fleet.workers[1]
        assert worker.plan is not None
        fleet.tell(Report(worker.source, worker.plan.round, batches, 4, 4, 4, 1.0, 1e-9 * batches, batches, 0.0, 0.1))
        fleet.kill(2)

    fleet.later(0.6, attack)
    fleet.run()
    assert fleet.error is None
    assert max(one.plan.samples for _, one in fleet.commanded(c.Assign)) <= 96 + 4


# ── everything at once ────────────────────────────────────────────────────────────────────────────────────────────────

METRICS = st.tuples(st.just("metrics"), st.dictionaries(st.sampled_from(NAMES), FINITE), COUNTS)
UPDATE = st.tuples(st.just("update"), FINITE, st.tuples(COUNTS, COUNTS, COUNTS))
EVALUATION = st.tuples(st.just("evaluation"), FINITE, COUNTS)
WORDS = st.lists(st.tuples(st.floats(0.3, 8.0), st.one_of(METRICS, METRICS, UPDATE, EVALUATION)), max_size=12)


class Outsider:
    """A trainer that says anything through the bridge, in the name of worker 1."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet, self._directory = fleet, WorkDirectory(folder)
        self._results: Inbound | None = None
        self._of: tuple[Source, int] | None = None

    def says(self, kind: str, first: Any, second: Any) -> None:
        worker = self._fleet.workers.get(1)
        if self._fleet.finished or worker is None or not worker.alive or worker.plan is None:
            return
        if self._of != (worker.source, worker.plan.round):
            self._of = worker.source, worker.plan.round
            encoding = encoders(self._fleet.job.sync)
            self._results = Inbound(worker.source, self._directory, encoding, lambda: self._fleet.now)
            self._results.layout = LAYOUT
            self._results.begin(worker.plan.round)
        assert self._results is not None
        self._results.assigned(worker.plan, TEXT)
        try:
            message = self._message(kind, first, second, worker.plan.round)
            check(kind, message)
            for event in self._results.events_of(kind, message):
                self._fleet.tell(event.delta if isinstance(event, HandOver) else event)
        except BridgeError:
            self._fleet.kill(1)

    def _message(self, kind: str, first: Any, second: Any, number: int) -> Any:
        match kind:
            case "metrics":
                return pb.MetricSet(items=first, data_processed=second, local_round=number)
            case "evaluation":
                return pb.Evaluation(round=number, loss_sum=first, count=second)
        content = self._directory.write("updates/x", chunks({"w": np.ones(4, np.float32)}))
        samples, tokens, batches = second
        figures = {"samples": samples, "tokens": tokens, "batches": min(batches, 2**32 - 1), "loss": first}
        return pb.Update(round=number, update=pb.WeightUpdate(model_path="updates/x"), content=content, **figures)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["diloco", "async", "sync"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS)
def test_no_finite_figure_ends_or_hangs_a_run(strategy: str, words: list[Any], tmp_path: Path) -> None:
    (tmp_path / "updates").mkdir(exist_ok=True)
    job = job_with(sync={"strategy": strategy, "period": 2} if strategy == "async" else {"strategy": strategy})
    fleet = Fleet(job, [0.3, 0.3, 0.5], slices_of())
    outsider = Outsider(fleet, tmp_path)
    for at, word in words:
        fleet.later(at, lambda word=word: outsider.says(*word))
    fleet.run(limit=20_000)
    assert fleet.error is None
    assert [persist.round for persist in fleet.persisted] == [0, 1, 2]
    most = 96 * (3 if strategy == "async" else 1) + 4
    assert all(one.plan.samples <= most for _, one in fleet.commanded(c.Assign))
    for record in (*fleet.records, *fleet.notes):
        json.dumps(record, allow_nan=False, default=dataclasses.asdict)
    losses = [record["loss"] for record in fleet.records if record.get("loss") is not None]
    assert all(math.isfinite(loss) and abs(loss) <= 1e12 for loss in losses)
