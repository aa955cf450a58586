"""The scheduler's brain with one defect each: all its modules are built anew."""

from __future__ import annotations

import ast
import importlib
import sys
from functools import cache

from hypha_ray.scheduler.core import SchedulerCore
from tests.support.mutation import (
    Defect,
    attribute,
    call,
    condition,
    drop,
    expression,
    fits,
    load,
    operation,
    plant,
    returned,
    source_of,
    statement,
    value,
)

PATHS = (
    "hypha_ray.market.leases",
    "hypha_ray.telemetry.round_records",
    *(
        f"hypha_ray.scheduler.{part}"
        for part in (
            "worker_state",
            "failures",
            "roster",
            "round_sizes",
            "worker_plans",
            "round_strategy",
            "barrier.round",
            "barrier.round_planner",
            "barrier.strategy",
            "asynchronous.async_round",
            "asynchronous.async_planner",
            "asynchronous.strategy",
            "core",
        )
    ),
)
"""Modules that are built anew for a mutant, each after those that it imports."""

MUTANTS: dict[str, Defect] = {
    # ── who is there
    "an old incarnation is heard": Defect("scheduler.roster", "Roster._slot", operation("and", "{0}")),
    "a word doesn't renew the lease": Defect("market.leases", "LeaseBook.renew", drop("expiry_s")),
    "a late word renews the lease": Defect("market.leases", "LeaseBook.renew", call("expired", "False")),
    "a vacated slot keeps its lease": Defect("scheduler.roster", "Roster.release", drop("release")),
    "silence isn't noticed": Defect("scheduler.roster", "Roster.silent", operation("in", "False")),
    "a lease is over a second early": Defect("market.leases", "Lease.expired", attribute("expiry_s", "{} - 2.5")),
    "a worker that makes no progress is kept": Defect(
        "scheduler.roster", "Roster.silent", attribute("stall_s", "1000000000.0", 1)
    ),
    "who merges or evaluates may do so for ever": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.busy", call("busy", "set()", 2)
    ),
    "the scheduler's own absence counts": Defect(
        "scheduler.core", "SchedulerCore._forgive_own_absence", drop("defer", 1)
    ),
    "leases aren't deferred": Defect("market.leases", "LeaseBook.defer", drop("expiry_s")),
    "incarnations begin anew": Defect("scheduler.roster", "Roster.hire", operation("+", "{1}")),
    "back-off is never reset": Defect("scheduler.roster", "Roster.contributed", drop("failures")),
    "back-off doesn't grow": Defect("scheduler.roster", "_wait_s", operation("**", "1")),
    "nobody is hired after a loss": Defect("scheduler.roster", "Roster.release", operation("+", "None")),
    "strikes aren't counted": Defect("scheduler.roster", "Roster.strike", drop("strikes")),
    "strikes aren't carried over": Defect("scheduler.roster", "Roster.restore", drop("strikes")),
    "exclusion is forgiven by a strike": Defect(
        "scheduler.roster",
        "Roster.strike",
        statement("strikes", "{}\n{0.0}.excluded = bool(self._vacant.add({0.0}.number))"),
    ),
    "an excluded number is given away": Defect("scheduler.roster", "Slot.due", operation("and", "{0} and {2}", 1)),
    "another model is as good": Defect("scheduler.core", "SchedulerCore._builds_the_model", operation("!=", "False")),
    "nobody gives up waiting": Defect("scheduler.core", "SchedulerCore._limit_waiting", drop("_set_timer")),
    # ── trust
    "wrong weights are believed": Defect("scheduler.failures", "WeightHashes.check", operation("==", "True")),
    "a claim isn't kept": Defect("scheduler.failures", "WeightHashes.check", drop("_claims")),
    "what was handed over with wrong weights stays": Defect(
        "scheduler.core", "SchedulerCore._reject_joiners", drop("discard_delta")
    ),
    "of two wrong joiners one is left out": Defect(
        "scheduler.core",
        "SchedulerCore._reject_joiners",
        statement(
            "for",
            "for source in {1}:\n    self._strategy.discard_delta(source)\n"
            "    self._lose_worker(source, 'other weights', now)\nreturn",
            1,
        ),
    ),
    # ── rounds
    "a delta is taken twice": Defect(
        "scheduler.barrier.strategy", "BarrierRounds._record_delta", operation("or", "{0} or {2}")
    ),
    "deltas of another round are taken": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.accepts", operation("and", "{0}", 3)
    ),
    "a round is closed with what is there": Defect(
        "scheduler.barrier.round", "BarrierRound.complete", returned("{1} > 0")
    ),
    "a lost worker is waited for": Defect("scheduler.barrier.strategy", "BarrierRounds.forget", drop("discard")),
    "a lost worker's samples aren't released": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.forget", drop("release")
    ),
    "an idle worker isn't given a lost one's work": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.forget", drop("correct_plans")
    ),
    "a joiner isn't given work": Defect("scheduler.barrier.strategy", "BarrierRounds.join", drop("correct_plans")),
    "a joiner isn't let in": Defect("scheduler.core", "SchedulerCore._admit", drop("join")),
    "what is left over isn't released": Defect("scheduler.worker_plans", "WorkerPlans.commit", drop("release")),
    "a grace time never ends": Defect("scheduler.barrier.strategy", "BarrierRounds._record_delta", drop("grace_until")),
    "deltas are weighed alike": Defect("scheduler.barrier.round", "BarrierRound.reduction", call("weight", "1")),
    "weights are sent as differences to whoever": Defect(
        "scheduler.worker_plans", "WorkerPlans.send_weights", operation("or", "False")
    ),
    "the verdict is taken twice": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.reduced", call("popleft", "self.in_flight[0]")
    ),
    "rejected samples count as used": Defect(
        "scheduler.barrier.strategy", "BarrierRounds._commit", attribute("accepted", "(*{}, *{0}.rejected)")
    ),
    "totals begin anew": Defect("scheduler.round_strategy", "RoundStrategy.__init__", call("get", "{1}")),
    "the state is written down before the strikes": Defect(
        "scheduler.round_strategy", "RoundStrategy._persist", call("state", "dict()", 1)
    ),
    "the result is waited for from the lost": Defect(
        "scheduler.round_strategy", "PendingRounds.forget", drop("discard")
    ),
    "a lost share is forgotten": Defect("scheduler.round_strategy", "PendingRounds.forget", drop("lose")),
    "a lost share isn't handed out": Defect(
        "scheduler.round_strategy", "Evaluation.hand_out", statement("pending", "return ()")
    ),
    "nobody limits the wait for an evaluation": Defect(
        "scheduler.core", "SchedulerCore._limit_waiting", attribute("share_is_lost", "False")
    ),
    "a correction drops what is to be evaluated": Defect(
        "scheduler.worker_plans",
        "WorkerPlans.correct",
        call("feed_spans", "{of}.feed_spans({0}, ({1.1}, {1.2}))"),
    ),
    "a slice isn't sent to a successor": Defect(
        "scheduler.roster", "Roster.ready", statement("overhead", "{0} = {1}; {0.0}.held = {1.0}.held")
    ),
    # ── several exchanges under way
    "two rounds are reduced at a time": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.close", operation("==", "True")
    ),
    "the next round in flight isn't reduced": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.reduced", drop("put")
    ),
    "rounds begin without the weights that are due": Defect(
        "scheduler.barrier.strategy", "BarrierRounds._advance", operation("<=", "True")
    ),
    "what is in flight is given out again": Defect(
        "scheduler.barrier.strategy",
        "BarrierRounds._spans_of_later_rounds",
        expression(ast.DictComp, "dict.fromkeys({3}, ())", 1),
    ),
    "a plan's samples are given out again": Defect(
        "scheduler.barrier.strategy", "BarrierRounds._spans_of_later_rounds", drop("later_spans", 1)
    ),
    "a lost worker's deltas in flight are given out again": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.forget", call("release", "self.plans.ledger.release({0})")
    ),
    "a verdict is taken out of turn": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.reduced", operation("or", "{0}")
    ),
    # ── replay
    "an orphan plan is forgotten": Defect("scheduler.barrier.strategy", "BarrierRounds.forget", drop("replay_plans")),
    "a successor trains without the inner state": Defect(
        "scheduler.barrier.strategy", "BarrierRounds._inherit", attribute("untrained", "False")
    ),
    "the inner state isn't sent": Defect("scheduler.worker_plans", "WorkerPlans.start", condition("False")),
    "a blank plan uses up the inner state": Defect(
        "scheduler.worker_plans", "WorkerPlans.start", value("untrained", "False")
    ),
    "inner states are forgotten by the next scheduler": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.__init__", call("set", "set[int]()")
    ),
    "replay begins with fewer workers": Defect("scheduler.core", "SchedulerCore.__init__", operation("==", "False")),
    # ── what is counted
    "a lost worker's reports stay in the sum": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.forget", drop("reported_samples")
    ),
    "reports of the round before stay in the sum": Defect(
        "scheduler.barrier.strategy", "BarrierRounds.begin", drop("reported_samples")
    ),
    "who leaves is still counted": Defect("scheduler.roster", "Roster.leave", drop("_count_assignable")),
    "exclusions aren't counted": Defect("scheduler.roster", "Roster.exclude", drop("add")),
    "a vacated slot isn't looked at": Defect("scheduler.roster", "Roster.release", drop("add")),
    "break-downs are never forgotten": Defect("scheduler.roster", "Roster.broke_down", drop("add", 1)),
    "a worker whose delta was reduced is overlooked": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds.reduced", drop("_unplanned")
    ),
    "a joiner is overlooked": Defect("scheduler.asynchronous.strategy", "AsyncRounds.join", drop("add")),
    "deltas that come aren't looked at for their age": Defect(
        "scheduler.asynchronous.async_round", "ArrivalQueue.receive", drop("add")
    ),
    # ── without a barrier
    "turns are given while weights are made": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds._advance", operation("or", "{0}", 1)
    ),
    "deltas of another turn are taken": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds.accepts", operation("==", "True")
    ),
    "a delta waits for ever": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds._advance", call("grace_s", "1000000.0")
    ),
    "the grace time is over for nobody": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds.close", drop("_reduce")
    ),
    "a lost worker's turn isn't over": Defect("scheduler.asynchronous.strategy", "AsyncRounds.forget", drop("pop", 1)),
    "a lost worker's delta is given out again": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds.forget", operation("not", "True")
    ),
    "a lost worker's turn stays given out": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds.forget", drop("release")
    ),
    "a rejected delta's samples stay given out": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds._reject", drop("release")
    ),
    "a disowned delta is merged": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds.discard_delta", drop("discard")
    ),
    "a number trains while its delta is on its way": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds._is_idle", operation("or", "{0}")
    ),
    "a round is a delta short": Defect(
        "scheduler.asynchronous.async_round", "AsyncRound.whole", attribute("size", "{} - 1")
    ),
    "what a lost worker should evaluate is waited for": Defect(
        "scheduler.asynchronous.strategy", "AsyncRounds._settle", drop("cancel_evaluation")
    ),
    "norms of merged deltas are forgotten": Defect(
        "scheduler.asynchronous.async_round", "ArrivalQueue.take_verdict", drop("extend")
    ),
    "stale deltas are merged": Defect(
        "scheduler.asynchronous.async_round", "ArrivalQueue.drop_stale", operation(">", "False")
    ),
    "a step has the number of the one before": Defect(
        "scheduler.asynchronous.async_round",
        "ArrivalQueue.take_verdict",
        statement("merged", "{}\nself.version = WeightsVersion(self.version - (not {1.0}))"),
    ),
    "a verdict on other deltas is taken": Defect(
        "scheduler.asynchronous.async_round", "ArrivalQueue.is_awaited", operation("==", "True")
    ),
    "a joiner is to evaluate weights that it doesn't get": Defect(
        "scheduler.asynchronous.strategy",
        "AsyncRounds.join",
        call("commit_before", "{0.0.0}.current and {0.0.0}.current.number - 1"),
    ),
    "steps begin anew": Defect("scheduler.asynchronous.async_round", "ArrivalQueue.__init__", call("int", "0", 1)),
    "merged deltas aren't counted": Defect(
        "scheduler.asynchronous.async_round", "ArrivalQueue.take_verdict", call("len", "bool({0})")
    ),
    "the rest of a turn isn't taken back": Defect(
        "scheduler.asynchronous.async_planner", "AsyncPlanner.settle", drop("release")
    ),
    "a resized turn drops what is done": Defect(
        "scheduler.asynchronous.async_planner", "AsyncPlanner.resize", operation("+", "{1}", 2)
    ),
    "turns end when they will": Defect(
        "scheduler.asynchronous.async_planner", "AsyncPlanner._next_beat", condition("True", 2)
    ),
}


@cache
def mutant(name: str) -> type[SchedulerCore]:
    """The brain with that defect."""
    defect = MUTANTS[name]
    real = {path: sys.modules[path] for path in PATHS}
    assert sum(fits(module, defect) for module in real.values()) == 1, f"{name}: there is no module {defect.module}"
    try:
        for path, module in real.items():
            load(path, plant(name, defect, module) if fits(module, defect) else source_of(module))
        core: type[SchedulerCore] = sys.modules[PATHS[-1]].SchedulerCore
        return core
    finally:
        sys.modules.update(real)


for _path in PATHS:
    importlib.import_module(_path)
