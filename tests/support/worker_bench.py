"""One inner loop without Ray: orders are put on its inbox, events are read from a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hypha_ray.config import Job
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.types import Flat, FragmentUpdate, Plan, Source, Span
from hypha_ray.types.events import HandOver
from hypha_ray.worker.incarnation import BatchSource, Closed, Inbox, Retired
from hypha_ray.worker.loop import TrainingLoop

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 50,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SOURCE = Source("test", 0, 0)


def plan_of(samples: int, batch: int = 8, version: int = 0, evaluate: int = 0, number: int = 0) -> Plan:
    spans = (Span(0, 0, 0, samples),) if samples else ()
    share = (Span(0, 0, 0, evaluate),) if evaluate else ()
    return Plan(number, version, spans, batch, share, frozenset({0}))


class TalkativeJob(Job):
    """A job whose worker reports after every batch, more often than a job file can ask for."""

    @property
    def report_interval_s(self) -> float:
        return 1e-12


class Bench:
    """One worker, its orders and what it says. It is stopped once it has handed over as often as it should."""

    def __init__(self, **tables: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        tables = {"inner_optimizer": {"learning_rate": 1e-2}, **tables}
        self.job: Job = TalkativeJob.model_validate(
            {"model": {"config": CONFIG}, "resources": {"num_workers": 1}, **tables}
        )
        self.batch_source, self.inbox = BatchSource(0), Inbox()
        self.said: list[Any] = []
        self.on_event: Callable[[Any], None] = lambda event: None
        self.parts = 1
        """Arrays after which the worker is stopped."""
        model = build_model(self.job.model, 0)
        self.layout = layout_of(model, self.job.sync.fragments)
        self.thetas: list[Flat] = [gather(model, self.layout, part) for part in range(self.layout.fragments)]
        self.theta = self.thetas[0]
        ids = np.random.default_rng(0).integers(0, 50, (64, 16)).astype(np.int32)
        self.slice = {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def run(self, *plans: Plan) -> Bench:
        """Let it work with these plans, the first one's weights and slice 0."""
        self.batch_source.put(0, self.slice)
        for plan in plans:
            self.inbox.assign(plan)
        for fragment, theta in enumerate(self.thetas):
            self.inbox.merge(FragmentUpdate(plans[0].round, fragment, len(self.thetas)), theta)
        return self.work()

    def work(self) -> Bench:
        """Let it work with what is there, or comes."""
        loop = TrainingLoop(self.job, SOURCE, self.batch_source, self.inbox, self._hear)
        try:
            loop.run()
        except Closed:
            self.said.append("closed")
        return self

    def leave(self) -> None:
        self.inbox.close(Retired)
        self.batch_source.close(Retired)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.said if isinstance(event, kind)]

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.said]

    @property
    def weights(self) -> np.ndarray:
        flat: Flat = self.of(dict)[0]
        return flat["parameters/float32"]

    def _hear(self, event: Any) -> None:
        if isinstance(event, HandOver):
            for item in (event.delta, *event.parts):
                self._hear(item)
            return
        if isinstance(event, dict):  # As Ray does: what the stream hands out is a snapshot.
            event = {name: array.copy() for name, array in event.items()}
        self.said.append(event)
        self.on_event(event)
        if len(self.of(dict)) == self.parts:
            self.inbox.close()
            self.batch_source.close()
