"""Ends of a run before its last round: evidence against work and workers, errors of its fleet, and lost patience."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hypha_ray.config.schema import Rounds
from hypha_ray.errors import CapacityError, CheckpointError, ClusterError, ConfigError, HyphaError, LostError
from hypha_ray.figures import objective_of
from hypha_ray.texts import counted
from hypha_ray.types import Source, Verdict

FATAL = 3
"""Losses in a row at the same work that end a run."""
_MAX_WORKS = 256
"""Most kinds of work that are remembered."""
KNOWN_ROUNDS = 4
"""Number of rounds whose hashes are kept; commits lag behind by one or two."""
MAX_CRASHES = 5
"""Number of workers in a row, in every slot, that break down without a contribution and end a run."""


class LossBook:
    """Losses by the work that the lost workers reported last."""

    def __init__(self) -> None:
        self._losses: dict[str, list[tuple[int, str]]] = {}
        """Numbers of workers, and their machines, by work."""

    def add(self, work: str, worker: int, machine: str) -> None:
        """Record the loss of a worker; without known work do nothing."""
        if not work:
            return
        losses = self._losses.pop(work, [])
        self._losses[work] = [*losses, (worker, machine)]
        if len(self._losses) > _MAX_WORKS:
            del self._losses[next(iter(self._losses))]

    def contributed(self, worker: int) -> None:
        """Forget work that a worker of this number was lost at: another one has got past it."""
        for work, losses in list(self._losses.items()):
            if any(lost_worker == worker for lost_worker, _ in losses):
                del self._losses[work]

    def count(self, work: str) -> int:
        """Number of losses at some work; 0 if it isn't known."""
        return len(self._losses.get(work, []))

    def is_fatal(self, work: str, numbers: Collection[int]) -> bool:
        """Whether work has ended three workers, on two machines or under all of these numbers."""
        losses = self._losses.get(work, [])
        lost_numbers = {number for number, _ in losses}
        machines = {machine for _, machine in losses}
        is_everywhere = len(machines) > 1 or lost_numbers.issuperset(numbers)
        return len(losses) >= FATAL and is_everywhere


class WeightHashes:
    """Hashes of commits and of joining workers; either may come first, because the store hashes in the background."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._claims: dict[Source, tuple[int, str]] = {}

    def record_commit(self, round: int, theta_sha256: str) -> list[Source]:
        """Record the hash of a commit; return the joining workers with another one."""
        self._known[round] = theta_sha256
        for old_round in sorted(self._known)[:-KNOWN_ROUNDS]:
            del self._known[old_round]
        mismatched: list[Source] = []
        for source, (claimed_round, claimed_sha256) in list(self._claims.items()):
            if claimed_round == round:
                del self._claims[source]
                if claimed_sha256 != theta_sha256:
                    mismatched.append(source)
        return mismatched

    def check(self, source: Source, round: int, theta_sha256: str) -> bool:
        """Check, or keep for the commit, a joining worker's hash of the weights after a round; False if it is wrong."""
        if round in self._known:
            return self._known[round] == theta_sha256
        self._claims[source] = round, theta_sha256
        return True

    def forget(self, source: Source) -> None:
        """Drop a lost worker's hash."""
        self._claims.pop(source, None)


def diverged(round_number: int, reason: str) -> ConfigError:
    """Error of a run after a round, counted from 0, without a usable delta."""
    problem = f"training diverged: every delta of round {round_number + 1} was rejected, the first for {reason}"
    return ConfigError("TRN001", problem, fix="lower inner_optimizer.learning_rate, or set inner_optimizer.clip_norm")


def failure(round_number: int, verdict: Verdict, must_be_exact: bool) -> HyphaError | None:
    """Reason that a round can't be committed; None if it can.

    A round that must be exact may lack only deltas that a worker is to blame for.
    """
    lost_payloads = [rejection for rejection in verdict.rejected if not rejection.blamed]
    if lost_payloads and (must_be_exact or not verdict.accepted):
        problem = f"round {round_number + 1} has to be trained again"
        got = f"of worker {lost_payloads[0].worker}: {lost_payloads[0].reason}"
        fix = "submit again: the run goes on from its last commit"
        return LostError("NET012", problem, got=got, fix=fix)
    if verdict.accepted:
        return None
    first_rejection = verdict.rejected[0]
    return diverged(round_number, first_rejection.reason)


def disowned(round_number: int) -> ClusterError:
    """Error of a run after a round in flight, counted from 0, has lost all of its deltas."""
    problem = f"every delta of round {round_number + 1} began with other weights than were committed"
    fix = "look at the machines' memory, then submit again: the run goes on from its last commit"
    return ClusterError("NET010", problem, fix=fix)


def hopeless(reason: str, exception: str | None) -> HyphaError:
    """Error of a run whose workers all crash; with a common exception, a retry would crash again."""
    if exception is not None:
        problem = f"every worker breaks down by the same exception, {MAX_CRASHES} times in a row"
        return ConfigError("NET008", problem, got=exception, fix="mend what it names in the job or its data")
    fix = "look into the workers' logs in Ray's dashboard, then submit again: the run goes on from its last commit"
    return ClusterError("NET008", f"every worker breaks down, {MAX_CRASHES} times in a row", got=reason, fix=fix)


def fruitless(reason: str, is_silent: bool) -> HyphaError:
    """Error of a run all of whose workers fall silent, or make no progress within the job's limit."""
    if is_silent:
        problem = f"every worker falls silent, {MAX_CRASHES} times in a row"
        fix = "look at the machines' load and network, or raise worker.lease_s, then submit again"
        return ClusterError("NET008", problem, got=reason, fix=fix)
    problem = f"no worker makes progress, {MAX_CRASHES} times in a row"
    fix = "raise worker.stall_s above the time of a batch and of an evaluation, or see in the logs what holds workers"
    return ConfigError("NET008", problem, got=reason, fix=fix)


def fatal(work: str, reason: str) -> ConfigError:
    """Error of a run with work that ends every worker that takes it."""
    problem = f"the same work has ended {FATAL} workers in a row: {work}"
    fix = "mend the function, or leave out what it names; a reward function may have rl.reward.deadline_s"
    return ConfigError("NET013", problem, got=reason, fix=fix)


def another_model(next_round: int, built_layouts: set[str], layout_sha256: str | None) -> CheckpointError | None:
    """Error of a resumed run if no worker builds the model of its checkpoints; None if one does."""
    if next_round == 0 or built_layouts & {"", layout_sha256}:
        return None
    problem = "the checkpoints of this run are of another model than it builds now"
    fix = "give it the same one again"
    return CheckpointError("CKPT005", problem, fix=fix)


def too_few(have: int, need: int, predicate: str) -> CapacityError:
    """Error of a run with too few workers; the predicate says what is true of the workers that it has."""
    problem = f"{counted(have, 'worker')} of at least {need} {predicate}"
    return CapacityError("CAP002", problem, fix="look into the logs, then resubmit")


class EvaluationPatience:
    """Best evaluation of a run so far, and the rounds since then; `evaluations` are those of earlier attempts."""

    def __init__(self, rounds: Rounds, evaluations: Iterable[Mapping[str, Any]] = ()) -> None:
        self._limit = rounds.patience
        self._min_delta = rounds.min_delta
        self._best: tuple[int, float] | None = None
        """Round and objective of the best evaluation; None before the first with a finite objective."""
        self._name = "val_loss"
        self._newest = -1
        for record in evaluations:
            self.take(record)

    def take(self, record: Mapping[str, Any]) -> None:
        """Add an evaluation; one whose objective isn't finite is no better than any other."""
        objective = objective_of([record])
        self._newest = record["round"]
        value = record.get(objective.name)
        if value is None:
            return
        self._name = objective.name
        if self._best is None or self._is_better(value, self._best[1], is_upward=objective.best is max):
            self._best = self._newest, value

    def _is_better(self, value: float, best: float, is_upward: bool) -> bool:
        gain = value - best if is_upward else best - value
        return gain > 0 and gain >= self._min_delta

    @property
    def exhausted(self) -> str | None:
        """Reason to end the run, in words; None as long as it is to go on. Rounds are counted from one in it."""
        best_round, best = self._best or (-1, None)
        rounds = self._newest - best_round
        if self._limit is None or rounds < self._limit:
            return None
        if best is None:
            return f"no finite {self._name} in {counted(rounds, 'round')}"
        rounds_text = counted(rounds, "more round")
        return f"no better {self._name} than {best:.4g} after round {best_round + 1}, in {rounds_text}"
