"""The tables of a job file about machines: leases, computation, and trainers from outside."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hypha_ray.config.value_types import Count, NotNegative, Positive, Table


class WorkerResources(Table):
    """Needs of one actor."""

    cpu: NotNegative = Field(1.0, description="CPU cores")
    gpu: NotNegative = Field(0.0, description="GPUs")
    memory_gb: NotNegative = Field(0.0, description="memory in GB that Ray reserves")
    gpu_type: str | None = Field(None, description="accelerator label, nvidia, amd or any")


class ServerResources(WorkerResources):
    """Needs of a parameter server; it computes while workers wait, so it reserves no CPU unless told to."""

    cpu: NotNegative = Field(0.0, description="CPU cores")


class Price(Table):
    """Price of a lease."""

    bid: NotNegative = Field(100.0, description="public bid")
    max: NotNegative = Field(100.0, description="private limit")


class Resources(Table):
    """Number and kind of machines."""

    num_workers: Count = Field(2, description="workers wanted")
    min_workers: Count = Field(1, description="workers needed to go on")
    worker: WorkerResources = Field(WorkerResources(), description="needs of a worker")
    parameter_server: ServerResources = Field(ServerResources(), description="needs of a parameter server")
    worker_price: Price = Field(Price(), description="price of a worker's lease")
    parameter_server_price: Price = Field(Price(), description="price of a server's lease")
    min_memory_mb: Count | None = Field(None, description="the training guide's name for worker.memory_gb, in MB")
    min_gpus: int | None = Field(None, ge=0, description="the training guide's name for worker.gpu")
    gpu_type: str | None = Field(None, description="the training guide's name for worker.gpu_type")
    start_deadline_s: Positive = Field(120.0, description="longest wait for leases and for workers to get ready")
    max_idle_s: Positive = Field(600.0, description="longest wait for machines while fewer than min_workers are there")


class Worker(Table):
    """Computation of a worker."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where the lease has one")
    autocast: Literal["none", "bf16"] = Field("none", description="bf16: mixed precision in forward and backward")
    compile: bool = Field(False, description="torch.compile the model")
    report_every_s: Positive = Field(1.0, description="seconds between progress reports; at least num_workers / 500")
    lease_s: Positive = Field(
        5.0,
        description="silence after which a worker counts as dead and is replaced; at least 3 * num_workers / 500",
    )
    stall_s: Positive = Field(600.0, description="time without progress after which a live worker is replaced")
    prefetch_mb: Count = Field(256, description="memory for slices that wait to be trained on")


class Bridge(Table):
    """External trainers, which take part over the bridge."""

    commands: list[str] = Field(
        [],
        fail_fast=True,
        description="command lines of the last workers' trainers; empty: it dials in",
    )
    listen: str = Field(
        "127.0.0.1:0", description="host:port for trainers that dial in; the second at the port after it"
    )
    certificate: str | None = Field(None, description="PEM file, for TLS with trainers that dial in from elsewhere")
    key: str | None = Field(None, description="PEM file with the certificate's private key")
