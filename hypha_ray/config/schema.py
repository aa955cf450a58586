"""The tables of a job file, as pydantic models.

Every field has a description, from which `--help` is generated.
A run that is given in `rounds.epochs` gets its length here, in samples and rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, PrivateAttr, SecretStr

from hypha_ray.config.resources import Bridge, Goal, Resources, Worker, WorkerGroup, groups_of
from hypha_ray.config.rl import RL
from hypha_ray.config.training import Checkpoint, Dataset, InnerOptimizer, OuterOptimizer, Preference, Telemetry
from hypha_ray.config.value_types import (
    Count,
    Encoding,
    Fraction,
    NotNegative,
    Positive,
    Table,
    distinct_figures,
    run_name,
    tag,
    without_repetition,
)
from hypha_ray.plugins import Plugin

StrategyName: TypeAlias = Literal["diloco", "async", "sync"]
REPORTS_PER_S = 500
"""Most reports per second that all workers together send to the scheduler."""


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """Properties of a strategy that other parts of a run depend on."""

    has_barrier: bool
    """Whether a round waits for its workers' results; otherwise each result is merged as it arrives."""
    sends_gradients: bool
    """Whether a round is one step on the mean gradient; otherwise workers take inner steps and send deltas."""
    own_weights: bool
    """Whether a worker may have weights that differ from the global ones when a round begins."""


STRATEGIES: dict[StrategyName, StrategyTraits] = {
    "diloco": StrategyTraits(has_barrier=True, sends_gradients=False, own_weights=True),
    "async": StrategyTraits(has_barrier=False, sends_gradients=False, own_weights=False),
    "sync": StrategyTraits(has_barrier=True, sends_gradients=True, own_weights=False),
}


class Run(Table):
    """Name, place, labels and seed of the run."""

    name: Annotated[str, AfterValidator(run_name)] | None = Field(
        None, description="name and Ray namespace; default: job and time"
    )
    dir: str | None = Field(None, description="folder of all runs; default: $HYPHA_RAY_HOME or ~/hypha_ray")
    seed: int = Field(0, ge=0, description="seed of initial weights, data order and dropout")
    mode: Literal["elastic", "replay"] = Field(
        "elastic", description="replay: equal batches for all workers and bit-exact repetition"
    )
    notes: str | None = Field(None, description="remark on the run, for people and trackers")
    tags: Annotated[list[Annotated[str, AfterValidator(tag)]], AfterValidator(without_repetition)] = Field(
        [], fail_fast=True, description="words by which the run is found: jobs/runs.py --tag, and trackers"
    )


class Lora(Table):
    """Low-rank adapter by PEFT: the model is frozen, and the adapter alone is trained and exchanged."""

    rank: Count | None = Field(None, description="rank of the adapter's matrices; default: no adapter")
    alpha: Positive | None = Field(None, description="the adapter is scaled by alpha / rank; default: twice the rank")
    dropout: Fraction = Field(0.0, description="dropout of the adapter's input")
    targets: list[str] = Field(
        ["all-linear"], fail_fast=True, description="names of modules with an adapter; all-linear: all but the head"
    )
    modules_to_save: list[str] = Field(
        [], fail_fast=True, description="modules trained whole; a classifier's head always is"
    )
    dora: bool = Field(False, description="train magnitudes apart from directions (DoRA)")
    rslora: bool = Field(False, description="scale by alpha / √rank instead (rsLoRA)")


class Model(Table):
    """The model to train: a repository, or a configuration to start from random weights."""

    repository: str | None = Field(None, description="hub id or local folder")
    revision: str | None = Field(None, description="branch, tag or commit of the repository")
    type: str = Field("causal-lm", description="task, which chooses the Auto class; see docs/configuration.md")
    token: SecretStr | None = Field(None, description="hub token; better: the HF_TOKEN environment variable")
    config: dict[str, Any] | None = Field(
        None,
        description="transformers configuration, with model_type, to start from random weights; "
        "with a repository, only labels of a new head, special tokens and dtype",
    )
    factory: Annotated[str, Plugin("model_factories")] | None = Field(
        None,
        description="module:function of your own that builds the model, see docs/plugins-training.md",
    )
    factory_options: dict[str, Any] | None = Field(None, description="options that the factory is called with")
    trust_remote_code: bool = Field(False, description="run code of the repository, if the node's owner allows it too")
    input_names: list[str] | None = Field(
        None, min_length=1, fail_fast=True, description="slice tensors passed to the model; default: by type"
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None, description="form of the frozen weights below an adapter, by bitsandbytes; default: dtype of the model"
    )
    loss: Annotated[str, Plugin("model_losses")] | None = Field(
        None, description="loss of each sample, module:object of your own; default: the model's"
    )
    loss_options: dict[str, Any] | None = Field(None, description="options of a loss of your own")
    metrics: Annotated[list[Annotated[str, Plugin("metrics")]], AfterValidator(distinct_figures)] = Field(
        [], fail_fast=True, description="figures of evaluations beside the loss; see docs/plugins-training.md"
    )
    lora: Lora = Lora()


class Preprocessor(Table):
    """The tokenizer or image processor that is saved beside the trained model."""

    repository: str | None = Field(None, description="hub id or local folder; default: the dataset's")
    revision: str | None = Field(None, description="branch, tag or commit of the repository")


class Rounds(Table):
    """Amount of work, and its division into rounds and batches."""

    update_rounds: Count = Field(100, description="outer rounds")
    epochs: Count | None = Field(
        None,
        description="in place of update_rounds: uses of each sample; in a mixture, of its largest dataset's",
    )
    samples_between_updates: Count = Field(1200, description="samples of a round, over all workers")
    max_exchange_share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = Field(
        None, description="part of the time of exchanges above which rounds grow, up to 16 times; default: they don't"
    )
    max_batch_size: Count = Field(32, description="samples of one inner step of one worker")
    accumulation: Count = Field(1, description="micro-batches that a batch is split into, to save memory")
    warmup_rounds: int = Field(
        0,
        ge=0,
        description="first rounds that are synchronous steps: one batch of each worker, with plain averaging",
    )
    evaluate_every: int = Field(1, ge=0, description="rounds between evaluations; 0: only after the last")
    patience: Count | None = Field(
        None, description="rounds without a better evaluation after which the run ends; default: it goes on"
    )
    min_delta: NotNegative = Field(0.0, description="least change of an evaluation that counts as better")

    @property
    def counted(self) -> bool:
        """Whether the number of rounds is known: from the job file, or by the dataset if that gives epochs."""
        return self.epochs is None or "update_rounds" in self.model_fields_set


class Sync(Table):
    """Exchange of deltas: strategy, encoding, overlap, and rejection."""

    strategy: StrategyName = Field(
        "diloco",
        description="async: no barrier; sync: a round is a step of inner_optimizer on the mean of all gradients",
    )
    fragments: Count = Field(1, description="parts of the parameters, with one server each")
    partition: Literal["contiguous", "strided"] = Field(
        "contiguous",
        description="contents of a fragment: consecutive tensors, or layers ℓ with the same ℓ mod fragments",
    )
    stagger: bool = Field(True, description="diloco: each round exchanges one fragment, in turn; false: all fragments")
    delay_steps: int = Field(0, ge=0, description="inner steps that a worker takes on before it merges the result")
    in_flight: Count = Field(
        1, description="exchanges in flight at once: a result is merged this many rounds later, after delay_steps"
    )
    mixing: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="fraction of its own weights that a worker keeps when it merges the result"
    )
    codec: Encoding = Field("fp32", description="encoding of deltas and gradients; see docs/communication.md")
    codec_options: dict[str, Any] | None = Field(None, description="options of your own codec")
    downward_codec: Encoding = Field(
        "fp32", description="encoding of new weights, for workers that have the previous version"
    )
    downward_codec_options: dict[str, Any] | None = Field(None, description="options of your own downward codec")
    error_feedback: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="fraction of a codec's residual that is added in the next round; 0: none"
    )
    dynamic_local_steps: bool = Field(
        True, description="number of batches by each worker's speed; false: the same for all"
    )
    delayed_nesterov: bool = Field(
        True, description="async: outer momentum takes one step per round; false: one per delta"
    )
    period: Count | None = Field(None, description="async: deltas per round; default: number of workers")
    arrival_grace_s: NotNegative | None = Field(
        None, description="async: seconds that a delta waits for others; default: a batch of the slowest, if dynamic"
    )
    max_staleness: int | None = Field(
        None, ge=0, description="async: most deltas merged since a delta's base weights; default: 10 rounds"
    )
    quorum: Count | Literal["auto"] | None = Field(
        None, description="deltas that close a round after grace_s; auto: by arrivals of earlier rounds; default: all"
    )
    grace_s: NotNegative | Literal["auto"] = Field(
        30.0, description="longest wait for the other deltas after the quorum; auto: by arrivals of earlier rounds"
    )
    weighting: Annotated[str, Plugin("weightings")] = Field(
        "samples", description="weight of a worker's delta in the mean"
    )
    weighting_options: dict[str, Any] | None = Field(None, description="options of your own weighting")
    merge: Annotated[str, Plugin("merge_rules")] = Field(
        "mean",
        description="merge of deltas; trimmed_mean and median tolerate poisoned deltas and give all the same weight",
    )
    merge_options: dict[str, Any] | None = Field(None, description="options of your own merge rule")
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.125, description="fraction of the values that trimmed_mean drops at each end, for every coordinate"
    )
    norm_gate: Positive = Field(10.0, description="multiple of the median norm above which a delta is rejected")
    clip: Positive | None = Field(
        None, description="multiple of the median norm down to which larger deltas are scaled"
    )
    strikes: Count = Field(
        3, description="deltas rejected for their content, minus those accepted since, after which a worker is excluded"
    )

    @property
    def traits(self) -> StrategyTraits:
        """Properties of the strategy."""
        return STRATEGIES[self.strategy]

    @property
    def staggered(self) -> bool:
        """Whether fragments take turns."""
        return self.traits.own_weights and self.stagger and self.fragments > 1

    @property
    def overlaps(self) -> bool:
        """Whether workers keep weights of their own when they merge a round's result."""
        return self.staggered or self.delay_steps > 0 or self.mixing > 0


class Testing(Table):
    """Settings that only tests use."""

    slowdown: list[Annotated[float, Field(ge=1, allow_inf_nan=False)]] = Field(
        [], fail_fast=True, description="factor by which worker i's batches take longer"
    )
    batch_s: Positive | None = Field(None, description="least seconds of every batch")
    batch_times_s: list[Positive] = Field(
        [], fail_fast=True, description="least seconds of worker i's batches; for workers not listed, batch_s"
    )
    failpoints: list[str] = Field([], fail_fast=True, description="NAME[:KEY]=ACTION@HITS, see hypha_ray/failpoints.py")
    failpoint_log: str | None = Field(None, description="file that counts the hits of all processes")


class Job(Table):
    """A whole job."""

    run: Run = Run()
    model: Model = Model()
    preprocessor: Preprocessor = Preprocessor()
    dataset: Dataset = Dataset()
    rounds: Rounds = Rounds()
    inner_optimizer: InnerOptimizer = InnerOptimizer()
    outer_optimizer: OuterOptimizer = OuterOptimizer()
    sync: Sync = Sync()
    rl: RL = RL()
    preference: Preference = Preference()
    resources: Resources = Resources()
    workers: list[WorkerGroup] = Field([], fail_fast=True, description="groups of workers with needs of their own")
    goal: Goal = Goal()
    worker: Worker = Worker()
    bridge: Bridge = Bridge()
    checkpoint: Checkpoint = Checkpoint()
    telemetry: Telemetry = Telemetry()
    testing: Testing = Testing()
    _begun_with: dict[str, str] = PrivateAttr(default_factory=dict)
    _sample_tokens: int | None = PrivateAttr(None)
    _reasons: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def begun_with(self) -> Mapping[str, str]:
        """Hashes of what the run began with, by the key that names it; empty before. No job file has them."""
        return self._begun_with

    def saving(self, dtype: str | None) -> Job:
        """Return the job with another dtype of saved weights; None: its own."""
        if dtype is None:
            return self
        return self.model_copy(update={"checkpoint": self.checkpoint.model_copy(update={"export_dtype": dtype})})

    def beginning_with(self, hashes: Mapping[str, str]) -> Job:
        """The job with the hashes of what its run began with, which its actors hold theirs against."""
        job = self.model_copy()
        job._begun_with = dict(hashes)
        return job

    @property
    def sample_tokens(self) -> int | None:
        """Tokens of a sample of the job's dataset; None if that isn't known, or if it has none."""
        return self._sample_tokens

    def with_sample_tokens(self, tokens: int | None) -> Job:
        """The job with the length of its samples, by which workers know how long their steps take."""
        job = self.model_copy()
        job._sample_tokens = tokens
        return job

    @property
    def reasons(self) -> Mapping[str, str]:
        """Reasons of settings of ``[worker]`` that were ``auto``, by their names; empty before they are chosen."""
        return self._reasons

    def with_worker(self, settings: Mapping[str, Any], reasons: Mapping[str, str]) -> Job:
        """The job with settings of ``[worker]`` in the place of ``auto``, and the reasons for them."""
        job = self.model_copy(update={"worker": self.worker.model_copy(update=dict(settings))})
        job._reasons = {**self._reasons, **reasons}
        return job

    def lasting(self, rounds: int) -> Job:
        """The job with the number of rounds that its epochs take on its dataset."""
        return self.model_copy(update={"rounds": self.rounds.model_copy(update={"update_rounds": rounds})})

    def with_round_samples(self, samples: int) -> Job:
        """The job with rounds of so many samples."""
        return self.model_copy(update={"rounds": self.rounds.model_copy(update={"samples_between_updates": samples})})

    def samples(self, round: int) -> int:
        """Samples of a round, over all workers."""
        if round < self.rounds.warmup_rounds:
            return self.num_workers * self.rounds.max_batch_size
        return self.rounds.samples_between_updates

    @property
    def num_workers(self) -> int:
        """Workers wanted, in all groups."""
        if not self.workers:
            return self.resources.num_workers
        return sum(group.count for group in self.workers)

    @property
    def worker_groups(self) -> list[WorkerGroup]:
        """Groups of workers, in the order in which the workers are numbered."""
        return self.workers or groups_of(self.resources, self.bridge)

    def group_of(self, worker: int) -> WorkerGroup:
        """Group of the worker of that number."""
        for group in self.worker_groups:
            if worker < group.count:
                return group
            worker -= group.count
        raise IndexError(f"no worker has the number {worker}")

    def processes_of(self, worker: int) -> int:
        """Number of processes of the worker of that number, which share its lease equally."""
        return self.processes_in(self.group_of(worker))

    def processes_in(self, group: WorkerGroup) -> int:
        """Number of processes of each worker of a group: one for each GPU, unless the job says otherwise."""
        if group.bridged:
            return 1
        if self.rl.algorithm is not None:
            return self.rl.model_workers
        return self.worker.processes or max(1, int(group.gpu))

    @property
    def report_interval_s(self) -> float:
        """Seconds between two reports of a worker; longer in a large fleet, so that the scheduler can read them all."""
        return max(self.worker.report_every_s, self.num_workers / REPORTS_PER_S)

    @property
    def lease_s(self) -> float:
        """Seconds of silence after which a worker counts as dead; at least three report intervals."""
        return max(self.worker.lease_s, 3 * self.num_workers / REPORTS_PER_S)


def samples_of_rounds(job: Job) -> int:
    """Samples of all rounds, over all workers."""
    warmup = min(job.rounds.warmup_rounds, job.rounds.update_rounds)
    return warmup * job.samples(0) + (job.rounds.update_rounds - warmup) * job.rounds.samples_between_updates


def rounds_for(job: Job, samples: int, first_round: int = 0) -> int:
    """Number of rounds that take so many samples from round `first_round` on; the last one may be shorter."""
    rounds = 0
    while samples > 0 and first_round + rounds < job.rounds.warmup_rounds:
        samples -= job.samples(first_round + rounds)
        rounds += 1
    return rounds + max(0, -(-samples // job.rounds.samples_between_updates))


def largest(sizes: Sequence[int]) -> int:
    """Number of the dataset with the most samples, whose epochs count; the first of equal ones."""
    return sizes.index(max(sizes))


def beside_largest(sizes: Sequence[int], weights: Sequence[float], epochs: int) -> int:
    """Samples of a mixture's other datasets while its largest one has so many epochs.

    Args:
        sizes: train samples of each dataset.
        weights: weight of each dataset; they need not add up to 1.
        epochs: uses of each sample of the largest dataset.

    """
    dataset = largest(sizes)
    share = weights[dataset] / sum(weights)
    largest_samples = epochs * sizes[dataset]
    return max(0, round(largest_samples / share) - largest_samples)
