"""The parameter server's Ray actor.

It keeps nothing that a round depends on: weights and momentum come as arguments and go as results. So one that dies
costs a repeated call and nothing else, and no round can be applied twice. Momentum goes after θ, in a call with the
same arguments, and may be computed only then, while workers copy θ: any server can do so.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import ray

from hypha_ray.config.schema import Job, OuterOptimizer
from hypha_ray.exchange_schedule import outer_steps_before
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.heavy_imports import uncollected
from hypha_ray.types import Flat, Layout, RoundProgress, Verdict

if TYPE_CHECKING:
    from hypha_ray.server.reduce import State
    from hypha_ray.server.spec import OptimizerStep


GROUPS = {"pulse": 1, "intake": 1}
"""Calls that don't wait for a step: whether it lives, and whether a payload is there."""
THREADS = 4
"""Threads of a server that has reserved fewer CPUs: workers wait while it computes, so theirs are idle."""
COPYING = 2
"""Time that storing and copying θ may take, as a multiple of the step's, if the cluster is a single machine."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """An outer step of one fragment. Its θ, momentum and payloads are arguments beside it, which Ray fetches."""

    id: str
    """Name of the step, unlike that of any other."""
    layout: Layout
    """Layout of the whole model."""
    fragment: int
    round: int
    senders: tuple[tuple[int, int, int], ...]
    """Worker, incarnation and weight of each payload, in the payloads' order."""
    phase: RoundProgress | None = None
    """Place of the step in a round that has several; None in a round of one step."""


class ParameterServer:
    """Reduces the deltas of one fragment.

    What is heavy is imported in its methods: a process that only starts this actor needs none of it.

    Args:
        job: the job file.

    """

    def __init__(self, job: Job) -> None:
        with uncollected():
            import torch

        arm(job.testing.failpoints, job.testing.failpoint_log)
        self._job, self._sync = job, job.sync.traits.sends_gradients
        self._stepwise = not job.sync.traits.has_barrier and job.sync.delayed_nesterov
        self._out: dict[str, State] = {}
        self._last: tuple[str, Flat] | None = None
        """Name of the latest step, and the momentum that came of it, if all of it did."""
        self._busy_until = 0.0
        """Monotonic time at which workers on this machine will have copied the latest θ; 0 on a cluster of several."""
        self._alone = sum(node["Alive"] for node in ray.nodes()) == 1
        self._descents: dict[str, OptimizerStep] = {}
        reserved = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0)))
        torch.set_num_threads(reserved if self._sync else 1)
        self._threads = 1 if self._sync else max(reserved, min(THREADS, os.cpu_count() or 1))

    def initial(self) -> tuple[Layout | Flat, ...]:
        """Build the job's model; returns its layout and the initial weights of each fragment, as separate results.

        To be called with ``num_returns = 1 + fragments``.

        Raises:
            HyphaError: the model can't be built, or not be cut into so many fragments.

        """
        with uncollected():
            from hypha_ray.model.layout import gather, layout_of
            from hypha_ray.model.trained import build_trained
            from hypha_ray.server.fused import get_ready

        model = build_trained(self._job)
        layout = layout_of(model, self._job.sync.fragments, self._job.sync.partition)
        flats = [gather(model, layout, fragment) for fragment in range(layout.fragments)]
        get_ready(self._job, flats)
        return layout, *flats

    def momentum(self, layout: Layout, fragment: int) -> Flat:
        """Momentum before the first round; of an optimizer's state there is none."""
        from hypha_ray.server.reduce import initial_momentum

        return {} if self._sync else initial_momentum(layout, fragment, self._job.outer_optimizer.name)

    @ray.method(num_returns=3)
    def reduce(self, request: StepRequest, theta: Flat, momentum: Flat, *payloads: Flat) -> tuple[Flat, Flat, Verdict]:
        """Take an outer step; see `reduce.reduce`.

        Workers wait for θ, but not for momentum, so momentum stays here until it is asked for, or is left out.

        Args:
            request: the step.
            theta: global weights of the fragment.
            momentum: outer momentum of the fragment.
            payloads: contributions of the senders.

        Returns:
            As separate results: new θ, the coded difference of θ if there is to be one, and the verdict.

        """
        failpoint("server.before_reduce")
        self._last, began = None, time.monotonic()
        new, state, difference, verdict = self._step(request, theta, momentum, payloads, wanted="theta")
        ended = time.monotonic()
        self._busy_until = ended + COPYING * (ended - began) if self._alone else 0.0
        if state is not None:
            self._last = request.id, state
        failpoint("server.after_reduce")
        return new, difference, verdict

    @ray.method(num_returns=2)
    def momentum_after(self, request: StepRequest, theta: Flat, momentum: Flat, *payloads: Flat) -> tuple[Flat, None]:
        """Return new momentum of a step, taking the step again unless it was the latest one here.

        On a single machine that waits for workers to have copied θ: they need the same memory.

        Args:
            request: the step that `reduce` was given, and so for all others.
            theta: likewise.
            momentum: likewise.
            payloads: likewise.

        Returns:
            As separate results: momentum, and None as a receipt.

        """
        if self._last is None or self._last[0] != request.id:
            self._last = None  # A step is written over the one before.
            time.sleep(max(0.0, self._busy_until - time.monotonic()))
            state = self._step(request, theta, momentum, payloads, wanted="state")[1]
            assert state is not None
            self._last = request.id, state
        return self._last[1], None

    def _step(
        self,
        request: StepRequest,
        theta: Flat,
        momentum: Flat,
        payloads: tuple[Flat, ...],
        wanted: Literal["theta", "state"],
    ) -> tuple[Flat, Flat | None, Flat, Verdict]:
        """New θ, new momentum if it was no detour, the coded difference of θ if there is to be one, and the verdict.

        `wanted` may not be left out; but differences to θ have to do with both.
        """
        from hypha_ray.codec import difference_codec, upward_codec
        from hypha_ray.server.admission import Received
        from hypha_ray.server.downlink import apart, published
        from hypha_ray.server.reduce import is_whole, reduce
        from hypha_ray.server.spec import ReduceSpec

        layout, fragment, round = request.layout, request.fragment, request.round
        received = [Received(*sender, payload) for sender, payload in zip(request.senders, payloads, strict=True)]
        sync, rounds = self._job.sync, self._job.rounds.update_rounds
        warms_up = round < self._job.rounds.warmup_rounds
        outer = OuterOptimizer(name="average") if warms_up else self._job.outer_optimizer
        optimizer_step = self._descent(layout) if self._sync else None
        turns, read = outer_steps_before(self._job, round, fragment), upward_codec(sync)
        down = difference_codec(sync.downward_codec)
        part: Literal["all", "theta", "state"] = wanted if down is None else "all"
        spec = ReduceSpec(
            layout, fragment, outer, sync, read, optimizer_step, rounds, turns, self._threads, request.phase, part
        )
        own, left_out = apart(momentum)
        new, state, verdict = reduce(round, theta, own, received, spec, self._room(layout, fragment))
        state = own if warms_up else state
        if down is not None:
            return published(down, sync.error_feedback, theta, left_out, (new, state, verdict))
        return new, state if is_whole(state, spec) else None, {}, verdict

    @ray.method(concurrency_group="intake")
    def receive(self, payload: Flat) -> None:
        """Take a payload in: it is on this node then, before it is needed, and safe from its own's end.

        What the reduction needs is loaded meanwhile.
        """
        import hypha_ray.server.reduce  # noqa: F401
        from hypha_ray.server.fused import get_ready

        get_ready(self._job, [payload])

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """The process id: an answer shows that the actor lives."""
        return os.getpid()

    def _descent(self, layout: Layout) -> OptimizerStep:
        """The optimizer, which keeps nothing from one call to the next but its memory."""
        from hypha_ray.server.optimizer_step import ModelOptimizerStep

        key = layout.sha256()
        if key not in self._descents:
            self._descents = {key: ModelOptimizerStep(self._job, layout)}
        return self._descents[key]

    def _room(self, layout: Layout, fragment: int) -> State:
        """Arrays of the latest step: Ray has copied θ into its store before the next call begins."""
        from hypha_ray.server.reduce import blank

        key = f"{layout.sha256()}-{fragment}"
        if key not in self._out:
            self._out = {key: blank(layout, fragment, self._job.outer_optimizer.name, self._stepwise)}
        return self._out[key]
