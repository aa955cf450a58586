"""The tables of a job file, as pydantic models.

Every field says what it is: `--help` is made from here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr

from hypha_ray.config.strategy import STRATEGIES, StrategyName, StrategyTraits
from hypha_ray.config.tables.outputs import Checkpoint, Telemetry
from hypha_ray.config.tables.resources import Bridge, Resources, Worker, WorkerGroup, groups_of
from hypha_ray.config.value_types import (
    Count,
    Encoding,
    Fraction,
    NotNegative,
    Positive,
    Table,
    identifier,
    run_name,
)


class Run(Table):
    """Name, place and seed of the run."""

    name: Annotated[str, AfterValidator(run_name)] | None = Field(
        None, description="name and Ray namespace; default: job and time"
    )
    dir: str | None = Field(None, description="folder of all runs; default: $HYPHA_RAY_HOME or ~/hypha_ray")
    seed: int = Field(0, ge=0, description="seed of initial weights, data order and dropout")
    mode: Literal["elastic", "replay"] = Field("elastic", description="replay: equal batches and bit-exact repetition")


class Model(Table):
    """The model to train: a repository, or a configuration to start from random weights."""

    repository: str | None = Field(None, description="hub id or local folder")
    revision: str | None = Field(None, description="branch, tag or commit of the repository")
    type: str = Field("causal-lm", description="task, which chooses the Auto class; see docs/configuration.md")
    token: SecretStr | None = Field(None, description="hub token; better: the HF_TOKEN environment variable")
    config: dict[str, Any] | None = Field(
        None,
        description="transformers configuration, with model_type, for random weights; "
        "beside a repository only labels of a new head, and special tokens",
    )
    trust_remote_code: bool = Field(
        False, description="run code of the repository, where the node's owner allows it too"
    )
    input_names: list[str] | None = Field(
        None, fail_fast=True, description="slice tensors passed to the model; default: by type"
    )


class Preprocessor(Table):
    """The tokenizer or image processor that is saved beside the trained model."""

    repository: str | None = Field(None, description="hub id or local folder; default: the one of the dataset")
    revision: str | None = Field(None, description="branch, tag or commit of the repository")


class Dataset(Table):
    """The prepared dataset: a folder, or a name that a data shard announces."""

    path: str | None = Field(None, description="prepared folder")
    name: str | None = Field(None, description="name that a data shard announces")
    shards: Count = Field(1, description="data shard actors that serve it")
    allow_quarantine: bool = Field(
        False,
        description="go on without damaged slices, instead of ending; leave out bad samples, not their batches",
    )


class Rounds(Table):
    """Amount of work, and its division into rounds and batches."""

    update_rounds: Count = Field(100, description="outer rounds")
    samples_between_updates: Count = Field(1200, description="samples over all workers in a round")
    max_batch_size: Count = Field(32, description="samples in one inner step of one worker")
    accumulation: Count = Field(1, description="micro-batches that a batch is computed in, to save memory")
    warmup_rounds: int = Field(
        0,
        ge=0,
        description="first rounds that are synchronous steps: a batch of each worker, averaged plainly",
    )
    evaluate_every: int = Field(1, ge=0, description="rounds between evaluations; 0: only after the last")


class InnerOptimizer(Table):
    """Optimizer of every worker; in synchronous training, of the server, which steps on the mean gradient."""

    name: Annotated[str, AfterValidator(identifier)] = Field(
        "adamw", description="adamw, sgd, muon (2-D weights by Muon, the rest by AdamW), or a class of torch.optim"
    )
    learning_rate: Positive = Field(1e-3, description="peak learning rate of AdamW and SGD")
    muon_learning_rate: Positive = Field(2e-2, description="peak learning rate of the 2-D weights under muon")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), strict=False, description="decay of AdamW's averages")
    epsilon: Positive = Field(1e-8, description="AdamW's epsilon")
    k_aware: bool = Field(
        False, description="AdamW: steps as long as on the mean gradient of all workers, whose noise is less"
    )
    momentum: Fraction = Field(0.0, description="momentum of sgd; Muon's is 0.95")
    weight_decay: NotNegative = Field(0.1, description="weight decay, decoupled but for sgd")
    schedule: Literal["constant", "linear", "linear-with-warmup", "cosine-with-warmup", "wsd"] = Field(
        "constant", description="learning rate over inner steps"
    )
    warmup_steps: int = Field(0, ge=0, description="inner steps of linear warm-up")
    total_steps: Count | None = Field(None, description="inner steps of the schedule; default: as planned")
    decay_steps: Count | None = Field(None, description="inner steps of wsd's decay; default: a fifth of all")
    min_lr_rate: Fraction = Field(
        0.0, description="part of the peak rate at which schedules end, but for constant ones"
    )
    clip_norm: Positive | None = Field(1.0, description="gradient norm above which gradients are scaled down")


class OuterOptimizer(Table):
    """Optimizer of the parameter server, which steps on the mean delta."""

    name: Literal["nesterov", "average", "adam"] = Field(
        "nesterov", description="average: the workers' mean itself, which is nesterov with η = 1 and μ = 0"
    )
    learning_rate: Positive = Field(0.7, description="η in θ ← θ + η(μv + Δ̄); of adam far less, such as 1e-3")
    momentum: Fraction = Field(0.9, description="μ in v ← μv + Δ̄")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), strict=False, description="decay of adam's averages")
    epsilon: Positive = Field(1e-8, description="adam's epsilon")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate over the rounds")
    final_learning_rate: NotNegative | None = Field(
        None, description="η of the last round, unless it is constant; default: a seventh of learning_rate"
    )


class Sync(Table):
    """Exchange of deltas: strategy, encoding, overlap, and rejection."""

    strategy: StrategyName = Field(
        "diloco",
        description="async: no barrier; sync: a round is a step of inner_optimizer on the mean of all gradients",
    )
    fragments: Count = Field(1, description="parts of the parameters with a server each")
    partition: Literal["contiguous", "strided"] = Field(
        "contiguous", description="what a fragment has: a run of tensors, or layers ℓ with the same ℓ mod fragments"
    )
    stagger: bool = Field(True, description="diloco: a round exchanges one fragment, in turn; false: all of them")
    delay_steps: int = Field(0, ge=0, description="inner steps that a worker goes on with before it merges the result")
    in_flight: Count = Field(
        1, description="exchanges under way at once: a result is merged so many rounds later, after delay_steps"
    )
    mixing: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="part of its own weights that a worker keeps when it merges the result"
    )
    codec: Encoding = Field("fp32", description="what deltas and gradients are encoded as; see docs/communication.md")
    downward_codec: Encoding = Field(
        "fp32", description="what new weights are encoded as, for workers that have the old ones"
    )
    error_feedback: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="part of what a codec has left out that is added in the next round; 0: none"
    )
    dynamic_local_steps: bool = Field(True, description="batches by each worker's speed; false: equally many for all")
    delayed_nesterov: bool = Field(
        True, description="async: outer momentum steps once a round; false: with every delta"
    )
    period: Count | None = Field(None, description="async: deltas that make a round; default: resources.num_workers")
    arrival_grace_s: NotNegative | None = Field(
        None, description="async: how long a delta waits for others; default: a batch of the slowest, if dynamic"
    )
    max_staleness: int | None = Field(None, ge=0, description="async: most deltas merged meanwhile; default: 10 rounds")
    quorum: Count | None = Field(None, description="deltas that close a round after grace_s; default: all")
    grace_s: NotNegative = Field(30.0, description="longest wait for the other deltas once the quorum is in")
    weighting: Literal["samples", "uniform"] = Field("samples", description="weight of a worker's delta in the mean")
    merge: Literal["mean", "trimmed_mean", "median"] = Field(
        "mean", description="what deltas are merged by; trimmed_mean and median bear poisoned ones, and weigh all alike"
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.125, description="part of the values that trimmed_mean drops at each end, of every coordinate"
    )
    norm_gate: Positive = Field(
        10.0, description="a delta whose norm is more than so many times the median is rejected"
    )
    clip: Positive | None = Field(
        None, description="a delta whose norm is more than so many times the median is scaled down to that"
    )
    strikes: Count = Field(
        3, description="deltas rejected for their content, less those accepted since, that exclude a worker"
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
        """Whether workers have weights of their own that a round's result leaves to them."""
        return self.staggered or self.delay_steps > 0 or self.mixing > 0


class Testing(Table):
    """Settings that only tests use."""

    slowdown: list[Annotated[float, Field(ge=1, allow_inf_nan=False)]] = Field(
        [], fail_fast=True, description="factor by which worker i's batches take longer"
    )
    batch_s: Positive | None = Field(None, description="seconds that every batch takes at least")
    batch_times_s: list[Positive] = Field(
        [], fail_fast=True, description="the same for worker i's batches; of workers that are not named, batch_s"
    )
    failpoints: list[str] = Field([], fail_fast=True, description="NAME[:KEY]=ACTION@HITS, see hypha_ray/failpoints.py")
    failpoint_log: str | None = Field(None, description="file that hits are counted in, over all processes")


REPORTS_PER_S = 500
"""Reports per second, of all workers together, that the scheduler is sent at most."""


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
    resources: Resources = Resources()
    worker: Worker = Worker()
    bridge: Bridge = Bridge()
    checkpoint: Checkpoint = Checkpoint()
    telemetry: Telemetry = Telemetry()
    testing: Testing = Testing()

    def samples(self, round: int) -> int:
        """Samples of a round, over all workers."""
        if round < self.rounds.warmup_rounds:
            return self.num_workers * self.rounds.max_batch_size
        return self.rounds.samples_between_updates

    @property
    def num_workers(self) -> int:
        """Workers wanted, in all groups."""
        return self.resources.num_workers

    @property
    def worker_groups(self) -> list[WorkerGroup]:
        """Groups of workers, in the order in which the workers are numbered."""
        return groups_of(self.resources, self.bridge)

    def group_of(self, worker: int) -> WorkerGroup:
        """Group of the worker of that number."""
        for group in self.worker_groups:
            if worker < group.count:
                return group
            worker -= group.count
        raise IndexError(f"no worker has the number {worker}")

    @property
    def report_interval_s(self) -> float:
        """Seconds between two reports of a worker; longer in a large fleet, so that the scheduler can read them all."""
        return max(self.worker.report_every_s, self.num_workers / REPORTS_PER_S)

    @property
    def lease_s(self) -> float:
        """Seconds of silence after which a worker is taken for dead; at least those of three reports."""
        return max(self.worker.lease_s, 3 * self.num_workers / REPORTS_PER_S)
