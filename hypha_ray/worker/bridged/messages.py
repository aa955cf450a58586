"""Messages of the bridge as a worker uses them: weights and samples to the trainer, events from its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.bridge.programs import SPOOL, private_folder
from hypha_ray.bridge.tensors import read
from hypha_ray.bridge.transport.channel import Channel
from hypha_ray.codec import Encoder, encoded, payload_bytes
from hypha_ray.errors import BridgeError
from hypha_ray.store.tensorfile import chunks, flattened
from hypha_ray.types import (
    Delta,
    Evaluated,
    Event,
    Flat,
    Layout,
    Merged,
    Plan,
    Report,
    Source,
    Span,
    Sums,
    WeightsVersion,
    window,
)
from hypha_ray.types.layout import dtype_of
from hypha_ray.worker.bridged.round_report import UNKNOWN, Bounds, Contents, Told, contents_of
from hypha_ray.worker.inbox import BatchSource


class Outbound:
    """Writes files, sends them to a trainer that doesn't have the directory, and removes them when they are old.

    Args:
        channel: to the trainer.
        directory: the work directory.
        batch_source: where samples come from.

    """

    def __init__(self, channel: Channel, directory: WorkDirectory, batch_source: BatchSource) -> None:
        self._channel = channel
        self._directory = directory
        self._batch_source = batch_source
        self._files: list[tuple[int, str]] = []
        """With the rounds that they are for."""
        self._slices: dict[tuple[Span, bool], pb.Slice] = {}
        """Files given in this round, by span and whether it is shuffled."""
        self.contents = Contents()
        """Largest contents of a sample: tokens and scored positions."""

    def job(self, path: str) -> None:
        """Send the job's definition, which is a file in the work directory."""
        if not self._channel.shares_files:
            self._channel.send_file(path)
        self._channel.say("job", pb.JobDefinition(path=path, content=self._directory.content(path)))

    def parameters(self, number: int, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin a round with these weights; removes the files of the round before the last."""
        for old, path in self._files:
            if old < number - 1:
                self._directory.unlink(path)
        self._files = [(old, path) for old, path in self._files if old >= number - 1]
        self._slices.clear()
        path = f"parameters/round_{number:06d}.safetensors"
        content = self._give(number, path, weights)
        update = pb.WeightUpdate(model_path=path)
        self._channel.say("parameters", pb.Parameters(round=number, update=update, content=content))

    def assignment(self, plan: Plan, rates: tuple[float, float], gradient: bool = False) -> pb.Assignment:
        """Return the assignment of a plan, with its samples as files; waits for the samples.

        Args:
            plan: plan of this round, or its correction.
            rates: learning rate of the first and of the last sample.
            gradient: whether to return the mean gradient instead of new weights.

        """
        return pb.Assignment(
            round=plan.round,
            version=plan.version,
            batch_size=plan.batch_size,
            train=[self._slice(plan.round, span, shuffled=True) for span in plan.spans],
            evaluate=[self._slice(plan.round, span, shuffled=False) for span in plan.evaluate],
            gradient=gradient,
            learning_rate=rates[0],
            last_learning_rate=rates[1],
        )

    def _slice(self, number: int, span: Span, shuffled: bool) -> pb.Slice:
        """File with the samples of a span; written only once in a round."""
        key = span, shuffled
        if key not in self._slices:
            kind = "train" if shuffled else "evaluate"
            path = f"slices/{kind}_{number}_{span.epoch}_{span.slice}_{span.start}_{span.stop}.safetensors"
            samples = self._batch_source.batch((span,), 0, span.samples, shuffled)
            self.contents = self.contents.joined(contents_of(samples.arrays))
            indices = " ".join(map(str, samples.keys[:, 2].tolist()))
            notes = {"epoch": str(span.epoch), "slice": str(span.slice), "indices": indices}
            content = self._give(number, path, samples.arrays, notes)
            self._slices[key] = pb.Slice(path=path, samples=span.samples, content=content)
        return self._slices[key]

    def _give(
        self, number: int, path: str, arrays: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str] | None = None
    ) -> pb.Content:
        content = self._directory.write(path, chunks(arrays, notes))
        if self._channel.shares_files:
            self._files.append((number, path))
        else:
            self._channel.send_file(path)
            self._directory.unlink(path)
        return content


FOLDER = "updates/"
"""Folder of a trainer's files."""
SLACK_BYTES = 1 << 20
"""Room for the header of a file, beside its tensors."""
MAX_FILES = 8
"""Files of a trainer in a round: of them one is wanted, and the newest one is kept."""

ABOUT_A_ROUND = frozenset({"merged", "metrics", "evaluation", "update"})
"""Kinds of messages about a round."""


class Inbound:
    """Makes events of messages. One thread begins rounds, another one hears of them.

    Args:
        source: number and incarnation of the worker.
        directory: where the trainer's files are.
        encoders: what payloads are encoded by, one for each fragment.
        now: a monotonic clock, in seconds.
        figures: bounds of the figures of an evaluation by reinforcement learning; None: it is by the loss.

    """

    def __init__(
        self,
        source: Source,
        directory: WorkDirectory,
        encoders: Sequence[Encoder],
        now: Callable[[], float] = time.monotonic,
        figures: Mapping[str, Bounds] | None = None,
    ) -> None:
        self._figures = figures
        self._source = source
        self._directory = directory
        self._encoders = encoders
        self._now = now
        self.layout: Layout | None = None
        """Layout of the tensors; nothing is accepted before it is known."""
        self.proven = False
        """Whether the trainer has shown which weights it began with."""
        self._round: Told | None = None
        """Present round; None before the first."""
        self._files = 0
        """That the trainer has sent in this round."""
        self._newest: str | None = None
        """The last of them, until it is read."""

    def begin(self, number: int, theta: Sequence[Flat] = (), theta_sha256: str | None = None) -> None:
        """A round begins.

        Args:
            number: of the round.
            theta: the weights, if payloads are to be made of the difference to them.
            theta_sha256: hash of them, if the trainer's first merge is to prove that it has them.

        """
        self._round = Told(number, self._now, theta, theta_sha256, self._now())
        self._files = 0

    def assigned(self, plan: Plan, contents: Contents = UNKNOWN) -> None:
        """The trainer is about to be told of a plan; no sample of it has more contents than these."""
        assert self._round is not None
        self._round.assign(plan, contents)

    def admit(self, path: str, size: int) -> None:
        """Refuse a file that is no update, is larger than the model, or comes after too many; the one before it goes.

        Raises:
            BridgeError: PATH009.

        """
        self._check_file(path, size)
        if self._files >= MAX_FILES:
            raise BridgeError("PATH009", f"{path} is one too many", allowed=f"{MAX_FILES} files in a round")
        self._files += 1
        self._forget()
        self._newest = path

    def of(self, content: str, message: Any) -> Iterator[Event | Flat]:
        """The events that a message stands for; a delta is followed by its payloads.

        A message about an earlier round is too late, and one that comes twice says nothing new: they are passed over.

        Raises:
            BridgeError: MSG005 a figure can't be, by what was assigned and by our clock; PATH… or DLT… the update
                can't be taken.

        """
        if content not in ABOUT_A_ROUND:
            return
        if (told := self._round) is None:
            raise BridgeError("MSG005", f"{content} before the first round")
        match content:
            case "merged" if told.current("merge", message.round) and not told.merged:
                told.merge(message)
                self.proven = True
                yield Merged(self._source, WeightsVersion(message.round), told.theta_sha256)
            case "metrics" if told.current("metrics", message.local_round) and message.data_processed:
                yield self._report(message, told)
            case "evaluation" if told.current("evaluation", message.round) and not told.evaluated:
                told.evaluate(message, self._figures)
                yield Evaluated(self._source, message.round, self._sums(message), self._now() - told.began)
            case "update" if told.current("update", message.round) and not told.handed_over:
                yield from self._delta(message, told)
            case "update":
                self._forget()
                if message.update.model_path.startswith(FOLDER):
                    self._directory.unlink(message.update.model_path)

    def _report(self, message: pb.MetricSet, told: Told) -> Report:
        items = message.items
        samples = message.data_processed
        first = int(told.samples == 0)
        tokens = told.tokens(items.get("tokens"), samples)
        batches, scored = told.report(samples, items)
        timed = batches - first if "seconds" in items else 0  # The first batch of a round is slower than the others.
        return Report(
            source=self._source,
            round=message.local_round,
            batches=batches,
            samples=samples,
            tokens=tokens,
            scored=scored if "loss" in items else 0,
            loss_sum=items.get("loss", 0.0) * scored,
            seconds=items.get("seconds", 0.0) * timed / batches,
            timed_batches=timed,
            data_wait_s=items.get("data_wait_s", 0.0),
            learning_rate=items.get("learning_rate", 0.0),
            gradient_norm=items.get("gradient_norm"),
        )

    def _delta(self, message: pb.Update, told: Told) -> Iterator[Event | Flat]:
        tokens = told.tokens(message.tokens or None, message.samples)
        told.hand_over(message)
        assert told.plan is not None and self.layout is not None
        train_s = told.train_s
        data_wait_s = told.data_wait_s
        tensors = self._read(message.update.model_path, message.content, self.layout)
        payloads, quality = encoded(self._encoders, flattened(self.layout, tensors), told.theta)
        yield Delta(
            source=self._source,
            round=told.number,
            spans=window(told.plan.spans, 0, message.samples),
            samples=message.samples,
            tokens=tokens,
            scored=told.scored,
            batches=message.batches,
            loss=message.loss,
            fragments=len(payloads),
            payload_bytes=sum(payload_bytes(payload) for payload in payloads),
            train_s=train_s,
            data_wait_s=data_wait_s,
            quality=(quality.error, quality.cosine),
        )
        yield from payloads

    def _read(self, path: str, content: pb.Content, layout: Layout) -> dict[str, Any]:
        """The tensors of an update, from a copy that no other process changes."""
        self._check_file(path, content.size)
        expected = {entry.name: (dtype_of(entry.group), entry.shape) for entry in layout.entries}
        with private_folder(SPOOL) as folder:
            copy = folder / "update"
            self._directory.copy(path, content, copy)
            self._directory.unlink(path)
            self._forget()
            return read(copy, expected)

    def _check_file(self, path: str, size: int) -> None:
        if not path.startswith(FOLDER):
            raise BridgeError("PATH009", f"{path} isn't welcome", allowed=f"a file in {FOLDER}")
        limit = 0 if self.layout is None else int(self.layout.bytes() * 1.01) + SLACK_BYTES
        if size > limit:
            raise BridgeError("PATH009", f"{path} is too large", got=f"{size} bytes", allowed=f"up to {limit}")

    def _sums(self, message: pb.Evaluation) -> Sums:
        """Figures of a trainer's evaluation."""
        if self._figures is not None:
            given = message.figures
            return {name: (given[name].total, given[name].weight) for name in self._figures if name in given}
        count = float(message.count)
        sums = {"val_loss": (message.loss_sum, count)}
        return sums | {"accuracy": (float(message.correct), count)} if message.HasField("correct") else sums

    def _forget(self) -> None:
        """Remove the file that the trainer has sent last."""
        path = self._newest
        self._newest = None
        if path is not None:
            self._directory.unlink(path)
