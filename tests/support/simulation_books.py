"""What must hold at every step of a simulated run, whatever goes wrong: an auditor beside the scheduler's brain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.planner import CHECK_S
from hypha_ray.types import Delta, Event, Merged, Plan, Ready, SliceInfo, Source, Span, Verdict

Sample = tuple[int, int, int]
"""Epoch, slice, number in the slice."""

SLACK_S = 1e-6


def samples_in(spans: Iterable[Span]) -> list[Sample]:
    return [(span.epoch, span.slice, number) for span in spans for number in range(span.start, span.stop)]


class Books:
    """Knows what the core was told and what it commanded, and compares that with what it should have."""

    def __init__(self, job: Job, slices: list[SliceInfo]) -> None:
        self.job, self._sizes = job, {info.index: info.samples for info in slices if info.split == "train"}
        self.all_samples: int | None = None
        """Samples of all epochs together; None if the run ends after a number of rounds."""
        if job.rounds.epochs is not None:
            self.all_samples = job.rounds.epochs * sum(self._sizes.values())
        self.now = self.clock = 0.0
        """The time, with and without that in which the scheduler was stopped."""
        self.calm: list[Any] | None = None
        """Whose samples the rounds have if nothing goes wrong, where nothing may change that."""
        self.log: list[c.Persist] = []
        """Rounds that the log has, or will have if nothing dies."""
        self.used: set[Sample] = set()
        self.inner: dict[int, int] = {}
        """Last committed round in which a worker number trained: that is the inner state to go on from."""
        self.rejected: Counter[int] = Counter()
        """Rejected deltas of each number, of the rounds in the log."""
        self.strikes: Counter[int] = Counter()
        """Those of them that were rejected for what they were, less those that were accepted since."""
        self.lost = False
        """Payloads of the newest verdict were."""
        self.breakdowns: Counter[int] = Counter()
        self.newest_incarnation: dict[int, int] = {}
        self.false: set[Source] = set()
        """Workers that have said they began with weights that are not the committed ones."""
        self.forget_attempt(0)

    def forget_attempt(self, survivors: int) -> None:
        """The scheduler is gone, and of the log so many rounds are left."""
        log, self.log = self.log[:survivors], []
        self.used, self.inner, self.rejected = set(), {}, Counter()
        for persist in log:
            self._enter(persist)
        known = log[-1].state["workers"] if log else {}
        self.strikes = Counter({int(number): int(one.get("strikes", 0)) for number, one in known.items()})
        self.at_work: dict[int, Source] = {}
        self.hired: dict[int, Source] = {}
        self.fed: dict[Source, set[int]] = {}
        self.words: dict[Source, float] = {}
        """When a worker was last heard, on a clock that stands still while the scheduler is stopped."""
        self.in_time: dict[Source, float] = {}
        """The same, of words that certainly came before the lease was over."""
        self.fenced: dict[Source, float] = {}
        """When a worker that is to be given up was heard once more."""
        self.misbuilt: set[Source] = set()
        """Workers with another model."""
        self.deltas: dict[tuple[int, Source], Delta] = {}
        """First delta of each round and worker that came while that worker was there."""
        self.taken: dict[tuple[int, int], tuple[Source, float]] = {}
        """Whose delta the core has taken, and when, by round and number."""
        self.planned: dict[tuple[int, Source], Plan] = {}
        self.committed: set[int] = set()
        self.reduce: c.Reduce | None = None
        self.excluded: set[int] = set()
        self.began = len(self.log)
        self.recorded: list[int] = []
        self.breakdowns.clear()
        self.failures: Counter[int] = Counter()
        """Workers of each number in a row that went without having contributed."""
        self.due: dict[int, tuple[float, float]] = {}
        """When a number's next worker is to be hired: at `now`, and on the `clock`."""

    # ── what the core hears ───────────────────────────────────────────────────────────────────────────────────────

    def hear(self, event: c.Input) -> None:
        match event:
            case Event(source=source) if self.at_work.get(source.worker) == source:
                if self.clock - self.words[source] > self.job.worker.lease_s + SLACK_S:
                    self.fenced.setdefault(source, self.clock)
                self.words[source] = self.clock
                if self.clock - self.in_time[source] < self.job.worker.lease_s - CHECK_S:
                    self.in_time[source] = self.clock
                if isinstance(event, Delta) and source not in self.fenced:
                    self.deltas.setdefault((event.round, source), event)
                if isinstance(event, Merged) and event.theta_sha256 == "false":
                    self.false.add(source)
            case Ready(source=source, layout=layout) if self.hired.get(source.worker) == source:
                self.at_work[source.worker], self.fed[source] = source, set()
                self.words[source] = self.in_time[source] = self.clock
                self.misbuilt |= {source} if layout != "layout" else set()
            case c.Lost(source=source) if self.hired.get(source.worker) == source:
                self.breakdowns[source.worker] += 1
            case c.Committed(saved=saved):
                self.committed.add(saved.commit.round)
            case c.Reduced(verdict=verdict) if self.reduce is not None and verdict.round == self.reduce.round:
                assert {one.worker for one in verdict.accepted} <= {one.worker for one in self.reduce.sources}
                self.lost = not all(one.blamed for one in verdict.rejected)

    # ── what the core commands ────────────────────────────────────────────────────────────────────────────────────

    def obey(self, command: c.Command) -> None:
        match command:
            case c.Hire(source=source):
                self._hire(source)
            case c.Dismiss(worker=worker, reason=reason):
                self._dismiss(worker, reason)
            case c.Feed() | c.Assign() | c.Merge() | c.RestoreInnerState() | c.Drain():
                self._order(command)
            case c.Reduce():
                self._reduce(command)
            case c.Persist():
                self._persist(command)
            case c.LogMetric(fields=fields) if fields["kind"] == "eval":
                assert self.weights(fields["val_loss"]) == f"theta-{fields['round']}", "other weights are evaluated"
            case c.LogMetric(fields=fields) if fields["kind"] == "round":
                assert fields["round"] in range(self.began, len(self.log)), "a record of a round without a commit"
                assert not self.recorded or fields["round"] > self.recorded[-1], "a round is recorded twice"
                assert fields["samples_total"] == _samples_total(self.log[: fields["round"] + 1])
                self.recorded.append(fields["round"])

    def _hire(self, source: Source) -> None:
        assert source.worker not in self.hired, "a number is given away twice"
        strikes = self.strikes[source.worker]
        assert source.worker not in self.excluded and strikes < self.job.sync.strikes, (
            "an excluded number is given away"
        )
        assert source.incarnation > self.newest_incarnation.get(source.worker, 0), "an incarnation doesn't grow"
        due, due_clock = self.due.get(source.worker, (0.0, self.clock))
        assert self.now >= due - SLACK_S, "a worker is hired too early"
        assert self.clock <= due_clock + 2 * CHECK_S + SLACK_S, "a worker is hired too late"
        self.hired[source.worker] = source
        self.newest_incarnation[source.worker] = source.incarnation

    def _dismiss(self, worker: int, reason: str) -> None:
        source = self.hired.pop(worker)
        was = self.at_work.pop(worker, None)
        failures, blame = self.failures[worker], reason != "left"
        wait_s = min(60.0, 2.0 ** (failures - 1)) if failures and blame else 0.0
        self.due[worker] = self.now + wait_s, self.clock + wait_s
        self.failures[worker] += blame
        if reason.startswith("silent"):
            assert was is not None and self.clock - self.in_time[source] > self.job.worker.lease_s - 2 * CHECK_S, (
                "a worker is given up that was heard of"
            )
        if reason.startswith(("no progress", "silent")):
            self.breakdowns[worker] += 1
        if reason.startswith("excluded"):
            assert self.strikes[worker] >= self.job.sync.strikes, "a worker is excluded too early"
            self.excluded.add(worker)
        if reason.startswith("it builds"):
            self.excluded.add(worker)
        if not reason.startswith("it began"):
            self.false.discard(source)  # What it claimed can't be held against anybody any more.
        else:
            assert source in self.false, "a worker with the right weights is dismissed"
            for (round, number), (taken, _) in list(self.taken.items()):
                if number == worker and taken == source and round >= len(self.log) + self._reducing:
                    del self.taken[round, number]

    def _order(self, command: c.Order) -> None:
        assert command.worker in self.at_work, f"{command} to nobody"
        source = self.at_work[command.worker]
        assert source not in self.misbuilt or isinstance(command, c.Feed | c.Drain), (
            "a worker with another model is employed"
        )
        match command:
            case c.Feed(slice=index):
                self.fed[source].add(index)
            case c.Assign(plan=plan):
                self.fed[source] &= plan.keep
                slices = {span.slice for span in (*plan.spans, *plan.evaluate, *plan.ahead)}
                assert slices <= self.fed[source], "a slice isn't sent"
                assert not plan.ahead or plan.round + 1 < self.job.rounds.update_rounds, "nobody wants these samples"
                assert plan.round == self._due(source, plan), "a plan for another round than the present one"
                assert not self.used & set(samples_in((*plan.spans, *plan.ahead))), "a used sample is given out"
                self.planned[plan.round, source] = plan
            case c.Merge(version=number, whole=whole):
                assert number == self._round, "weights of another round than the last committed one"
                plan = self.planned.get((number - 1, source))
                if self.job.sync.overlaps and not whole and plan is not None and plan.spans:
                    accepted = {(one.worker, one.incarnation) for one in self.log[-1].verdict.accepted}
                    assert (source.worker, source.incarnation) in accepted, "weights of its own have seen lost samples"
            case c.RestoreInnerState(worker=worker):
                assert worker in self.inner, "there is no inner state"

    @property
    def _round(self) -> int:
        """The number under which workers know the newest weights."""
        return len(self.log)

    def _due(self, source: Source, plan: Plan) -> int:
        """The round that a worker's plan must be for: one that may begin before those before it are committed."""
        wanted = max(self.began, version_due(self.job, plan.round))
        assert wanted <= len(self.log) <= plan.round, "a round is begun before the weights are there that are due in it"
        assert plan.round - len(self.log) < self.job.sync.in_flight, "more exchanges are under way than may be"
        return plan.round

    def _reduce(self, command: c.Reduce) -> None:
        assert self.reduce is None or command.round > self.reduce.round, "a round is reduced twice"
        assert command.round == len(self.log), "a round is skipped"
        assert command.sources, "nothing is reduced"
        workers = [source.worker for source in command.sources]
        assert workers == sorted(set(workers)), "a worker is in a round twice, or out of order"
        for source, samples in zip(command.sources, command.weights, strict=True):
            delta = self.deltas.get((command.round, source))
            assert delta is not None, "a stale delta is in a round"
            weight = 1 if self.job.sync.weighting == "uniform" else delta.samples
            assert samples == weight, "a delta doesn't weigh what its samples do"
            assert source not in self.false or command.round - 1 not in self._known(), "wrong weights are merged"
            if self.job.run.mode == "replay" and not self.rejected[source.worker]:
                before = self.inner.get(source.worker, -1)
                assert delta.tokens == before, f"{source} trained from inner state {delta.tokens}, not {before}"
        self.reduce = command

    @property
    def _diverges(self) -> bool:
        """Whether a run may end because no delta is good."""
        return self._reducing

    @property
    def _reducing(self) -> bool:
        return self.reduce is not None and self.reduce.round == len(self.log)

    def _known(self) -> set[int]:
        return {self.began - 1} | self.committed

    def _persist(self, persist: c.Persist) -> None:
        assert self.reduce is not None and persist.round == self.reduce.round == len(self.log), "rounds aren't dense"
        accepted = {one.worker for one in persist.verdict.accepted}
        assert {worker for worker, _ in persist.spans} == accepted, "samples of a delta that isn't accepted"
        sources = {source.worker: source for source in self.reduce.sources}
        for worker, spans in persist.spans:
            assert spans == self.deltas[persist.round, sources[worker]].spans, (
                "other samples than the delta's are counted"
            )
        for one in persist.verdict.accepted:
            delta = self.deltas[persist.round, sources[one.worker]]
            assert one.samples == delta.samples, "a weight is written down as samples"
        self._enter(persist)
        self._judge(persist.verdict)
        if self.calm is not None and not self.rejected:
            assert persist.spans == self.calm[persist.round], "replay has other samples than the calm run"
        self._audit(persist)

    def _audit(self, persist: c.Persist) -> None:
        """Compare what a commit says of the run so far."""
        assert persist.state["totals"]["samples_total"] == _samples_total(self.log), "totals are wrong"
        for number in range(self.job.num_workers):
            strikes = persist.state["workers"].get(str(number), {}).get("strikes", 0)
            assert strikes == self.strikes[number], "strikes aren't written down"
        oldest = self.epoch
        assert persist.epoch == oldest, "the oldest epoch is wrong"
        counts = Counter(index for epoch, index, _ in self.used if epoch == oldest)
        assert persist.cursors == dict(counts), "cursors are wrong"

    def _judge(self, verdict: Verdict) -> None:
        """What a verdict says of the workers."""
        for one in verdict.accepted:
            self.breakdowns.clear()
            self.failures[one.worker] = 0
            self.strikes[one.worker] = max(0, self.strikes[one.worker] - 1)
        self.strikes.update(one.worker for one in verdict.rejected if one.blamed)

    def _enter(self, persist: c.Persist) -> None:
        samples = [sample for _, spans in persist.spans for sample in samples_in(spans)]
        assert len(samples) == len(set(samples)) and not self.used & set(samples), "a sample is used twice"
        assert all(0 <= number < self._sizes[index] for _, index, number in samples), "there is no such sample"
        self.used |= set(samples)
        epochs = self.job.rounds.epochs
        assert epochs is None or max(sample[0] for sample in samples) < epochs, "a sample is used once too often"
        self.log.append(persist)
        self.rejected.update(one.worker for one in persist.verdict.rejected)
        self.inner |= {worker: persist.round for worker, _ in persist.spans if self.job.run.mode == "replay"}

    @property
    def epoch(self) -> int:
        """The oldest epoch that isn't wholly used, by counting."""
        sizes, total = Counter(epoch for epoch, _, _ in self.used), sum(self._sizes.values())
        return next(epoch for epoch in range(len(sizes) + 1) if sizes[epoch] < total)

    def weights(self, round: float) -> str:
        """Hash of the weights with which a worker's round begins."""
        return f"theta-{round - 1:g}"

    # ── after each step ───────────────────────────────────────────────────────────────────────────────────────────

    def check(self, core: Any) -> None:
        """Compare the core's own books."""
        strategy, roster = core.view().strategy, core.view().roster
        strategy.plans.ledger.check()
        leased = {slot.number: slot.source for slot in roster.slots.values() if slot.lease is not None}
        assert leased == self.at_work, "the roster and the world disagree on who is at work"
        assert len(roster.book.leases) == len(leased), "a lease has no holder"
        self.roster = roster
        self._check_counts(strategy, roster)
        self._check_round(strategy, set(leased))
        for number, (_, due) in self.due.items():
            slot = roster.slots[number]
            waits = number not in self.hired and not slot.excluded and not slot.done
            assert not waits or self.clock <= due + 2 * CHECK_S + SLACK_S, "nobody is hired"
        limit_s = self.job.worker.lease_s + 2 * CHECK_S + SLACK_S
        for number, source in leased.items():
            heard_s = self.clock - self.words[source]
            fenced_s = self.clock - self.fenced.get(source, self.clock)
            assert max(heard_s, fenced_s + self.job.worker.lease_s) <= limit_s or roster.slots[number].done, (
                "a silent worker isn't missed"
            )

    def _check_counts(self, strategy: Any, roster: Any) -> None:
        """What is counted and listed as workers come and go is what looking at all of them gives."""
        working = [slot.member for slot in roster.slots.values() if slot.working]
        assert roster.assignable == working and roster.assignable_count == len(working), "workers are miscounted"
        assert roster.members == [slot.member for slot in roster.slots.values() if slot.lease], "workers are missed"
        assert roster.eligible == sum(not slot.excluded for slot in roster.slots.values()), "exclusions are miscounted"
        if strategy.current is not None and self.job.sync.strategy != "async":
            reported = sum(member.progress.samples for member in roster.members)
            assert strategy.reported_samples == reported, "reported samples are miscounted"
            assert strategy.current.deltas.keys() <= strategy.current.awaiting, "a delta isn't awaited"

    def _check_round(self, strategy: Any, leased: set[int]) -> None:
        current, in_flight = strategy.current, strategy.in_flight
        assert all(one.deltas and one.number >= len(self.log) for one in in_flight), "nothing is in flight"
        if not strategy.open:
            return
        owners = {*leased, *current.replay_plans}.union(current.deltas, *(one.deltas for one in in_flight))
        held = strategy.plans.ledger.held
        assert all(number in owners for number, spans in held.items() if spans), "nobody has these samples"
        for number, delta in current.deltas.items():
            taken = delta.source, current.delivered_at[number]
            source, at = self.taken.setdefault((current.number, number), taken)
            first = self.deltas.get((current.number, source))
            assert first is delta and at == taken[1], "a delta is taken that is not the first"

    @property
    def _is_whole(self) -> bool:
        """Whether the log has all that the run is to have."""
        if self.all_samples is None:
            return len(self.log) == self.job.rounds.update_rounds
        return len(self.used) == self.all_samples and bool(self.log[-1].state["last"])

    def finish(self, core: Any, error: Exception | None) -> None:
        """Was it right to end the run?"""
        code, needed = getattr(error, "code", None), core.view().needed
        match code:
            case None:
                assert error is None and self._is_whole, "the run ends too early"
            case "CAP002":
                assert len(core.view().roster.assignable) < needed, "there are workers enough"
            case "CKPT005":
                assert self.began and {source.worker for source in self.misbuilt} == set(core.view().roster.slots)
            case "NET008":
                able = set(core.view().roster.slots) - self.excluded
                assert all(self.breakdowns[number] >= 5 for number in able), "not every worker breaks down"
            case "TRN001":
                assert self._diverges and not self.lost
            case "NET012":
                assert self._reducing and self.lost, "nothing is lost"
            case "NET010":
                assert self.false and self.job.sync.in_flight > 1
            case _:
                raise AssertionError(f"the run ends by {error!r}")


def _samples_total(log: list[c.Persist]) -> int:
    return sum(span.samples for persist in log for _, spans in persist.spans for span in spans)
