"""Messages of the bridge as a worker uses them: weights and samples to the trainer, events from its answers.

Tensors of the other side are exactly the expected set, or the error names the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.channel import Channel
from hypha_ray.bridge.paths import SPOOL, WorkDirectory, private_folder
from hypha_ray.codec import Encoder, encoded, payload_bytes
from hypha_ray.errors import BridgeError
from hypha_ray.store.snapshots import chunks, flattened
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
from hypha_ray.types.data import dtype_of
from hypha_ray.types.events import HandOver
from hypha_ray.worker.bridged.round_report import UNLIMITED, FigureBounds, RoundReport, SampleLimits, limits_of
from hypha_ray.worker.incarnation import BatchSource

Array: TypeAlias = npt.NDArray[Any]

MAX_HEADER_BYTES = 8 << 20
_HEADER_BYTES = 512
"""Bytes of the header for one tensor, without its name."""
FOLDER = "updates/"
"""Folder of a trainer's files."""
HEADER_BYTES = 1 << 20
"""Most bytes of a file's header, beside its tensors."""
MAX_FILES = 8
"""Most files that a trainer may send in a round, of which only the newest one is kept."""
ROUND_MESSAGES = frozenset({"merged", "metrics", "evaluation", "update"})
"""Kinds of messages about a round."""


def read(path: Path, expected_forms: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
    """Read a private safetensors file, which no other process may change meanwhile.

    Args:
        path: the file.
        expected_forms: numpy's name of the dtype, and the shape, of every tensor; no other tensors are allowed.

    Raises:
        BridgeError: DLT001 not a safetensors file, DLT002 other tensors, DLT003 another shape, DLT004 another dtype.

    """
    header_bytes = sum(_HEADER_BYTES + len(name) for name in expected_forms)
    _check_header(path, header_bytes)
    try:
        with safe_open(path, framework="numpy") as file:
            _check_names(set(file.keys()), set(expected_forms))
            for name, (_, shape) in expected_forms.items():
                tensor = file.get_slice(name)
                file_shape = tuple(tensor.get_shape())
                if file_shape != shape:
                    raise BridgeError("DLT003", f"{name} has another shape", got=str(file_shape), allowed=str(shape))
            tensors = {name: file.get_tensor(name) for name in expected_forms}
    except SafetensorError as error:
        raise BridgeError("DLT001", "not a safetensors file", got=str(error)[:100]) from None
    except (TypeError, AttributeError, KeyError) as error:  # A dtype that numpy doesn't have.
        raise BridgeError("DLT004", "an unexpected dtype", got=str(error)[:100]) from None
    for name, (dtype, _) in expected_forms.items():
        if tensors[name].dtype.name != dtype:
            raise BridgeError("DLT004", f"{name} has another dtype", got=tensors[name].dtype.name, allowed=dtype)
    return tensors


def _check_header(path: Path, expected_bytes: int) -> None:
    """Check the length of the header before parsing it."""
    limit = min(MAX_HEADER_BYTES, 4 * expected_bytes + 1024)
    with path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or length > limit:
        raise BridgeError("DLT001", "not a safetensors file", got=repr(start), allowed=f"a header of {limit} bytes")


def _check_names(names: set[str], expected_names: set[str]) -> None:
    for wrong_names, problem in ((expected_names - names, "is missing"), (names - expected_names, "is unexpected")):
        if wrong_names:
            first_name = min(wrong_names)[:80]
            raise BridgeError("DLT002", f"a tensor {problem}", got=f"{first_name!r} and {len(wrong_names) - 1} more")


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
        self._written_files: list[tuple[int, str]] = []
        """Written files, each with the number of its round."""
        self._slices: dict[tuple[Span, bool], pb.Slice] = {}
        """Files of this round's samples, by span and whether it is shuffled."""
        self.sample_limits = SampleLimits()
        """Limits for each sample that was sent."""

    def job(self, path: str) -> None:
        """Send the job's definition, which is a file in the work directory."""
        if not self._channel.shares_files:
            self._channel.send_file(path)
        content = self._directory.content(path)
        self._channel.send("job", pb.JobDefinition(path=path, content=content))

    def parameters(self, round_number: int, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin a round with these weights; removes the files of the round before the last."""
        files: list[tuple[int, str]] = []
        for file_round, path in self._written_files:
            if file_round < round_number - 1:
                self._directory.unlink(path)
            else:
                files.append((file_round, path))
        self._written_files = files
        self._slices.clear()
        path = f"parameters/round_{round_number:06d}.safetensors"
        content = self._write_file(round_number, path, weights)
        update = pb.WeightUpdate(model_path=path)
        self._channel.send("parameters", pb.Parameters(round=round_number, update=update, content=content))

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
            train=[self._slice_message(plan.round, span, shuffled=True) for span in plan.spans],
            evaluate=[self._slice_message(plan.round, span, shuffled=False) for span in plan.evaluate],
            gradient=gradient,
            learning_rate=rates[0],
            last_learning_rate=rates[1],
        )

    def _slice_message(self, round_number: int, span: Span, shuffled: bool) -> pb.Slice:
        """Message about the file with a span's samples, which is written only once in a round."""
        key = span, shuffled
        if key in self._slices:
            return self._slices[key]
        purpose = "train" if shuffled else "evaluate"
        path = f"slices/{purpose}_{round_number}_{span.epoch}_{span.slice}_{span.start}_{span.stop}.safetensors"
        samples = self._batch_source.batch((span,), 0, span.samples, shuffled)
        self.sample_limits = self.sample_limits.combined(limits_of(samples.arrays))
        indices = samples.keys[:, 2].tolist()
        notes = {
            "epoch": str(span.epoch),
            "slice": str(span.slice),
            "indices": " ".join(map(str, indices)),
        }
        content = self._write_file(round_number, path, samples.arrays, notes)
        self._slices[key] = pb.Slice(path=path, samples=span.samples, content=content)
        return self._slices[key]

    def _write_file(
        self,
        round_number: int,
        path: str,
        arrays: Mapping[str, npt.NDArray[Any]],
        notes: Mapping[str, str] | None = None,
    ) -> pb.Content:
        content = self._directory.write(path, chunks(arrays, notes))
        if self._channel.shares_files:
            self._written_files.append((round_number, path))
        else:
            self._channel.send_file(path)
            self._directory.unlink(path)
        return content


class Inbound:
    """Turns a trainer's messages into events. One thread begins rounds, another one receives messages about them.

    Args:
        source: number and incarnation of the worker.
        directory: work directory, in which the trainer's files are.
        encoders: encoders of payloads, one for each fragment.
        now: a monotonic clock, in seconds.
        figures: bounds of an evaluation's figures in reinforcement learning; None: it is evaluated by the loss.
        is_last: function that returns whether a round is the run's last.

    """

    def __init__(
        self,
        source: Source,
        directory: WorkDirectory,
        encoders: Sequence[Encoder],
        now: Callable[[], float] = time.monotonic,
        figures: Mapping[str, FigureBounds] | None = None,
        is_last: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._figures = figures
        self._source = source
        self._directory = directory
        self._encoders = encoders
        self._now = now
        self._is_last = is_last
        self.layout: Layout | None = None
        """Layout of the tensors; nothing is accepted before it is known."""
        self.proven = False
        """Whether the trainer has shown which weights it began with."""
        self._round: RoundReport | None = None
        """Present round; None before the first."""
        self._file_count = 0
        """Number of files that the trainer has sent in this round."""
        self._pending_file: str | None = None
        """Path of the newest file; None if there is none that wasn't read."""

    def begin(self, round_number: int, theta: Sequence[Flat] = (), theta_sha256: str | None = None) -> None:
        """Begin a round.

        Args:
            round_number: number of the round.
            theta: the weights by fragment, if payloads are encoded as differences to them.
            theta_sha256: hash of the weights, if the trainer's first merge has to prove that it has them.

        """
        self._round = RoundReport(round_number, self._now, theta, theta_sha256, self._now())
        self._file_count = 0

    def assigned(self, plan: Plan, sample_limits: SampleLimits = UNLIMITED) -> None:
        """Record that a plan is about to be sent, whose samples have these limits."""
        assert self._round is not None
        self._round.assign(plan, sample_limits)

    def admit(self, path: str, size_bytes: int) -> None:
        """Check an update file: its folder, size, and the number of files. Deletes the previous file.

        Raises:
            BridgeError: PATH009.

        """
        self._check_file(path, size_bytes)
        if self._file_count >= MAX_FILES:
            raise BridgeError("PATH009", f"{path} is one too many", allowed=f"{MAX_FILES} files in a round")
        self._file_count += 1
        self._delete_pending_file()
        self._pending_file = path

    def events_of(self, content: str, message: Any) -> Iterator[Event | HandOver]:
        """Yield the events of a message, or the result that it hands over.

        Messages about an earlier round come too late, and repeated ones have nothing new: both are ignored.

        Raises:
            BridgeError: MSG005 a figure is impossible, by the assigned work or by our clock; PATH… or DLT… the update
                can't be read.

        """
        if content not in ROUND_MESSAGES:
            return
        report = self._round
        if report is None:
            raise BridgeError("MSG005", f"{content} before the first round")
        match content:
            case "merged" if report.is_current("merge", message.round) and not report.merged:
                report.merge(message)
                self.proven = True
                yield Merged(self._source, WeightsVersion(message.round), report.theta_sha256)
            case "metrics" if report.is_current("metrics", message.local_round) and message.data_processed:
                yield self._report(message, report)
            case "evaluation" if report.is_current("evaluation", message.round) and not report.evaluated:
                report.evaluate(message, self._figures)
                seconds = self._now() - report.began
                yield Evaluated(self._source, message.round, self._sums(message), seconds)
            case "update" if report.is_current("update", message.round) and not report.handed_over:
                yield self._hand_over(message, report)
            case "update":
                self._delete_pending_file()
                if message.update.model_path.startswith(FOLDER):
                    self._directory.unlink(message.update.model_path)

    def _report(self, message: pb.MetricSet, report: RoundReport) -> Report:
        items = message.items
        samples = message.data_processed
        is_first = report.samples == 0
        tokens = report.tokens(items.get("tokens"), samples)
        batches, scored = report.report(samples, items)
        timed_batches = 0
        if "seconds" in items:
            timed_batches = batches - int(is_first)  # The first batch of a round is slower than the others.
        return Report(
            source=self._source,
            round=message.local_round,
            batches=batches,
            samples=samples,
            tokens=tokens,
            scored=scored if "loss" in items else 0,
            loss_sum=items.get("loss", 0.0) * scored,
            seconds=items.get("seconds", 0.0) * timed_batches / batches,
            timed_batches=timed_batches,
            data_wait_s=items.get("data_wait_s", 0.0),
            learning_rate=items.get("learning_rate", 0.0),
            gradient_norm=items.get("gradient_norm"),
        )

    def _hand_over(self, message: pb.Update, report: RoundReport) -> HandOver:
        tokens = report.tokens(message.tokens or None, message.samples)
        report.hand_over(message)
        assert report.plan is not None and self.layout is not None
        train_s = report.train_s
        data_wait_s = report.data_wait_s
        tensors = self._read(message.update.model_path, message.content, self.layout)
        values = flattened(self.layout, tensors)
        payloads, quality = encoded(self._encoders, values, report.theta, self._is_last(report.number))
        delta = Delta(
            source=self._source,
            round=report.number,
            spans=window(report.plan.spans, 0, message.samples),
            samples=message.samples,
            tokens=tokens,
            scored=report.scored,
            batches=message.batches,
            loss=message.loss,
            fragments=len(payloads),
            payload_bytes=sum(payload_bytes(payload) for payload in payloads),
            train_s=train_s,
            data_wait_s=data_wait_s,
            quality=(quality.error, quality.cosine),
        )
        return HandOver(delta, payloads)

    def _read(self, path: str, content: pb.Content, layout: Layout) -> dict[str, Any]:
        """Read the tensors of an update, from a copy that no other process changes."""
        self._check_file(path, content.size)
        expected_forms = {entry.name: (dtype_of(entry.group), entry.shape) for entry in layout.entries}
        with private_folder(SPOOL) as folder:
            copy = folder / "update"
            self._directory.copy(path, content, copy)
            self._directory.unlink(path)
            self._delete_pending_file()
            return read(copy, expected_forms)

    def _check_file(self, path: str, size_bytes: int) -> None:
        if not path.startswith(FOLDER):
            raise BridgeError("PATH009", f"{path} isn't welcome", allowed=f"a file in {FOLDER}")
        limit = 0
        if self.layout is not None:
            limit = int(self.layout.bytes() * 1.01) + HEADER_BYTES
        if size_bytes > limit:
            raise BridgeError("PATH009", f"{path} is too large", got=f"{size_bytes} bytes", allowed=f"up to {limit}")

    def _sums(self, message: pb.Evaluation) -> Sums:
        """Figures of a trainer's evaluation."""
        sums: dict[str, tuple[float, float]] = {}
        if self._figures is not None:
            for name in self._figures:
                if name in message.figures:
                    figure = message.figures[name]
                    sums[name] = (figure.total, figure.weight)
            return sums
        count = float(message.count)
        sums["val_loss"] = (message.loss_sum, count)
        if message.HasField("correct"):
            sums["accuracy"] = (float(message.correct), count)
        return sums

    def _delete_pending_file(self) -> None:
        """Remove the file that the trainer has sent last."""
        path = self._pending_file
        self._pending_file = None
        if path is not None:
            self._directory.unlink(path)
