"""Rounds of an external trainer, and its connection to the driver: the newest message of each kind is kept."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.channel import Channel
from hypha_ray.bridge.paths import WorkDirectory, content_of, split_path
from hypha_ray.errors import BridgeError, HyphaError
from hypha_ray.types import Samples, joined

LAST_WORD_S = 1.0
"""Longest wait in seconds for the last message of a driver that has closed the connection."""
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


class DriverConnection:
    """The connection to the driver: a thread keeps the newest message of each kind.

    Args:
        channel: an authenticated connection.
        directory: directory of the files that are exchanged.

    """

    def __init__(self, channel: Channel, directory: WorkDirectory) -> None:
        self._channel = channel
        self._directory = directory
        self._changed = threading.Condition()
        self.job: pb.JobDefinition | None = None
        self.parameters: pb.Parameters | None = None
        self.assignment: pb.Assignment | None = None
        self.ending = False
        """Whether the training is completed, or this trainer has to leave."""
        self.leaving = False
        self._error: HyphaError | None = None
        self._thread = threading.Thread(target=self._receive, name="bridge-line", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connection, and release the directory when nothing more arrives; may be called twice."""
        self._channel.close()
        self._thread.join()
        self._directory.close()

    @property
    def shares_files(self) -> bool:
        """Whether the driver has the same work directory."""
        return self._channel.shares_files

    def send(self, content: str, message: Any = None) -> None:
        """Send a message; if the driver has closed the connection, raise its reason."""
        with self._explaining_errors():
            self._channel.send(content, message)

    def send_file(self, path: str) -> None:
        """Send a file of the work directory; raises the same errors as `send`."""
        with self._explaining_errors():
            self._channel.send_file(path)

    @contextlib.contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Replace the error of a closed connection by the reason in the driver's last message."""
        try:
            yield
        except BridgeError:
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, LAST_WORD_S)
            if self._error is not None:
                raise self._error from None
            raise

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition on this connection holds; returns its value.

        Raises:
            HyphaError: the connection ended before.

        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None)
            value = condition()
            if not value and self._error is not None:
                raise self._error
            return value

    def next_parameters(self, after: int | None) -> pb.Parameters | None:
        """Wait for the parameters of a round later than `after`, or of any round; None at the end."""
        self.wait(lambda: self.is_over(after))
        return None if self.ending else self.parameters

    def is_over(self, round_number: int | None) -> bool:
        """Whether the driver no longer waits for a round's result."""
        return self.ending or self.has_newer(round_number)

    def has_newer(self, round_number: int | None) -> bool:
        """Whether the parameters of a later round, or for None of any round, have arrived."""
        if self.parameters is None:
            return False
        return round_number is None or self.parameters.round > round_number

    def file(self, path: str, content: pb.Content) -> Path:
        """Path of a complete file of the driver's.

        Raises:
            BridgeError: PATH001 it isn't in the work directory, PATH004 it has another size.

        """
        file = self._directory.path.joinpath(*split_path(path))
        size_bytes = file.stat().st_size
        if size_bytes != content.size:
            raise BridgeError("PATH004", f"{path} has another size", str(size_bytes), f"{content.size} bytes")
        return file

    def _receive(self) -> None:
        try:
            while not self.ending or self.leaving:
                content, message = self._channel.receive()
                with self._changed:
                    self._store_message(content, message)
                    self._changed.notify_all()
        except HyphaError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _store_message(self, content: str, message: Any) -> None:
        match content:
            case "job":
                self.job = message
            case "parameters":
                self.parameters = message
            case "assignment":
                self.assignment = message
            case "leave":
                self.ending = self.leaving = True
            case "done":
                self.ending = True
                self.leaving = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the steps of a round."""

    samples: int = 0
    batches: int = 0
    tokens: int = 0
    scored: int = 0
    loss_sum: float = 0.0


class Round:
    """One round. It ends early if this trainer has to leave, or if the other workers have gone on without it.

    Args:
        line: connection to the driver.
        directory: directory of the files that are exchanged.
        message: the driver's message with the round's parameters.
        report_every_s: seconds between two sets of metrics.

    """

    def __init__(
        self, driver: DriverConnection, directory: WorkDirectory, message: pb.Parameters, report_every_s: float
    ) -> None:
        self._driver = driver
        self._directory = directory
        self._message = message
        self._report_every_s = report_every_s
        self.number: int = message.round
        self._totals = Totals()
        self._batch: Arrays = {}
        self.keys = np.empty((0, 3), np.int64)
        """Samples of the last batch, int64 [N, 3]: epoch, slice, and index in the slice's file."""
        self._files: dict[str, Samples] = {}
        self._reported = Totals()
        """Totals at the last report."""
        self._reported_at = time.monotonic()
        self._waited_s = 0.0

    def parameters(self) -> Arrays:
        """The weights at the start of the round, by name."""
        file = self._driver.file(self._message.update.model_path, self._message.content)
        arrays: Arrays = load_file(file)
        return arrays

    def merged(self, seconds: float = 0.0) -> None:
        """Report that the model has the round's weights."""
        self._driver.send("merged", pb.Merged(round=self.number, seconds=seconds))

    @property
    def evaluates(self) -> bool:
        """Whether there are samples to evaluate before the training; waits for the assignment."""
        assignment = self._assignment()
        return assignment is not None and bool(assignment.evaluate)

    def evaluation(self) -> Iterator[Arrays]:
        """Batches to evaluate the model on."""
        assignment = self._assignment()
        assert assignment is not None
        for slice_message in assignment.evaluate:
            samples = self._load(slice_message)
            for start in range(0, slice_message.samples, assignment.batch_size):
                batch = samples.part(slice(start, start + assignment.batch_size))
                self.keys = batch.keys
                yield batch.arrays

    def evaluated(
        self,
        loss_sum: float,
        count: int,
        correct: int | None = None,
        figures: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Send the result of the evaluation.

        Args:
            loss_sum: sum of losses over all samples or tokens.
            count: number of those samples or tokens.
            correct: number of correct predictions of a classifier; None for other models.
            figures: total and weight of each figure of reinforcement learning; None for other kinds of training.

        """
        figure_messages: dict[str, pb.Figure] = {}
        for name, (total, weight) in (figures or {}).items():
            figure_messages[name] = pb.Figure(total=total, weight=weight)
        message = pb.Evaluation(
            round=self.number, loss_sum=loss_sum, count=count, correct=correct, figures=figure_messages
        )
        self._driver.send("evaluation", message)

    @property
    def gradient(self) -> bool:
        """Whether the driver wants the mean gradient instead of new weights."""
        assignment = self._assignment()
        return assignment is not None and assignment.gradient

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        assignment = self._assignment()
        if assignment is None:
            return 0.0
        progress = min(1.0, self._totals.samples / max(1, _count_samples(assignment)))
        return assignment.learning_rate + progress * (assignment.last_learning_rate - assignment.learning_rate)

    def batches(self) -> Iterator[Arrays]:
        """Yield the batches to train on."""
        if not self._totals.batches:
            self._reported_at = time.monotonic()
        while (batch := self._next_batch()) is not None:
            self._batch = batch.arrays
            self.keys = batch.keys
            yield batch.arrays

    def step(self, loss: float, tokens: int | None = None, scored: int | None = None, **metrics: float) -> None:
        """Record a step on the last batch.

        Args:
            loss: mean over the batch's scored positions.
            tokens: tokens of the batch; default: those of ``input_ids`` without padding, or 0 for data without tokens.
            scored: positions that the loss is a mean over; default: the samples.
            metrics: further figures, such as ``gradient_norm``.

        """
        first_array = next(iter(self._batch.values()))
        samples = len(first_array)
        if scored is None:
            scored = samples
        if tokens is None:
            tokens = _count_tokens(self._batch)
        self._totals = Totals(
            samples=self._totals.samples + samples,
            batches=self._totals.batches + 1,
            tokens=self._totals.tokens + tokens,
            scored=self._totals.scored + scored,
            loss_sum=self._totals.loss_sum + loss * scored,
        )
        is_due = time.monotonic() - self._reported_at >= self._report_every_s
        if self._totals.batches == 1 or is_due:
            self._report(metrics)

    def hand_over(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Send the round's result: all trained parameters, or their mean gradient if the driver wants it.

        Nothing is sent if nothing was trained, or if the other workers have gone on.
        """
        totals = self._totals
        if not totals.samples or self._driver.has_newer(self.number):
            return
        if totals.samples > self._reported.samples:
            self._report({})
        path = f"updates/round_{self.number:06d}.safetensors"
        file = self._directory.path / path
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file)
        content = content_of(file)
        if not self._driver.shares_files:
            self._driver.send_file(path)
            file.unlink()
        message = pb.Update(
            round=self.number,
            update=pb.WeightUpdate(model_path=path),
            content=content,
            samples=totals.samples,
            tokens=totals.tokens,
            batches=totals.batches,
            loss=totals.loss_sum / max(1, totals.scored),
        )
        self._driver.send("update", message)

    def _assignment(self) -> pb.Assignment | None:
        """Wait for this round's newest assignment; None if the round is over."""
        driver = self._driver

        def is_decided() -> bool:
            if driver.is_over(self.number):
                return True
            return driver.assignment is not None and driver.assignment.round >= self.number

        driver.wait(is_decided)
        assignment = driver.assignment
        if assignment is None or assignment.round != self.number:
            return None
        return assignment

    def _next_batch(self) -> Samples | None:
        began_at = time.monotonic()
        while (assignment := self._assignment()) is not None and not self._driver.is_over(self.number):
            samples = _count_samples(assignment)
            samples_left = samples - self._totals.samples
            if samples_left > 0:
                batch = self._read(assignment.train, min(assignment.batch_size, samples_left))
                self._waited_s += time.monotonic() - began_at
                return batch
            if samples:
                break
            self._await_another(assignment)
        return None

    def _await_another(self, idle_assignment: pb.Assignment) -> None:
        driver = self._driver
        driver.wait(lambda: driver.is_over(self.number) or driver.assignment is not idle_assignment)

    def _read(self, slices: Sequence[pb.Slice], batch_samples: int) -> Samples:
        """Read the next `batch_samples` samples of this round."""
        batch: list[Samples] = []
        start = self._totals.samples
        stop = start + batch_samples
        for slice_message in slices:
            first_sample = max(start, 0)
            stop_sample = min(stop, slice_message.samples)
            if first_sample < stop_sample:
                samples = self._load(slice_message)
                batch.append(samples.part(slice(first_sample, stop_sample)))
            start = start - slice_message.samples
            stop = stop - slice_message.samples
        return joined(batch)

    def _load(self, slice_message: pb.Slice) -> Samples:
        path = slice_message.path
        if path in self._files:
            return self._files[path]
        with safe_open(self._driver.file(path, slice_message.content), "numpy") as file:
            names = list(file.keys())
            notes = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in names}
        keys = np.zeros((slice_message.samples, 3), np.int64)
        keys[:, 0] = int(notes.get("epoch", 0))
        keys[:, 1] = int(notes.get("slice", 0))
        if "indices" in notes:
            keys[:, 2] = notes["indices"].split()
        else:
            keys[:, 2] = np.arange(slice_message.samples)
        self._files[path] = Samples(arrays, keys)
        return self._files[path]

    def _report(self, metrics: Mapping[str, float]) -> None:
        """Send the figures since the last report."""
        totals = self._totals
        reported_totals = self._reported
        now = time.monotonic()
        scored = totals.scored - reported_totals.scored
        items = {
            "loss": (totals.loss_sum - reported_totals.loss_sum) / max(1, scored),
            "batches": totals.batches - reported_totals.batches,
            "scored": scored,
            "seconds": now - self._reported_at,
            "data_wait_s": self._waited_s,
            "learning_rate": self.learning_rate,
        }
        if totals.tokens:
            items["tokens"] = totals.tokens - reported_totals.tokens
        items.update(metrics)
        self._reported = totals
        self._reported_at = now
        self._waited_s = 0.0
        samples = totals.samples - reported_totals.samples
        self._driver.send("metrics", pb.MetricSet(items=items, data_processed=samples, local_round=self.number))


def _count_samples(assignment: pb.Assignment) -> int:
    """Number of samples to train on."""
    return sum(slice_message.samples for slice_message in assignment.train)


def _count_tokens(batch: Arrays) -> int:
    """Number of tokens that aren't padding; 0 for data without tokens."""
    if "input_ids" not in batch:
        return 0
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].size
