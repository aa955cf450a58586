"""The loop of a worker whose trainer is outside Ray, which relays messages in both directions. It makes no RPC.

    inbox, samples ──► parameters, samples, assignments ══ bridge ══► trainer
            emit ◄── merged, metrics, evaluation, update ═════════════╛

One thread sends the work, another one receives the results.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.codec import encoders, sends_differences
from hypha_ray.config import Job
from hypha_ray.errors import BridgeError, HyphaError
from hypha_ray.exchange_schedule import is_last_round
from hypha_ray.failpoints import failpoint
from hypha_ray.model.task import SpecialTokens
from hypha_ray.optim.schedules import rates
from hypha_ray.store.snapshots import digest, named
from hypha_ray.types import Left, Plan, Ready, Source
from hypha_ray.worker.bridged.messages import Inbound, Outbound
from hypha_ray.worker.bridged.process import END_S, JOB_FILE, TrainerGone, TrainerProcess
from hypha_ray.worker.bridged.round_report import figure_bounds, with_responses
from hypha_ray.worker.incarnation import BatchSource, Closed, Emit, Inbox, Retired

log = logging.getLogger(__name__)

LEAVE_S = 30.0
"""Longest time for a leaving trainer to hand over its delta."""
_POLL_S = 0.2


class Disconnected(Closed):
    """The trainer or its connection has ended."""


class BridgedLoop:
    """One external trainer.

    Args:
        job: the job file.
        source: number and incarnation of this worker.
        batch_source: where samples come from.
        inbox: where plans and weights come from.
        emit: takes events and payloads; must not block.
        specials: tokens that a masked language model has to know.

    """

    def __init__(
        self,
        job: Job,
        source: Source,
        batch_source: BatchSource,
        inbox: Inbox,
        emit: Emit,
        specials: SpecialTokens | None = None,
    ) -> None:
        self._job = job
        self._source = source
        self._specials = specials
        self._batch_source = batch_source
        self._inbox = inbox
        self._emit = emit
        self._changed = threading.Condition()
        self._messages: dict[str, Any] = {}
        """The newest message of each kind."""
        self._end_reason: Exception | None = None
        """Reason of the trainer's end; None while it is connected."""
        self._told_to_leave = False
        """Whether the trainer was told to leave."""

    def run(self) -> None:
        """Relay until the final plan, or until the worker has left; raises `Closed` when it is stopped before.

        Raises:
            TrainerGone: the trainer has ended, is silent, or has broken the protocol.
            ConfigError: it can't be started.

        """
        process = TrainerProcess(self._job, self._source.worker, self._specials)
        try:
            self._channel = process.connect(self._inbox.check)
            directory = process.work
            self._outbound = Outbound(self._channel, directory, self._batch_source)
            self._inbound = Inbound(
                self._source,
                directory,
                encoders(self._job.sync, self._job.outer_optimizer),
                is_last=partial(is_last_round, self._job),
                figures=figure_bounds(self._job.rl),
            )
            self._channel.attach(directory, self._inbound.admit)
            self._channel.send_signs_of_life()
            listening = threading.Thread(target=self._receive, name="bridge-hearing", daemon=True)
            listening.start()
            try:
                self._relay_or_leave()
                process.end()
                listening.join(END_S)  # The side that hangs up first may drop what the other hasn't read yet.
            finally:
                self._channel.close()
                listening.join()
        except (Disconnected, HyphaError) as error:  # Nothing that a trainer does to its directory may end the run.
            is_closed = isinstance(error, Disconnected) or error.code.startswith("FRM")
            reason: Exception = error
            if is_closed and self._end_reason:  # The receiving thread knows why.
                reason = self._end_reason
            raise TrainerGone(f"the trainer is gone: {reason}") from None
        finally:
            process.close()

    def _relay_or_leave(self) -> None:
        try:
            self._relay_work()
        except Retired:
            self._let_trainer_leave()

    def _relay_work(self) -> None:
        self._outbound.job(JOB_FILE)
        ready = self._await("ready")
        self._inbound.layout = layout = self._inbox.layout()
        self._emit(Ready(self._source, layout.sha256(), ready.device, ready.parameters))
        while self._relay_round():
            pass
        failpoint("worker.before_done", self._source.worker)
        self._channel.send("done")

    def _relay_round(self) -> bool:
        """Send one round's weights and plan, and all corrections of the plan; False after the final plan."""
        version, _, weights = self._inbox.weights()
        layout = self._inbox.layout()
        theta = [weights[fragment] for fragment in range(layout.fragments)]
        tensors = named(layout, theta)
        theta_sha256 = None if self._inbound.proven else digest(tensors)
        reference = theta if sends_differences(self._job.sync) else []
        self._inbound.begin(version, reference, theta_sha256)
        self._outbound.parameters(version, tensors)
        plan: Plan | None = self._inbox.plan(version)
        while plan is not None and plan.round == version:
            learning_rates = rates(self._job, plan)
            sends_gradients = self._job.sync.traits.sends_gradients
            assignment = self._outbound.assignment(plan, learning_rates, sends_gradients)
            self._inbound.assigned(plan, with_responses(self._job.rl, self._outbound.sample_limits))
            self._channel.send("assignment", assignment)
            if plan.final:
                self._await("merged", lambda message: message.round == version)
                if plan.evaluate:
                    self._await("evaluation", lambda message: message.round == version)
                return False
            plan = self._inbox.correction(plan)
        return True

    def _let_trainer_leave(self) -> None:
        """Tell the trainer to leave, and wait until it has handed over its result."""
        self._told_to_leave = True
        self._channel.send("leave", pb.Leave(reason="the machine goes away"))
        deadline = time.monotonic() + LEAVE_S
        with self._changed:
            while "left" not in self._messages:
                if self._end_reason is not None or not self._changed.wait(deadline - time.monotonic()):
                    raise Disconnected
        self._emit(Left(self._source))

    def _receive(self) -> None:
        try:
            while "left" not in self._messages:
                content, message = self._channel.receive()
                if content == "left" and not self._told_to_leave:
                    raise BridgeError("FRM008", "the trainer has left, though it wasn't told to")
                for event in self._inbound.events_of(content, message):
                    self._emit(event)
                with self._changed:
                    self._messages[content] = message
                    self._changed.notify_all()
        except HyphaError as error:
            self._channel.refuse(error)
            self._disconnect(error)
        except Exception as error:
            log.exception("an external trainer can't be understood")
            self._disconnect(error)

    def _disconnect(self, error: Exception) -> None:
        """Interrupt the sending thread, for this reason."""
        with self._changed:
            self._end_reason = error
            self._changed.notify_all()
        self._inbox.close(Disconnected)
        self._batch_source.close(Disconnected)

    def _await(self, content: str, is_expected: Callable[[Any], bool] = lambda _: True) -> Any:
        """Wait for an expected message of a kind, unless this worker is interrupted."""
        with self._changed:
            while (message := self._messages.get(content)) is None or not is_expected(message):
                self._changed.wait(_POLL_S)
                self._inbox.check()
            return message
