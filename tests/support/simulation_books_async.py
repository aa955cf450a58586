"""What must hold in simulated runs without a barrier, beside what must hold in all: see simulation_books."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from hypha_ray.scheduler import messages as c
from hypha_ray.types import Contribution, Delta, Event, Merged, Plan, RoundProgress, Source, Span
from tests.support.simulation_books import Books, samples_in


class AsyncBooks(Books):
    """Counts reductions and arrivals for itself."""

    def forget_attempt(self, survivors: int) -> None:
        super().forget_attempt(survivors)
        state = self.log[-1].state if self.log else {}
        self.step, self.total = state.get("step", 0), state.get("merged", 0)
        self.merged_at = {self.step: self.total}
        """Deltas that are in the weights of each step."""
        self.steps_of_commits = {0 if not self.log else self.step: len(self.log) - 1}
        self.first_step: dict[Source, int] = {}
        """Of the weights that a worker began with."""
        self.turns: dict[Source, int] = {}
        """Step of each worker's newest turn."""
        self.accepted: list[tuple[Contribution, Delta]] = []
        """Since the last commit."""
        self.done: set[tuple[Source, int]] = set()
        """Deltas that were reduced, by worker and step."""
        self.payloads: set[tuple[Source, int]] = set()
        self.waiting = False
        """A reduction goes on."""
        self.vain = 0
        self.norms: deque[float] = deque(maxlen=2 * self.size)
        """Of the deltas that were merged last, two rounds of them at most, as the server has measured them."""

    @property
    def _round(self) -> int:
        return self.step

    @property
    def _diverges(self) -> bool:
        return self.vain >= self.size

    @property
    def _merged_samples(self) -> int:
        """Samples of the log and of the deltas that were accepted since."""
        return len(self.used) + sum(delta.samples for _, delta in self.accepted)

    @property
    def size(self) -> int:
        return self.job.sync.period or self.job.num_workers

    def weights(self, round: float) -> str:
        commit = self.steps_of_commits.get(int(round)) if int(round) == round else None
        return "theta-between" if commit is None else f"theta-{commit}"

    # ── what the core hears ───────────────────────────────────────────────────────────────────────────────────────

    def hear(self, event: c.Input) -> None:
        super().hear(event)
        match event:
            case Delta(source=source, round=round) if (source, round) not in self.done:
                self.payloads.add((source, round))
            case Event(source=source) if isinstance(event, Merged):
                self.first_step.setdefault(source, event.version)
            case c.Reduced(verdict=verdict) if self.waiting and verdict.round == self.step:
                assert self.reduce is not None
                self.waiting = False
                rounds = dict(zip(self.reduce.sources, self.reduce.rounds, strict=True))
                sources = {source.worker: source for source in rounds}
                for one in verdict.accepted:
                    source = sources[one.worker]
                    self.accepted.append((one, self.deltas[rounds[source], source]))
                    self.norms.append(one.norm)
                self.total += len(verdict.accepted)
                self.vain = 0 if verdict.accepted else self.vain + sum(one.blamed for one in verdict.rejected)
                self._judge(verdict)
                self.step += 1
                self.merged_at[self.step] = self.total

    # ── what the core commands ────────────────────────────────────────────────────────────────────────────────────

    def _order(self, command: c.Order) -> None:
        super()._order(command)
        if isinstance(command, c.Assign) and command.plan.spans:
            merged = {sample for _, delta in self.accepted for sample in samples_in(delta.spans)}
            assert not merged & set(samples_in(command.plan.spans)), "a merged sample is given out"
            assert command.plan.progress is not None
            first, last = command.plan.progress
            assert 0 <= first <= last <= self.job.rounds.update_rounds, "learning rates of no time of the run"

    def _due(self, source: Source, plan: Plan) -> int:
        """Turns begin with the newest weights, and stay with them when they are resized."""
        if not plan.version:
            self.turns[source] = self.step
        return self.turns[source]

    def _reduce(self, command: c.Reduce) -> None:
        assert not self.waiting, "two reductions at a time"
        assert command.round == self.step, "a step is skipped or made twice"
        assert command.sources, "nothing is reduced"
        workers = [source.worker for source in command.sources]
        assert workers == sorted(set(workers)), "a worker is reduced twice at a time, or out of order"
        limit = 10 * self.size if self.job.sync.max_staleness is None else self.job.sync.max_staleness
        uniform = self.job.sync.weighting == "uniform"
        for source, samples, round in zip(command.sources, command.weights, command.rounds, strict=True):
            delta = self.deltas.get((round, source))
            assert delta is not None and (source, round) not in self.done, "a delta is reduced twice, or a stale one"
            assert samples == (1 if uniform else delta.samples), "a delta doesn't weigh what its samples do"
            assert self.total - self.merged_at[round] <= limit, "a delta of too old weights is merged"
            commit = self.steps_of_commits.get(self.first_step.get(source, -1))
            assert source not in self.false or commit not in self._known(), "wrong weights are merged"
            assert (source, round) in self.payloads, "a payload is forgotten before it is reduced"
            self.done.add((source, round))
        assert command.oldest_round is not None
        kept = {key for key in self.payloads if key[1] >= command.oldest_round}
        self.payloads = kept - set(zip(command.sources, command.rounds, strict=True))
        unit = self.size if uniform else self.job.rounds.samples_between_updates
        weight = sum(1 if uniform else delta.samples for _, delta in self.accepted)
        size = self.size
        if self.all_samples is not None:
            reduced = sum(
                self.deltas[round, source].samples
                for source, round in zip(command.sources, command.rounds, strict=True)
            )
            if self._merged_samples + reduced == self.all_samples:
                size = min(size, len(self.accepted) + len(command.sources))
        assert command.phase == RoundProgress(len(self.log), size, unit, len(self.accepted), weight, tuple(self.norms))
        self.reduce, self.waiting = command, True

    def _persist(self, persist: c.Persist) -> None:
        assert not self.waiting and persist.round == len(self.log), "rounds aren't dense"
        merged = tuple(replace(one, samples=delta.samples) for one, delta in self.accepted)
        assert persist.verdict.accepted == merged, "other deltas than were merged"
        is_last = self._merged_samples == self.all_samples
        assert len(self.accepted) >= self.size or is_last, "a round is too short"
        spans: dict[int, tuple[Span, ...]] = {}
        for one, delta in self.accepted:
            spans[one.worker] = spans.get(one.worker, ()) + delta.spans
        assert persist.spans == tuple(sorted(spans.items())), "other samples than the deltas' are counted"
        self.accepted = []
        self._enter(persist)
        self.steps_of_commits[self.step] = persist.round
        assert (persist.state["step"], persist.state["merged"]) == (self.step, self.total), "steps are miscounted"
        self._audit(persist)

    # ── after each step ───────────────────────────────────────────────────────────────────────────────────────────

    def _check_round(self, strategy: Any, leased: set[int]) -> None:
        current = strategy.current
        if current is None:
            return
        queue = strategy.queue
        on_their_way = {*queue.arrived, *queue.reducing}
        held = strategy.plans.ledger.held
        assert all(number in leased | on_their_way for number, spans in held.items() if spans), (
            "nobody has these samples"
        )
        training = set(strategy.training.rounds)
        assert not training & on_their_way, "a number trains while its delta is on its way"
        if strategy.open and not strategy.final and not queue.reducing:
            free = {slot.number for slot in self.roster.slots.values() if slot.working and not slot.excluded}
            has_samples = self.all_samples is None or strategy.plans.ledger.available
            assert free <= training | on_their_way or not has_samples, "a worker has nothing to do"
            assert not queue.arrived or strategy.grace_until is not None, "a delta is kept waiting"
        came = [one.delta.samples for one in (*queue.arrived.values(), *queue.reducing.values())]
        assert queue.samples == sum(came), "samples on their way are miscounted"
        reported = sum(self.roster.slots[number].member.progress.samples for number in training)
        assert strategy.training.reported == reported, "reported samples are miscounted"
        assert current.samples == sum(one.delta.samples for _, one, _ in current.accepted), "samples are miscounted"
        steps = [one.version for one in strategy.training.rounds.values()]
        assert steps == sorted(steps), "the first local round isn't the oldest"
