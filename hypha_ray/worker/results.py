"""What an external trainer has done: its messages as the events of a worker."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.bridge.tensors import read
from hypha_ray.codec import Encoder, encoded, payload_bytes
from hypha_ray.errors import BridgeError
from hypha_ray.groups import dtype_of
from hypha_ray.store.tensorfile import flattened
from hypha_ray.types import Delta, Evaluated, Event, Flat, Layout, Merged, Plan, Report, Source, window

FOLDER = "updates/"
"""Where a trainer's files are."""
SLACK_BYTES = 1 << 20
"""Room for the header of a file, beside its tensors."""


@dataclass(slots=True)
class Progress:
    """A round, as the trainer was told of it, and as it has told of it."""

    number: int = -1
    began: float = 0.0
    plan: Plan | None = None
    """The longest one; a shorter one may have come after it."""
    reported: int = 0
    """Samples in reports."""
    scored: int = 0
    """Scored positions in reports; samples, where a trainer doesn't count them."""
    seconds: float = 0.0
    """From the first batch to the last one that was reported, as it was reported."""
    waited_s: float = 0.0
    """Of these, for data."""
    theta: Sequence[Flat] = ()

    def check(self, samples: int) -> None:
        """Refuse more samples than were assigned."""
        most = 0 if self.plan is None else self.plan.samples
        if samples > most:
            raise BridgeError("MSG005", f"samples of round {self.number}", got=str(samples), allowed=f"up to {most}")


class Results:
    """Makes events of messages. One thread begins rounds, another one hears of them.

    Args:
        source: who the worker is.
        directory: where the trainer's files are.
        encoders: what payloads are encoded by, one for each fragment.

    """

    def __init__(self, source: Source, directory: WorkDirectory, encoders: Sequence[Encoder]) -> None:
        self._source, self._directory, self._encoders = source, directory, encoders
        self.layout: Layout | None = None
        """Where the tensors lie; nothing is taken before that is known."""
        self.theta_sha256: str | None = None
        """Hash of the first weights, until the trainer has them."""
        self._round = Progress()

    def begin(self, number: int, theta: Sequence[Flat] = ()) -> None:
        """A round begins; with these weights, if payloads are to be made of the difference to them."""
        self._round = Progress(number, time.monotonic(), theta=theta)

    def assigned(self, plan: Plan) -> None:
        """The trainer is about to be told of a plan."""
        self._round.plan = max(self._round.plan or plan, plan, key=lambda one: one.samples)

    def admit(self, path: str, size: int) -> None:
        """Refuse a file that is no update, or larger than the model.

        Raises:
            BridgeError: PATH009.

        """
        if not path.startswith(FOLDER):
            raise BridgeError("PATH009", f"{path} isn't welcome", allowed=f"a file in {FOLDER}")
        limit = 0 if self.layout is None else int(self.layout.bytes() * 1.01) + SLACK_BYTES
        if size > limit:
            raise BridgeError("PATH009", f"{path} is too large", got=f"{size} bytes", allowed=f"up to {limit}")

    def of(self, content: str, message: Any) -> Iterator[Event | Flat]:
        """The events that a message stands for; a delta is followed by its payloads.

        Raises:
            BridgeError: MSG005 more samples than were assigned, PATH… or DLT… the update can't be taken.

        """
        match content:
            case "merged":
                yield Merged(self._source, message.round, message.seconds, self.theta_sha256)
                self.theta_sha256 = None
            case "metrics":
                yield self._report(message)
            case "evaluation":
                correct = message.correct if message.HasField("correct") else None
                seconds = time.monotonic() - self._round.began
                yield Evaluated(self._source, message.round, message.loss_sum, message.count, correct, seconds)
            case "update" if message.round == self._round.number:
                yield from self._delta(message, self._round)

    def _report(self, message: pb.MetricSet) -> Report:
        items, samples, first = message.items, message.data_processed, 0
        if message.local_round == self._round.number:
            first = int(self._round.reported == 0)
            self._round.reported += samples
            self._round.check(self._round.reported)
            self._round.seconds += items.get("seconds", 0.0)
            self._round.waited_s += items.get("data_wait_s", 0.0)
            self._round.scored += int(items.get("scored", samples))
        batches, scored = max(1, int(items.get("batches", 1))), int(items.get("scored", samples))
        timed = batches - first  # The first batch of a round is slower than the others.
        return Report(
            source=self._source,
            round=message.local_round,
            batches=batches,
            samples=samples,
            tokens=int(items["tokens"]) if "tokens" in items else None,
            scored=scored,
            loss_sum=items.get("loss", 0.0) * scored,
            seconds=items.get("seconds", 0.0) * timed / batches,
            timed_batches=timed,
            data_wait_s=items.get("data_wait_s", 0.0),
            learning_rate=items.get("learning_rate", 0.0),
            gradient_norm=items.get("gradient_norm"),
        )

    def _delta(self, message: pb.Update, done: Progress) -> Iterator[Event | Flat]:
        done.check(message.samples)
        assert done.plan is not None and self.layout is not None
        tensors = self._read(message.update.model_path, message.content, self.layout)
        payloads, quality = encoded(self._encoders, flattened(self.layout, tensors), done.theta)
        yield Delta(
            source=self._source,
            round=done.number,
            spans=window(done.plan.spans, 0, message.samples),
            samples=message.samples,
            tokens=message.tokens or None,
            scored=done.scored,
            batches=message.batches,
            loss=message.loss,
            fragments=len(payloads),
            payload_bytes=sum(payload_bytes(payload) for payload in payloads),
            train_s=done.seconds or time.monotonic() - done.began,
            data_wait_s=done.waited_s,
            quality=(quality.error, quality.cosine),
        )
        yield from payloads

    def _read(self, path: str, content: pb.Content, layout: Layout) -> dict[str, Any]:
        """The tensors of an update, from a copy that nobody else changes."""
        self.admit(path, content.size)
        expected = {entry.name: (dtype_of(entry.group), entry.shape) for entry in layout.entries}
        with tempfile.TemporaryDirectory(prefix="hypha-spool-") as folder:
            copy = Path(folder, "update")
            self._directory.copy(path, content, copy)
            self._directory.path.joinpath(path).unlink(missing_ok=True)
            return read(copy, expected)
