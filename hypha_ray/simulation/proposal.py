"""Proposals for a job's exchange: each key with its value, the reason and the figures that speak for it.

The figures are measured ones, each with its source and the model sizes that it was measured at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.exchange_schedule import settled_momentum
from hypha_ray.plugins import is_own
from hypha_ray.simulation.exchange import Circumstances, ExchangeEstimate, ExchangeSettings, whole_weights_s
from hypha_ray.simulation.ladder import ExchangeChoice, Limits
from hypha_ray.texts import counted, significant

TOLERANCE: Final = 2.0
"""Factor beyond the measured sizes from which a figure is called an extrapolation."""
QUALITY: Final = "docs/communication.md"
DILOCO: Final = "DiLoCo, arXiv 2311.08105"
OPEN_DILOCO: Final = "OpenDiLoCo, arXiv 2407.07852"
INTELLECT: Final = "INTELLECT-1, arXiv 2412.01152"
STREAMING: Final = "Streaming DiLoCo, arXiv 2501.18512"
SCALING: Final = "Scaling laws for DiLoCo, arXiv 2503.09799, Table 4"
LOSS_AT_H_30: Final[dict[float, dict[int, float]]] = {
    35e6: {0: 3.485, 1: 3.482, 2: 3.508, 4: 3.554, 8: 3.621},
    90e6: {0: 3.167, 1: 3.162, 2: 3.182, 4: 3.213, 8: 3.265},
    180e6: {0: 2.950, 1: 2.943, 2: 2.957, 4: 2.981, 8: 3.019},
    550e6: {0: 2.653, 1: 2.645, 2: 2.657, 4: 2.673, 8: 2.698},
    2.4e9: {0: 2.326, 1: 2.317, 2: 2.323, 4: 2.332, 8: 2.351},
    4e9: {0: 2.224, 1: 2.219, 2: 2.220, 4: 2.230},
    10e9: {0: 2.090, 1: 2.086, 2: 2.086, 4: 2.096},
}
"""Loss by parameters and workers, with H = 30; of 0 workers that of data parallelism. From `SCALING`."""
QUORUM_PART: Final = 4
"""A quorum does without one of so many workers."""
LEAST_GRACE_S: Final = 5.0
"""Shortest time that a round waits for workers beyond the quorum."""
_PLANNER: Final = (
    "four workers of speeds 1 to 6 take 0.31 of the time of equal batches, as without a barrier, and end at 2.06 "
    f"instead of 2.29 ({QUALITY})"
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A measured figure."""

    figure: str
    source: str
    """Paper, page or table that has the figure."""
    least_parameters: float
    """Parameters of the smallest model that it was measured with."""
    most_parameters: float
    """Parameters of the largest."""

    def text(self, parameters: float) -> str:
        """Write figure and source, and whether they say little of a model of this size."""
        text = f"{self.figure} ({self.source})"
        if self.least_parameters / TOLERANCE <= parameters <= self.most_parameters * TOLERANCE:
            return text
        range_text = size_text(self.least_parameters)
        if self.most_parameters > self.least_parameters:
            range_text = f"{range_text} to {size_text(self.most_parameters)}"
        return f"{text}; measured at {range_text} parameters, so an extrapolation to {size_text(parameters)}"


def size_text(parameters: float) -> str:
    """Write a number of parameters: ``1.1 billion``, ``136 thousand``."""
    for limit, noun in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if parameters >= limit:
            return f"{parameters / limit:.3g} {noun}"
    return f"{parameters:.0f}"


SHORT_ROUNDS: Final = Evidence(
    "rounds of 13 steps with four workers end at 0.999 of the loss of synchronous AdamW", QUALITY, 0.15e6, 0.15e6
)
H_30: Final = Evidence("H = 30 ends at 2.49, as data parallelism does, on C4", STREAMING, 1e9, 1e9)
H_100: Final = Evidence(
    "H = 100 ends at 3.56, H = 30 at 3.53 with 35 million parameters; with 1 billion at 2.66, data parallelism at 2.67",
    STREAMING,
    35e6,
    1e9,
)
H_500: Final = Evidence("H = 500 ends at perplexity 15.02, data parallelism at 15.30", DILOCO, 150e6, 150e6)
H_500_LARGE: Final = Evidence("H = 125 is nearer to the baseline than 500", OPEN_DILOCO, 1.1e9, 1.1e9)
H_1000: Final = Evidence("H = 1000 costs 2.9 % of perplexity over H = 50", DILOCO, 150e6, 150e6)

HALF_PRECISION: Final = Evidence("16 bits lose nothing", OPEN_DILOCO, 150e6, 1.1e9)
EIGHT_BITS: Final = Evidence("8 bits with H = 100 trained a model on a trillion tokens", INTELLECT, 10e9, 10e9)
FOUR_BITS: Final = Evidence(
    "4 bits (E3M0) lose nothing: streaming with them ends at 3.53, DiLoCo at 3.54", STREAMING, 35e6, 35e6
)
FOUR_BITS_HERE: Final = Evidence(
    "int4 both ways with feedback ends at 0.999 of synchronous AdamW", QUALITY, 0.15e6, 0.15e6
)
TWO_BITS: Final = Evidence(
    "huffman2 up and huffman3 down with Muon end at 1.007 of synchronous Muon", QUALITY, 0.15e6, 0.15e6
)

FRAGMENTS: Final = Evidence("fragments of three layers in turn end at 2.48 instead of 2.49", STREAMING, 1e9, 1e9)
FRAGMENTS_HERE: Final = Evidence("two fragments in turn end at 0.996 of the loss without", QUALITY, 0.15e6, 0.15e6)
SHORT_DELAY: Final = Evidence("a delay of up to 10 steps costs less than 0.2 %", STREAMING, 35e6, 1e9)
LONG_DELAY: Final = Evidence("a delay of half a round costs 6.1 % of the loss", QUALITY, 0.15e6, 0.15e6)

OUTER: Final = Evidence("outer Nesterov with η 0.7 and μ 0.9 is better than SGD and Adam", DILOCO, 150e6, 150e6)
OUTER_STREAMING: Final = Evidence("with fragments in turn it takes η 0.4", STREAMING, 35e6, 1e9)
DROPPED: Final = Evidence("half of all deltas dropped cost 2.1 % of perplexity", DILOCO, 150e6, 150e6)


def loss_beside_data_parallelism(parameters: float, workers: int) -> str | None:
    """Write the nearest published loss over that of data parallelism; None beyond the measured sizes and fleets."""
    measured_parameters = min(LOSS_AT_H_30, key=lambda measured: max(measured / parameters, parameters / measured))
    if max(measured_parameters / parameters, parameters / measured_parameters) > TOLERANCE:
        return None
    losses = LOSS_AT_H_30[measured_parameters]
    fleets = [fleet for fleet in losses if fleet]
    fleet = min(fleets, key=lambda measured: max(measured / workers, workers / measured))
    if max(fleet / workers, workers / fleet) > TOLERANCE:
        return None
    excess_percent = 100 * (losses[fleet] / losses[0] - 1)
    condition = f"{counted(fleet, 'worker')} with H = 30 and {size_text(measured_parameters)} parameters"
    return f"{condition} end {excess_percent:+.1f} % from data parallelism's loss ({SCALING})"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A key of the job file with a value, and why."""

    key: str
    value: Any
    reason: str
    evidence: tuple[str, ...] = ()
    """Measured figures, each with its source; none if the value follows from arithmetic alone."""

    def as_json(self) -> dict[str, Any]:
        """The proposal as plain values."""
        return {"key": self.key, "value": self.value, "reason": self.reason, "evidence": list(self.evidence)}


def check_advisable(job: Job) -> None:
    """Refuse a job whose exchange can't be advised on.

    Raises:
        ConfigError: CFG011, it has no rounds of inner steps, or a codec of its own, whose speed isn't known.

    """
    if job.sync.traits.sends_gradients:
        problem = f'--advise and sync.strategy = "{job.sync.strategy}" exclude each other'
        fix = "a round is one step there; ask with --sync.strategy diloco"
        raise ConfigError("CFG011", problem, fix=fix)
    for key in ("codec", "downward_codec"):
        name = getattr(job.sync, key)
        if is_own("codecs", name):
            problem = f"--advise and sync.{key} = {name} exclude each other"
            fix = f"its speed isn't known; ask with --sync.{key} fp32"
            raise ConfigError("CFG011", problem, fix=fix)


def limits_of(job: Job) -> Limits:
    """Return the limits of a job: nothing is proposed that `config.conflicts` refuses."""
    sync = job.sync
    is_replay = job.run.mode == "replay"
    is_external = any(group.bridged for group in job.worker_groups)
    grows = job.rounds.max_exchange_share is not None
    overlaps = sync.traits.own_weights and not (is_replay or is_external or grows)
    return Limits(total_steps(job), overlaps, sync.traits.has_barrier)


def total_steps(job: Job) -> int:
    """Inner steps of each worker in the long rounds of a run, if all workers are equal."""
    return max(1, long_samples(job) // global_batch(job))


def long_samples(job: Job) -> int:
    """Samples of all rounds behind the warm-up."""
    rounds = job.rounds
    return (rounds.update_rounds - rounds.warmup_rounds) * rounds.samples_between_updates


def global_batch(job: Job) -> int:
    """Samples of one batch of each worker."""
    return job.num_workers * job.rounds.max_batch_size


def proposals(job: Job, circumstances: Circumstances, choice: ExchangeChoice) -> list[Proposal]:
    """Propose settings for a job: rounds, codecs, fragments, delay, the outer step, quorum and grace time."""
    settings = choice.settings
    proposed = [*_of_rounds(job, circumstances, choice), *_of_codecs(job, circumstances, choice)]
    proposed += _of_fragments(job, circumstances, choice)
    proposed += _of_outer_step(job, circumstances, settings)
    proposed += _of_quorum(job, circumstances, choice.estimate)
    proposed += _of_stalls(job, circumstances)
    return proposed


def with_proposals(job: Job, members: Iterable[Proposal]) -> Job:
    """Return the job with the proposed values."""
    updates: dict[str, dict[str, Any]] = {}
    for member in members:
        table, _, name = member.key.partition(".")
        updates.setdefault(table, {})[name] = member.value
    tables = {table: getattr(job, table).model_copy(update=values) for table, values in updates.items()}
    return job.model_copy(update=tables)


def round_samples(job: Job, settings: ExchangeSettings) -> int:
    """Samples of a round over all workers."""
    return settings.round_steps * global_batch(job)


def update_rounds(job: Job, settings: ExchangeSettings) -> int:
    """Rounds of the run, so that it trains on as many samples as before, or less than a round more."""
    rounds = max(1, math.ceil(long_samples(job) / round_samples(job, settings)))
    return job.rounds.warmup_rounds + rounds


def _of_rounds(job: Job, circumstances: Circumstances, choice: ExchangeChoice) -> Iterator[Proposal]:
    settings = choice.settings
    figures = choice.estimate
    batch = job.rounds.max_batch_size
    reason = (
        f"H = {settings.steps} inner steps between two exchanges of a weight; {counted(job.num_workers, 'worker')}, "
        f"batches of {batch}. An exchange takes about {_seconds(figures.exchange_s)}, a round's batches "
        f"{_seconds(figures.train_s)}: workers wait for {percent(figures.overhead)} of the time"
    )
    if settings.fragments > 1:
        reason = f"{reason}. A round exchanges one of {settings.fragments} fragments, each every {settings.steps} steps"
    cited = _texts(_of_steps(settings.steps), circumstances)
    yield Proposal("rounds.samples_between_updates", round_samples(job, settings), reason, cited)
    rounds = update_rounds(job, settings)
    if job.rounds.epochs is None:
        samples = long_samples(job)
        yield Proposal("rounds.update_rounds", rounds, f"as many samples as the job has in its long rounds, {samples}")
    factor = job.rounds.samples_between_updates / round_samples(job, settings)
    for table, name in (("rounds", "evaluate_every"), ("checkpoint", "every_rounds"), ("rounds", "patience")):
        interval = getattr(getattr(job, table), name)
        if interval:
            proposed = min(rounds, max(1, round(interval * factor)))
            if proposed != interval:
                yield Proposal(f"{table}.{name}", proposed, "about as many samples apart as in the job")


def _of_steps(steps: int) -> tuple[Evidence, ...]:
    """Figures about rounds of that length."""
    if steps <= 20:
        return (SHORT_ROUNDS,)
    if steps <= 50:
        return (H_30,)
    if steps < 200:
        return (H_100,)
    if steps <= 550:
        return (H_500, H_500_LARGE)
    return (H_1000,)


def _of_codecs(job: Job, circumstances: Circumstances, choice: ExchangeChoice) -> Iterator[Proposal]:
    settings = choice.settings
    figures = choice.estimate
    cited = _texts(_of_codec(settings.codec), circumstances)
    parameters = max(circumstances.model.fragment_parameters(settings.fragments))
    scope = "the largest fragment" if settings.fragments > 1 else "the model"
    reason = f"{scope} has {size_text(parameters)} parameters; all deltas are up in {_seconds(figures.up_s)}"
    yield Proposal("sync.codec", settings.codec, reason, cited)
    if job.sync.traits.has_barrier:
        reason = f"all new weights are down in {_seconds(figures.down_s)}"
        cited = _texts(_of_downward_codec(settings.downward_codec), circumstances)
        yield Proposal("sync.downward_codec", settings.downward_codec, reason, cited)
    if job.sync.error_feedback < 1 and settings.codec != "fp32":
        reason = (
            "losses with these codecs were measured with all of the encoding error fed back (docs/communication.md)"
        )
        yield Proposal("sync.error_feedback", 1.0, reason)


def _of_codec(codec: str) -> tuple[Evidence, ...]:
    """Figures about a codec."""
    match codec:
        case "fp32":
            return ()
        case "bf16" | "fp16":
            return (HALF_PRECISION,)
        case "int8":
            return (EIGHT_BITS,)
        case "int4" | "e3m0":
            return (FOUR_BITS, FOUR_BITS_HERE)
        case _:
            return (TWO_BITS,)


def _of_downward_codec(codec: str) -> tuple[Evidence, ...]:
    """Figures about an encoding of new weights."""
    match codec:
        case "fp32":
            return ()
        case "huffman2" | "huffman3" | "topk":
            return (TWO_BITS,)
        case _:
            return (FOUR_BITS_HERE,)


def _of_fragments(job: Job, circumstances: Circumstances, choice: ExchangeChoice) -> Iterator[Proposal]:
    settings = choice.settings
    if settings.fragments == 1:
        if job.sync.fragments > 1:
            yield Proposal("sync.fragments", 1, "a whole exchange is short enough")
        if job.sync.delay_steps:
            yield Proposal("sync.delay_steps", 0, "a whole exchange is short enough")
        if job.sync.in_flight > 1:
            yield Proposal("sync.in_flight", 1, "there is one exchange a round")
        return
    cited = _texts((FRAGMENTS, FRAGMENTS_HERE), circumstances)
    layers = circumstances.model.layers
    if layers is None:
        reason = f"for {3 * settings.fragments} layers or more; the number of layers isn't known here"
    else:
        reason = f"{layers} layers, some {layers / settings.fragments:.0f} a fragment"
    yield Proposal("sync.fragments", settings.fragments, reason, cited)
    partition = "contiguous" if layers is None else "strided"
    yield Proposal("sync.partition", partition, "layers of a fragment are spread over the model" if layers else "")
    if not job.sync.stagger:
        yield Proposal("sync.stagger", True, "fragments take turns")
    lateness = settings.lateness / settings.steps
    reason = f"results come {settings.lateness} steps late, {percent(lateness)} of H, and an exchange runs meanwhile"
    cited = _texts((SHORT_DELAY,), circumstances)
    if settings.lateness > 10:
        note = f"{settings.lateness} steps late is beyond what was measured to be free"
        cited = (note, *_texts((SHORT_DELAY, LONG_DELAY), circumstances))
    yield Proposal("sync.delay_steps", settings.delay_steps, reason, cited)
    if settings.in_flight > 1 or job.sync.in_flight > 1:
        yield Proposal("sync.in_flight", settings.in_flight, "an exchange may take longer than a round")


def _of_outer_step(job: Job, circumstances: Circumstances, settings: ExchangeSettings) -> Iterator[Proposal]:
    outer = job.outer_optimizer
    if outer.name != "nesterov":
        return  # The job's own choice, such as averaging for a short fine-tuning: nothing measured here replaces it.
    if settings.fragments > 1:
        cited = _texts((OUTER_STREAMING,), circumstances)
        yield Proposal("outer_optimizer.learning_rate", 0.4, "fragments take turns", cited)
    else:
        cited = _texts((OUTER,), circumstances)
        yield Proposal("outer_optimizer.learning_rate", 0.7, "all weights are exchanged at once", cited)
    steps = (update_rounds(job, settings) - job.rounds.warmup_rounds) // settings.fragments
    momentum = min(0.9, settled_momentum(steps))
    reason = f"each weight has {steps} outer steps, and momentum needs 5 / (1 − μ) of them to settle"
    cited = _texts((OUTER,), circumstances) if momentum == 0.9 else ()
    if job.rl.algorithm is not None and momentum > 0.5:
        momentum = 0.5
        reason = "policies lose their entropy with more (docs/rl.md)"
        cited = ()
    yield Proposal("outer_optimizer.momentum", momentum, reason, cited)


def _of_quorum(job: Job, circumstances: Circumstances, figures: ExchangeEstimate) -> Iterator[Proposal]:
    if not job.sync.traits.has_barrier:
        return
    if not circumstances.unreliable:
        if job.sync.quorum is None and circumstances.unequal:
            reason = "batches by each worker's speed: they finish together, so none has to be left behind"
            yield Proposal("sync.dynamic_local_steps", True, reason, (_PLANNER,))
        return
    workers = circumstances.workers
    if workers < 3:
        return
    quorum = workers - max(1, workers // QUORUM_PART)
    reason = (
        f"a machine fails every {circumstances.fails_every_h:g} h or so; a round closes without up to "
        f"{workers - quorum} of {workers} deltas"
    )
    yield Proposal("sync.quorum", quorum, reason, _texts((DROPPED,), circumstances))
    slowest_s = max(circumstances.batch_s)
    grace_s = max(LEAST_GRACE_S, math.ceil(2 * slowest_s + figures.up_s))
    batches_s = 2 * slowest_s
    reason = f"two batches of the slowest worker, {_seconds(batches_s)}, and the way up, {_seconds(figures.up_s)}"
    yield Proposal("sync.grace_s", float(grace_s), reason)


def _of_stalls(job: Job, circumstances: Circumstances) -> Iterator[Proposal]:
    """Give workers time to fetch all weights, as they do when they join, and before the first round."""
    weights_s = whole_weights_s(circumstances)
    needed_s = math.ceil(2 * weights_s + max(circumstances.batch_s))
    if needed_s > job.worker.stall_s:
        reason = (
            f"all weights in fp32 take {_seconds(weights_s)} down to every worker at the start, and a worker without "
            f"progress for {job.worker.stall_s:g} s is replaced"
        )
        yield Proposal("worker.stall_s", float(needed_s), reason)


def _texts(figures: tuple[Evidence, ...], circumstances: Circumstances) -> tuple[str, ...]:
    return tuple(figure.text(circumstances.model.parameters) for figure in figures)


def percent(part: float) -> str:
    """Write a part as a percentage."""
    return f"{significant(100 * part, 2)} %"


def _seconds(seconds: float) -> str:
    """Write a time, in seconds or, if it is short, milliseconds."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{significant(seconds, 3)} s"
