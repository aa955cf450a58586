"""Errors that end a run because of its fleet or of diverged training."""

from __future__ import annotations

from hypha_ray.errors import CapacityError, CheckpointError, ClusterError, ConfigError, HyphaError, LostError
from hypha_ray.scheduler.fleet.roster import MAX_CRASHES
from hypha_ray.scheduler.fleet.trust import FATAL
from hypha_ray.texts import counted
from hypha_ray.types import Verdict


def diverged(number: int, reason: str) -> ConfigError:
    """Error of a run after a round, counted from 0, without a usable delta."""
    problem = f"training diverged: every delta of round {number + 1} was rejected, the first for {reason}"
    return ConfigError("TRN001", problem, fix="lower inner_optimizer.learning_rate, or set inner_optimizer.clip_norm")


def failure(number: int, verdict: Verdict, exact: bool) -> HyphaError | None:
    """Reason that a round can't be committed; None if it can.

    An `exact` round may lack only deltas that a worker is to blame for.
    """
    lost = [rejection for rejection in verdict.rejected if not rejection.blamed]
    if lost and (exact or not verdict.accepted):
        problem = f"round {number + 1} has to be trained again"
        got = f"of worker {lost[0].worker}: {lost[0].reason}"
        fix = "submit again: the run goes on from its last commit"
        return LostError("NET012", problem, got=got, fix=fix)
    if verdict.accepted:
        return None
    first = verdict.rejected[0]
    return diverged(number, first.reason)


def disowned(number: int) -> ClusterError:
    """Error of a run after a round in flight, counted from 0, has lost all of its deltas."""
    problem = f"every delta of round {number + 1} began with other weights than were committed"
    fix = "look at the machines' memory, then submit again: the run goes on from its last commit"
    return ClusterError("NET010", problem, fix=fix)


def hopeless(reason: str, exception: str | None) -> HyphaError:
    """Error of a run whose workers all crash; with a common exception, a retry would crash again."""
    if exception is not None:
        problem = f"every worker breaks down by the same exception, {MAX_CRASHES} times in a row"
        return ConfigError("NET008", problem, got=exception, fix="mend what it names in the job or its data")
    fix = "look into the workers' logs in Ray's dashboard, then submit again: the run goes on from its last commit"
    return ClusterError("NET008", f"every worker breaks down, {MAX_CRASHES} times in a row", got=reason, fix=fix)


def fatal(work: str, reason: str) -> ConfigError:
    """Error of a run with work that ends every worker that takes it."""
    problem = f"the same work has ended {FATAL} workers in a row: {work}"
    fix = "mend the function, or leave out what it names; a reward function may have rl.reward.deadline_s"
    return ConfigError("NET013", problem, got=reason, fix=fix)


def another_model(next_round: int, built: set[str], layout_sha256: str | None) -> CheckpointError | None:
    """Error of a resumed run if no worker builds the model of its checkpoints; None if one does."""
    if next_round == 0 or built & {"", layout_sha256}:
        return None
    problem = "the checkpoints of this run are of another model than it builds now"
    fix = "give it the same one again"
    return CheckpointError("CKPT005", problem, fix=fix)


def too_few(have: int, need: int, predicate: str) -> CapacityError:
    """Error of a run with too few workers; the predicate says what is true of the workers that it has."""
    problem = f"{counted(have, 'worker')} of at least {need} {predicate}"
    return CapacityError("CAP002", problem, fix="look into the logs, then resubmit")
