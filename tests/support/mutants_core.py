"""The scheduler's brain with one defect each: one place of a module's source is changed, all modules are built anew."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from hypha_ray.scheduler.core import SchedulerCore

PATHS = (
    "hypha_ray.market.leases",
    *(
        f"hypha_ray.scheduler.{part}"
        for part in (
            "fleet.worker_state",
            "rounds.metrics",
            "rounds.round",
            "fleet.slot",
            "fleet.roster",
            "fleet.strikes",
            "failures",
            "fleet.weight_hashes",
            "rounds.evaluation",
            "rounds.pending",
            "planning.worker_plans",
            "planning.validation",
            "planning.round_planner",
            "strategies.base",
            "strategies.barrier",
            "rounds.async_round",
            "planning.async_planner",
            "strategies.arrival_queue",
            "strategies.asynchronous",
            "strategies",
            "core",
        )
    ),
)
"""Modules that are built anew for a mutant, each after those that it imports."""

MUTANTS: dict[str, tuple[str, str, str]] = {
    # ── who is there
    "an old incarnation is heard": (
        "roster",
        "slot is not None and slot.source == source else",
        "slot is not None else",
    ),
    "a word doesn't renew the lease": ("leases", "self._leases[lease_id] = renewed = Lease", "renewed = Lease"),
    "a late word renews the lease": ("leases", "or lease.expired(now):", "or False:"),
    "a vacated slot keeps its lease": ("roster", "self.book.release(slot.lease)", "pass"),
    "silence isn't noticed": ("roster", "elif slot.lease.id in over:", "elif False:"),
    "a lease is over a second early": ("leases", "return now >= self.expiry_s", "return now >= self.expiry_s - 2.5"),
    "a worker that makes no progress is kept": ("roster", "> self._job.worker.stall_s:", "> 1e9:"),
    "who merges or evaluates may do so for ever": (
        "barrier",
        "                return self.pending.busy(current.weights_version)",
        "                return set()",
    ),
    "the scheduler's own absence counts": ("core", "self._roster.defer(late_s)", "pass"),
    "leases aren't deferred": ("leases", "expiry_s=lease.expiry_s + seconds", "expiry_s=lease.expiry_s"),
    "incarnations begin anew": ("roster", "self._attempt * STARTS_PER_ATTEMPT + slot.starts", "slot.starts"),
    "back-off is never reset": ("roster", "self.slots[number].failures = 0", "pass"),
    "back-off doesn't grow": ("roster", "2 ** min(failures - 1, 60)", "1"),
    "nobody is hired after a loss": ("roster", "slot.retry_at = now + wait_s", "slot.retry_at = None"),
    "strikes aren't counted": ("roster", "slot.strikes += 1", "pass"),
    "strikes aren't carried over": (
        "roster",
        'slot.strikes = int(known.get("strikes", 0))',
        "pass",
    ),
    "exclusion is forgiven by a strike": (
        "roster",
        "        if slot.strikes >= self.most_strikes",
        "        slot.excluded = bool(self._vacant.add(number))\n        if slot.strikes >= self.most_strikes",
    ),
    "an excluded number is given away": ("slot", "and not self.excluded and", "and"),
    "another model is as good": ("core", "if member.layout != self._layout_sha256", "if False"),
    "nobody gives up waiting": ("core", 'self._timers["idle"] = now + limit_s', "pass"),
    # ── trust
    "wrong weights are believed": ("weight_hashes", "return self._known[round] == theta_sha256", "return True"),
    "a claim isn't kept": ("weight_hashes", "self._claims[source] = round, theta_sha256", "pass"),
    "what was handed over with wrong weights stays": ("core", "self._strategy.discard_delta(source)", "pass"),
    "of two wrong joiners one is left out": (
        "core",
        "            self._strategy.discard_delta(source)\n        for source in sources:\n",
        "            self._strategy.discard_delta(source)\n",
    ),
    # ── rounds
    "a delta is taken twice": (
        "barrier",
        "or worker in state.round.deltas or worker not in state.round.awaiting",
        "or worker not in state.round.awaiting",
    ),
    "deltas of another round are taken": (
        "barrier",
        "self.current is not None and event.round == self.current.number",
        "self.current is not None",
    ),
    "a round is closed with what is there": (
        "round",
        "0 < len(self.deltas) == len(self.awaiting)",
        "len(self.deltas) > 0",
    ),
    "a lost worker is waited for": (
        "barrier",
        "            missing.awaiting.discard(worker)\n",
        "",
    ),
    "a lost worker's samples aren't released": (
        "barrier",
        "self.plans.ledger.release(worker, delivered)",
        "pass",
    ),
    "an idle worker isn't given a lost one's work": (
        "barrier",
        "discard(worker)\n            self.correct_plans(now, urgent=True)\n",
        "discard(worker)\n",
    ),
    "a joiner isn't given work": (
        "barrier",
        "share, self.latest_version))\n        self.correct_plans(now)",
        "share, self.latest_version))",
    ),
    "a joiner isn't let in": ("core", "self._strategy.join(member, now)", "pass"),
    "what is left over isn't released": (
        "worker_plans",
        "            self.ledger.release(worker, ahead.get(worker, ()))\n",
        "            pass\n",
    ),
    "a grace time never ends": ("barrier", "state.grace_until = now + self._job.sync.grace_s", "pass"),
    "deltas are weighed alike": (
        "round",
        "weights = tuple(weight(sync, delta) for",
        "weights = tuple(1 for",
    ),
    "weights are sent as differences to whoever": (
        "worker_plans",
        "whole = member.sent_version != newest - 1 or merged is None or merged < newest - 1 - self._behind",
        "whole = False",
    ),
    "the verdict is taken twice": ("barrier", "done = self.in_flight.popleft()", "done = self.in_flight[0]"),
    "rejected samples count as used": (
        "barrier",
        "for one in verdict.accepted}\n        used",
        "for one in (*verdict.accepted, *verdict.rejected)}\n        used",
    ),
    "totals begin anew": ("base", 'past.state.get("totals", {})', "{}"),
    "the state is written down before the strikes": (
        "base",
        "self._out.put(c.Persist(",
        'state["workers"] = {}\n        self._out.put(c.Persist(',
    ),
    "the result is waited for from the lost": ("pending", "one.merging.discard(worker)", "pass"),
    "a lost share is forgotten": ("pending", "self._evaluation.lose(worker)", "pass"),
    "a lost share isn't handed out": ("evaluation", "self.pending[worker] = self.lost.pop()", "return ()"),
    "nobody limits the wait for an evaluation": (
        "core",
        "(strategy.unevaluated if strategy.final else",
        "(False if strategy.final else",
    ),
    "a correction drops what is to be evaluated": (
        "worker_plans",
        "(*member.plan.evaluate, *spans, *member.overlap_spans)",
        "(*spans, *member.overlap_spans)",
    ),
    "a slice isn't sent to a successor": (
        "roster",
        "slot.member.batch_time, slot.member.overhead = before.batch_time, before.overhead",
        "slot.member.batch_time, slot.member.held = before.batch_time, before.held",
    ),
    # ── several exchanges under way
    "two rounds are reduced at a time": ("barrier", "if len(self.in_flight) == 1:", "if True:"),
    "the next round in flight isn't reduced": (
        "barrier",
        "        if self.in_flight:\n            self._out.put(self.in_flight[0].reduction(self._job.sync))\n",
        "",
    ),
    "rounds begin without the weights that are due": (
        "barrier",
        "if self._planner.due(number) <= self.latest_version:",
        "if True:",
    ),
    "what is in flight is given out again": (
        "barrier",
        "kept = self._taking, {worker: self._delivered_by(worker) for worker in self._roster.slots}",
        "kept = self._taking, dict.fromkeys(self._roster.slots, ())",
    ),
    "a plan's samples are given out again": (
        "barrier",
        "                kept[worker] += member.assigned\n",
        "                pass\n",
    ),
    "a lost worker's deltas in flight are given out again": (
        "barrier",
        "self.plans.ledger.release(worker, delivered)",
        "self.plans.ledger.release(worker)",
    ),
    "a verdict is taken out of turn": (
        "barrier",
        "if not self.in_flight or verdict.round != self.in_flight[0].number:",
        "if not self.in_flight:",
    ),
    # ── replay
    "an orphan plan is forgotten": ("barrier", "missing.replay_plans[worker] = member.plan", "pass"),
    "a successor trains without the inner state": (
        "barrier",
        "member.needs_inner_state = member.untrained and",
        "member.needs_inner_state = False and",
    ),
    "the inner state isn't sent": ("worker_plans", "[RestoreInnerState(worker)] if restores else []", "[]"),
    "a blank plan uses up the inner state": (
        "worker_plans",
        "member.untrained = member.untrained and not plan.spans",
        "member.untrained = False",
    ),
    "inner states are forgotten by the next scheduler": (
        "barrier",
        "self._inner_states = set(past.inner)",
        "self._inner_states = set[int]()",
    ),
    "replay begins with fewer workers": ("core", 'if job.run.mode == "replay" else', "if False else"),
    # ── what is counted
    "a lost worker's reports stay in the sum": (
        "barrier",
        "        self.reported_samples -= member.progress.samples\n",
        "",
    ),
    "reports of the round before stay in the sum": (
        "barrier",
        "self.reported_samples = sum(one.progress.samples for one in self._roster.members)",
        "pass",
    ),
    "who leaves is still counted": (
        "roster",
        "            self._count(joins=False)\n        slot.leaving",
        "            pass\n        slot.leaving",
    ),
    "exclusions aren't counted": ("roster", "self._excluded.add(number)", "pass"),
    "a vacated slot isn't looked at": ("roster", "self._vacant.add(slot.number)", "pass"),
    "break-downs are never forgotten": ("roster", "self._crashed.add(number)", "pass"),
    "a worker whose delta was reduced is overlooked": (
        "asynchronous",
        "self._unplanned |= self.queue.reducing.keys()",
        "pass",
    ),
    "a joiner is overlooked": ("asynchronous", "self._unplanned.add(member.source.worker)", "pass"),
    "deltas that come aren't looked at for their age": ("arrival_queue", "self._unaged.add(worker)", "pass"),
    # ── without a barrier
    "turns are given while weights are made": (
        "asynchronous",
        "Training) or self.queue.reducing:",
        "Training):",
    ),
    "deltas of another turn are taken": ("asynchronous", "event.round == member.plan.round", "True"),
    "a delta waits for ever": (
        "asynchronous",
        "now + self._planner.grace_s(self._roster.assignable)",
        "now + 1e6",
    ),
    "the grace time is over for nobody": (
        "asynchronous",
        "            self._reduce(self.state)\n\n    # ── events",
        "            pass\n\n    #",
    ),
    "a lost worker's turn isn't over": ("asynchronous", "        self.training.pop(member)\n", ""),
    "a lost worker's delta is given out again": ("asynchronous", "if not self.queue.holds(worker):", "if True:"),
    "a lost worker's turn stays given out": (
        "asynchronous",
        "holds(worker):\n            self.plans.ledger.release(worker)",
        "holds(worker):\n            pass",
    ),
    "a rejected delta's samples stay given out": (
        "asynchronous",
        "        self.plans.ledger.release(rejection.worker)\n",
        "",
    ),
    "a disowned delta is merged": (
        "asynchronous",
        "            self.queue.discard(source.worker)\n",
        "            pass\n",
    ),
    "a number trains while its delta is on its way": (
        "asynchronous",
        "number in self.training.rounds or self.queue.holds(number)",
        "number in self.training.rounds",
    ),
    "a round is a delta short": (
        "async_round",
        "len(self.accepted) >= self.size",
        "len(self.accepted) >= self.size - 1",
    ),
    "what a lost worker should evaluate is waited for": (
        "asynchronous",
        "            self.pending.cancel_evaluation()  # No joining worker will have its weights.",
        "            pass",
    ),
    "norms of merged deltas are forgotten": (
        "arrival_queue",
        "self._norms.extend(one.norm for one in verdict.accepted)",
        "pass",
    ),
    "stale deltas are merged": ("arrival_queue", "if age > self._patience", "if False"),
    "a step has the number of the one before": (
        "arrival_queue",
        "WeightsVersion(self.version + 1)",
        "WeightsVersion(self.version + bool(taken))",
    ),
    "a verdict on other deltas is taken": ("arrival_queue", "verdict.round == self.version", "True"),
    "a joiner is to evaluate weights that it doesn't get": (
        "asynchronous",
        "self.pending.hand_out(member.source.worker, self.commit_before(self.queue.version))",
        "self.pending.hand_out(member.source.worker, self.current and self.current.number - 1)",
    ),
    "steps begin anew": ("arrival_queue", 'int(past.state.get("step", 0))', "0"),
    "merged deltas aren't counted": ("arrival_queue", "self.merged += len(taken)", "self.merged += bool(taken)"),
    "the rest of a turn isn't taken back": (
        "async_planner",
        "        self.plans.ledger.release(worker)",
        "        pass",
    ),
    "a resized turn drops what is done": ("async_planner", "member.progress.batches + max(1, ", "max(0, "),
    "turns end when they will": ("async_planner", "elif self._beat - now < length_s / 2:", "else:"),
}
"""By name: the module, what stands there once, and what is put in its place."""


@cache
def mutant(name: str) -> type[SchedulerCore]:
    """The brain with that defect."""
    module, old, new = MUTANTS[name]
    real = {path: sys.modules[path] for path in PATHS}
    try:
        for path in PATHS:
            source = Path(str(real[path].__file__)).read_text(encoding="utf-8")
            if path.endswith(f".{module}"):
                assert source.count(old) == 1, f"{name}: its place is gone, or isn't unique"
                source = source.replace(old, new)
            sys.modules[path] = _run(path, source)
        core: type[SchedulerCore] = sys.modules[PATHS[-1]].SchedulerCore
        return core
    finally:
        sys.modules.update(real)


def _run(path: str, source: str) -> ModuleType:
    module = ModuleType(path)
    sys.modules[path] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


for _path in PATHS:
    importlib.import_module(_path)
