"""The tables of a job file about machines: leases, computation, and external trainers."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from hypha_ray.config.value_types import Count, FleetSize, NotNegative, Positive, Table, duration, seconds_of

MB_PER_GB = 1000
MarketStrategy: TypeAlias = Literal["cheapest", "value", "near", "spread"]
"""Orders in which a job takes offers."""

Attention: TypeAlias = Literal[
    "auto", "none", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"
]
"""Implementations of attention."""


class WorkerResources(Table):
    """Resources of one actor."""

    cpu: NotNegative = Field(1.0, description="CPU cores")
    gpu: NotNegative = Field(0.0, description="GPUs")
    memory_gb: NotNegative = Field(0.0, description="memory in GB that Ray reserves")
    gpu_type: str | None = Field(None, description="accelerator label, nvidia, amd or any")


class WorkerGroup(WorkerResources):
    """Workers of one kind with equal needs."""

    kind: Literal["train", "bridged"] = Field("train", description="bridged: the trainer runs outside Ray")
    count: FleetSize = Field(1, description="workers of the group")
    command: str | None = Field(
        None, description="bridged: command line of each trainer; without it, the trainer connects by itself"
    )

    @property
    def bridged(self) -> bool:
        """Whether the trainers run outside Ray."""
        return self.kind == "bridged"

    @property
    def dials_in(self) -> bool:
        """Whether the trainers connect by themselves instead of being started."""
        return self.bridged and not (self.command or "").strip()


class ServerResources(WorkerResources):
    """Resources of a parameter server, which computes while workers wait and so reserves no CPU by default."""

    cpu: NotNegative = Field(0.0, description="CPU cores")


class Price(Table):
    """Price of a lease per hour, on nodes whose owners have terms."""

    bid: NotNegative | None = Field(
        None, description="public bid, which an owner's floor is compared with; default: 100, or max if that is less"
    )
    max: NotNegative = Field(100.0, description="highest price of a lease; it stays in the job")

    @property
    def public_bid(self) -> float:
        """Bid that owners see."""
        if self.bid is None:
            return min(100.0, self.max)
        return self.bid


class Resources(Table):
    """Number and kind of machines."""

    num_workers: FleetSize = Field(2, description="workers wanted")
    min_workers: Count = Field(1, description="workers without which training pauses")
    worker: WorkerResources = Field(WorkerResources(), description="resources of a worker")
    parameter_server: ServerResources = Field(ServerResources(), description="resources of a parameter server")
    generator: WorkerResources = Field(WorkerResources(), description="resources of one of rl.generators")
    worker_price: Price = Field(Price(), description="price of a worker's lease")
    parameter_server_price: Price = Field(Price(), description="price of a server's lease")
    strategy: MarketStrategy = Field(
        "cheapest",
        description="order of offers: by price, price per throughput, site of the run, or leases on a node",
    )
    max_price_per_hour: Positive | None = Field(None, description="highest sum of all leases' prices; default: none")
    min_memory_mb: Count | None = Field(None, description="the training guide's name for worker.memory_gb, in MB")
    min_gpus: int | None = Field(None, ge=0, description="the training guide's name for worker.gpu")
    gpu_type: str | None = Field(None, description="the training guide's name for worker.gpu_type")
    start_deadline_s: Positive = Field(120.0, description="longest wait for leases and for workers to be ready")
    max_idle_s: Positive = Field(600.0, description="longest wait for machines while there are fewer than min_workers")


class Goal(Table):
    """Deadline and budget of a run, by which it hires machines and lets them go."""

    by: Annotated[str, AfterValidator(duration)] | None = Field(
        None, description="time from the run's first start in which it is to end, such as 6h, 90min or 2d"
    )
    at_most: Positive | None = Field(
        None, description="most to be paid for all leases, in the unit of owners' prices; the run ends before it's more"
    )

    @property
    def by_s(self) -> float | None:
        """Seconds from the run's first start to its deadline; None without one."""
        return None if self.by is None else seconds_of(self.by)

    @property
    def is_set(self) -> bool:
        """Whether there is a deadline or a budget."""
        return self.by is not None or self.at_most is not None

    @property
    def budget(self) -> str:
        """The budget as an assignment, with which the reason begins for which it ends a run."""
        return f"goal.at_most = {self.at_most:g}" if self.at_most is not None else "no budget"


class Worker(Table):
    """Computation of a worker."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if the lease has one")
    processes: Count | None = Field(
        None, description="processes of a worker, which share each batch; default: one for each GPU of its lease"
    )
    sharding: Literal["none", "full"] = Field(
        "none",
        description="full: each process of a worker has a part of weights, gradients and optimizer state (FSDP2)",
    )
    autocast: Literal["auto", "none", "bf16", "fp16"] = Field(
        "auto",
        description="bf16: mixed precision in forward and backward; fp16: with scaled losses, for GPUs without bf16; "
        "auto: by the worker's device, see docs/gpu.md",
    )
    compile: bool | Literal["auto", "layers"] = Field(
        "auto",
        description="torch.compile the model; layers: its repeated layers and its loss, which takes less time; "
        "auto: on a GPU, if the run is long enough to gain from it",
    )
    gradient_checkpointing: bool = Field(
        False, description="compute activations again in the backward pass, to save their memory"
    )
    fused_loss: bool | Literal["auto"] = Field(
        "auto",
        description="compute a language model's logits and loss in chunks, to save the memory of all logits; "
        "auto: on a GPU, if the model allows it and isn't compiled",
    )
    probe_batch_size: bool = Field(
        False, description="try before training which batches fit into each worker's lease, up to rounds.max_batch_size"
    )
    attention: Attention = Field(
        "auto", description="implementation of attention; none: the model's own choice; auto: sdpa on a GPU"
    )
    report_every_s: Positive = Field(
        1.0, description="most seconds between progress reports; at least num_workers / 500"
    )
    lease_s: Positive = Field(
        5.0,
        description="silence after which a worker counts as dead and is replaced; at least 3 * num_workers / 500",
    )
    stall_s: Positive = Field(600.0, description="seconds without progress after which a live worker is replaced")
    prefetch_mb: Count = Field(256, description="memory in MB for slices that wait to be trained on")

    @property
    def compiles(self) -> bool:
        """Whether the model or its layers are compiled; not if that isn't chosen yet."""
        return self.compile in (True, "layers")


class Bridge(Table):
    """External trainers, which take part through the bridge."""

    commands: list[str] = Field(
        [],
        fail_fast=True,
        description="command lines of the last workers' trainers; an empty one: the trainer connects by itself",
    )
    listen: str = Field(
        "127.0.0.1:0",
        description="host:port for trainers that connect by themselves; each further one uses the next port",
    )
    certificate: str | None = Field(
        None, description="PEM file, for TLS with trainers that connect from other machines"
    )
    key: str | None = Field(None, description="PEM file with the certificate's private key")


def groups_of(resources: Resources, bridge: Bridge) -> list[WorkerGroup]:
    """Groups that `num_workers` and `bridge.commands` describe: workers in Ray, then one group for each command.

    Resources are those of a worker, merged with the training guide's keys for them; the larger of two minima wins.
    """
    worker = resources.worker
    min_memory_gb = (resources.min_memory_mb or 0) / MB_PER_GB
    group = WorkerGroup(
        cpu=worker.cpu,
        gpu=max(worker.gpu, float(resources.min_gpus or 0)),
        memory_gb=max(worker.memory_gb, min_memory_gb),
        gpu_type=worker.gpu_type or resources.gpu_type,
    )
    groups = []
    count_in_ray = resources.num_workers - len(bridge.commands)
    if count_in_ray > 0:
        groups.append(group.model_copy(update={"count": count_in_ray}))
    for command in bridge.commands:
        groups.append(group.model_copy(update={"kind": "bridged", "command": command}))
    return groups
