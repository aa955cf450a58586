"""The parameter server's Ray actor.

The actor is stateless between rounds: weights and momentum are arguments and results of its calls. So the loss of a
server costs one repeated call, and no round can be applied twice. Momentum is returned by a second call with the same
arguments, after θ. Any server can answer it, and may compute momentum only then, while workers copy θ.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import ray

from hypha_ray import traces
from hypha_ray.children import ListedActor
from hypha_ray.config.checks import source_hashes
from hypha_ray.config.schema import Job
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.exchange_schedule import outer_steps_before
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.files import uncollected
from hypha_ray.types import Flat, Layout, RoundProgress, Verdict
from hypha_ray.types.rounds import attempt_of

if TYPE_CHECKING:
    from hypha_ray.server.optimizer_step import ModelOptimizerStep
    from hypha_ray.server.reduce import ReduceSpec, State


GROUPS = {"pulse": 1, "intake": 1}
"""Concurrency groups of calls that don't wait for a running step: liveness checks, and the receipt of payloads."""
THREADS = 4
"""Least number of threads, even if fewer CPUs are reserved: workers wait during a step, so their CPUs are idle."""
COPYING = 2
"""Time allowed for storing and copying θ, as a multiple of the step's duration, if the cluster is a single machine."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """An outer step of one fragment. θ, momentum and payloads are separate arguments, so that Ray fetches them."""

    id: str
    """Unique name of the step."""
    layout: Layout
    """Layout of the whole model."""
    fragment: int
    round: int
    senders: tuple[tuple[int, int, int], ...]
    """Worker, incarnation and weight of each payload, in the payloads' order."""
    phase: RoundProgress | None = None
    """Progress of the round before this step; None if a round has only one step."""

    @property
    def key(self) -> traces.RoundKey:
        """Round of the step's span."""
        for _, incarnation, _ in self.senders:  # All have the same attempt.
            return traces.RoundKey(attempt_of(incarnation), self.round)
        return traces.RoundKey(0, self.round)


class ParameterServer(ListedActor):
    """Reduces the deltas of one fragment.

    Its methods import the heavy libraries, so a process that only starts this actor doesn't load them.
    """

    def __init__(self, job: Job) -> None:
        with uncollected():
            import torch

        arm(job.testing.failpoints, job.testing.failpoint_log)
        traces.begin(job.telemetry.sinks, str(job.run.name), ray.get_runtime_context)
        self._job = job
        self._is_synchronous = job.sync.traits.sends_gradients
        self._stepwise = not job.sync.traits.has_barrier and job.sync.delayed_nesterov
        self._arrays: dict[str, State] = {}
        self._last: tuple[str, Flat] | None = None
        """Name of the latest step and its new momentum; None if that step's momentum is incomplete."""
        self._busy_until = 0.0
        """Estimated monotonic time at which workers will have copied the latest θ; 0 if there are several machines."""
        self._has_one_machine = sum(node["Alive"] for node in ray.nodes()) == 1
        self._optimizer_steps: dict[str, ModelOptimizerStep] = {}
        self._has_checked = False
        """Whether the sources of members that users bring are known to be those that the run began with."""
        resources = ray.get_runtime_context().get_assigned_resources()
        reserved = max(1, int(resources.get("CPU", 0)))
        if self._is_synchronous:
            torch.set_num_threads(reserved)
            self._threads = 1
        else:
            torch.set_num_threads(1)
            cpus = os.cpu_count() or 1
            self._threads = max(reserved, min(THREADS, cpus))

    def initial(self) -> tuple[Layout | Flat, ...]:
        """Build the job's model; returns the initial weights of each fragment and the layout, as separate results.

        Call it with ``num_returns = 1 + fragments``.

        Raises:
            HyphaError: the model can't be built, or can't be split into that many fragments.

        """
        with uncollected():
            from hypha_ray.model.layout import gather, layout_of
            from hypha_ray.model.lora import build_trained
            from hypha_ray.server.outer import load_kernel

        model = build_trained(self._job)
        layout = layout_of(model, self._job.sync.fragments, self._job.sync.partition)
        flats = [gather(model, layout, fragment) for fragment in range(layout.fragments)]
        load_kernel(self._job, flats)
        return *flats, layout

    def momentum(self, layout: Layout, fragment: int) -> Flat:
        """Momentum before the first round; empty for synchronous steps, whose optimizer creates its own state."""
        from hypha_ray.server.reduce import initial_momentum

        if self._is_synchronous:
            return {}
        return initial_momentum(layout, fragment, self._job.outer_optimizer.name)

    @ray.method(num_returns=3)
    def reduce(self, request: StepRequest, theta: Flat, momentum: Flat, *payloads: Flat) -> tuple[Flat, Flat, Verdict]:
        """Take an outer step; see `reduce.reduce`.

        Workers wait for θ but not for momentum, so momentum is kept here until `momentum_after`, or isn't computed yet.

        Returns:
            As separate results: new θ, the encoded difference of θ (empty without a downward codec), and the verdict.

        """
        failpoint("server.before_reduce")
        self._last = None
        began_at = time.monotonic()
        with traces.traced("reduce", request.key, fragment=request.fragment, deltas=len(payloads)):
            new_theta, state, difference, verdict = self._step(request, theta, momentum, payloads, outputs="theta")
        ended_at = time.monotonic()
        self._busy_until = 0.0
        if self._has_one_machine:
            self._busy_until = ended_at + COPYING * (ended_at - began_at)
        if state is not None:
            self._last = request.id, state
        failpoint("server.after_reduce")
        return new_theta, difference, verdict

    @ray.method(num_returns=2)
    def momentum_after(self, request: StepRequest, theta: Flat, momentum: Flat, *payloads: Flat) -> tuple[Flat, None]:
        """Return the new momentum of a step; computes the step again unless it was the latest one of this server.

        The arguments are those of `reduce`. On a single machine, a repeated step first waits until workers should have
        copied θ, because both are limited by memory bandwidth.

        Returns:
            As separate results: momentum, and None as a receipt.

        """
        if self._last is None or self._last[0] != request.id:
            self._last = None  # Steps share their output arrays.
            busy_s = self._busy_until - time.monotonic()
            time.sleep(max(0.0, busy_s))
            with traces.traced("reduce", request.key, fragment=request.fragment, output="momentum"):
                _, state, _, _ = self._step(request, theta, momentum, payloads, outputs="state")
            assert state is not None
            self._last = request.id, state
        return self._last[1], None

    def _step(
        self,
        request: StepRequest,
        theta: Flat,
        momentum: Flat,
        payloads: tuple[Flat, ...],
        outputs: Literal["theta", "state"],
    ) -> tuple[Flat, Flat | None, Flat, Verdict]:
        """Return new θ, new momentum or None, the encoded difference of θ or an empty one, and the verdict.

        The part named by `outputs` is complete. A downward codec needs both.
        """
        from hypha_ray.codec import downward_codec
        from hypha_ray.server.payloads import Received, encode_result, split_state
        from hypha_ray.server.reduce import is_whole, reduce

        self._require_same_sources()
        sync = self._job.sync
        received = []
        for sender, payload in zip(request.senders, payloads, strict=True):
            received.append(Received(*sender, payload))
        codec = downward_codec(sync.downward_codec, sync.downward_codec_options)
        spec = self._spec(request, outputs if codec is None else "all")
        arrays = self._output_arrays(request.layout, request.fragment)
        old_state, residual = split_state(momentum)
        new_theta, state, verdict = reduce(request.round, theta, old_state, received, spec, arrays)
        if self._warms_up(request.round):
            state = old_state
        if codec is not None:
            result = (new_theta, state, verdict)
            return encode_result(sync.downward_codec, codec, sync.error_feedback, theta, residual, result)
        if not is_whole(state, spec):
            return new_theta, None, {}, verdict
        return new_theta, state, {}, verdict

    def _warms_up(self, round: int) -> bool:
        """Whether steps of a round only average, because it is one of the warm-up."""
        return round < self._job.rounds.warmup_rounds

    def _spec(self, request: StepRequest, outputs: Literal["all", "theta", "state"]) -> ReduceSpec:
        from hypha_ray.codec import upward_codec
        from hypha_ray.server.reduce import ReduceSpec

        job = self._job
        return ReduceSpec(
            layout=request.layout,
            fragment=request.fragment,
            outer=OuterOptimizer(name="average") if self._warms_up(request.round) else job.outer_optimizer,
            sync=job.sync,
            codec=upward_codec(job.sync),
            optimizer_step=self._optimizer_step(request.layout) if self._is_synchronous else None,
            rounds=job.rounds.update_rounds,
            earlier_steps=outer_steps_before(job, request.round, request.fragment),
            threads=self._threads,
            phase=request.phase,
            outputs=outputs,
        )

    def _require_same_sources(self) -> None:
        """Refuse members that users bring with another source than the run began with.

        Raises:
            CheckpointError: CKPT007.

        """
        if self._has_checked:
            return
        from hypha_ray.model.sources import changed_error, changes

        changed_sources = changes(source_hashes(self._job), self._job.begun_with)
        if changed_sources:
            raise changed_error(changed_sources)
        self._has_checked = True

    @ray.method(concurrency_group="intake")
    def receive(self, payload: Flat) -> None:
        """Bring a payload to this node ahead of the step, where it survives the end of its worker's node.

        Also loads the libraries and kernels of the reduction.
        """
        import hypha_ray.server.reduce  # noqa: F401
        from hypha_ray.server.outer import load_kernel

        load_kernel(self._job, [payload])

    @ray.method(concurrency_group="pulse")
    def flush_traces(self) -> None:
        """Export the last spans, as `tracing.flush`."""
        traces.flush()

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """Process id; an answer shows that the actor is alive."""
        return os.getpid()

    def _optimizer_step(self, layout: Layout) -> ModelOptimizerStep:
        """Optimizer of synchronous steps, kept only to reuse its memory."""
        from hypha_ray.server.optimizer_step import ModelOptimizerStep

        key = layout.sha256()
        if key not in self._optimizer_steps:
            self._optimizer_steps = {key: ModelOptimizerStep(self._job, layout)}
        return self._optimizer_steps[key]

    def _output_arrays(self, layout: Layout, fragment: int) -> State:
        """Output arrays, reused by all steps: Ray has copied θ into its object store before the next call begins."""
        from hypha_ray.server.reduce import blank

        key = f"{layout.sha256()}-{fragment}"
        if key not in self._arrays:
            self._arrays = {key: blank(layout, fragment, self._job.outer_optimizer.name, self._stepwise)}
        return self._arrays[key]
