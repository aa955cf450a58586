"""The parameter server's Ray actor.

It keeps nothing that a round depends on: weights and momentum come as arguments and go as results. So one that dies
costs a repeated call and nothing else, and no round can be applied twice.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import ray

from hypha_ray.config.schema import Job
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.types import Flat, Layout, Verdict

if TYPE_CHECKING:
    from hypha_ray.server.reducer import Descent, State


class ParameterServer:
    """Reduces the deltas of one fragment, with as many threads as it has CPUs.

    What is heavy is imported in its methods: whoever only starts this actor needs none of it.

    Args:
        job: the job file.

    """

    def __init__(self, job: Job) -> None:
        import torch

        arm(job.testing.failpoints, job.testing.failpoint_log)
        self._job, self._sync = job, job.sync.strategy == "sync"
        self._out: dict[str, State] = {}
        self._descents: dict[str, Descent] = {}
        assigned = ray.get_runtime_context().get_assigned_resources()
        torch.set_num_threads(max(1, int(assigned.get("CPU", 0))))

    def initial(self) -> tuple[Layout | Flat, ...]:
        """Build the job's model; returns its layout and the initial weights of each fragment, as separate results.

        To be called with ``num_returns = 1 + fragments``.

        Raises:
            HyphaError: the model can't be built, or not be cut into so many fragments.

        """
        from hypha_ray.model.build import build_model
        from hypha_ray.model.layout import gather, layout_of

        model = build_model(self._job.model, self._job.run.seed)
        layout = layout_of(model, self._job.sync.fragments)
        return layout, *(gather(model, layout, fragment) for fragment in range(layout.fragments))

    def momentum(self, layout: Layout, fragment: int) -> Flat:
        """Momentum before the first round; of an optimizer's state there is none."""
        from hypha_ray.server.reducer import initial_momentum

        return {} if self._sync else initial_momentum(layout, fragment, self._job.outer_optimizer.name)

    @ray.method(num_returns=4)
    def reduce(
        self,
        layout: Layout,
        fragment: int,
        round: int,
        theta: Flat,
        momentum: Flat,
        meta: tuple[tuple[int, int, int], ...],
        *payloads: Flat,
    ) -> tuple[Flat, Flat, Flat, Verdict]:
        """Take an outer step; see `reducer.reduce`.

        Ray fetches references that are arguments of their own before the call begins, hence the flat list of payloads.

        Args:
            layout: of the whole model.
            fragment: which part of it.
            round: number of the round.
            theta: global weights of the fragment.
            momentum: outer momentum of the fragment.
            meta: worker, incarnation and samples of each payload.
            payloads: what the workers sent, in the same order.

        Returns:
            As separate results: new θ, new momentum, the coded difference of θ if there is to be one, and the verdict.

        """
        from hypha_ray.codec import codec, difference_codec
        from hypha_ray.server.gates import Received
        from hypha_ray.server.publication import apart, published
        from hypha_ray.server.reducer import Rules, reduce

        failpoint("server.before_reduce")
        received = [Received(*who, payload) for who, payload in zip(meta, payloads, strict=True)]
        sync = self._job.sync
        descent = self._descent(layout) if self._sync else None
        rounds = self._job.rounds.update_rounds
        rules = Rules(layout, fragment, self._job.outer_optimizer, sync, codec(sync.codec), descent, rounds)
        own, left_out = apart(momentum)
        new, state, verdict = reduce(round, theta, own, received, rules, self._room(layout, fragment))
        difference: Flat = {}
        if (down := difference_codec(sync.downward_codec)) is not None:
            result = new, state, verdict
            new, state, difference, verdict = published(down, sync.error_feedback, theta, left_out, result)
        failpoint("server.after_reduce")
        return new, state, difference, verdict

    def receive(self, payload: Flat) -> None:
        """Nothing but take a payload in: it is on this node then, before it is needed, and safe from its own's end."""

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """The process id: an answer shows that the actor lives."""
        return os.getpid()

    def _descent(self, layout: Layout) -> Descent:
        """The optimizer, which keeps nothing from one call to the next but its memory."""
        from hypha_ray.server.descent import ModelDescent

        key = layout.sha256()
        if key not in self._descents:
            self._descents = {key: ModelDescent(self._job, layout)}
        return self._descents[key]

    def _room(self, layout: Layout, fragment: int) -> State:
        """Arrays of the last call: Ray has copied them into its store before the next call begins."""
        from hypha_ray.server.reducer import blank

        key = f"{layout.sha256()}-{fragment}"
        if key not in self._out:
            self._out = {key: blank(layout, fragment, self._job.outer_optimizer.name)}
        return self._out[key]
