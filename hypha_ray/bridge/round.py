"""Rounds of an external trainer, and its connection to the driver: the newest message of each kind is kept."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.paths import WorkDirectory, content_of, parts
from hypha_ray.bridge.transport.channel import Channel
from hypha_ray.errors import BridgeError, HyphaError
from hypha_ray.types import Samples, joined

LAST_WORD_S = 1.0
"""Longest wait in seconds for the last message of a driver that has closed the connection."""


class Line:
    """The connection to the driver: a thread keeps the newest message of each kind.

    Args:
        channel: both sides have greeted each other.
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
        self._listening = threading.Thread(target=self._listen, name="bridge-line", daemon=True)
        self._listening.start()

    def close(self) -> None:
        """Close the connection, and release the directory when nothing more arrives; may be called twice."""
        self._channel.close()
        self._listening.join()
        self._directory.close()

    @property
    def shares_files(self) -> bool:
        """Whether the driver has the same work directory."""
        return self._channel.shares_files

    def say(self, content: str, message: Any = None) -> None:
        """Send a message; if the driver has closed the connection, raise its reason."""
        with self._explained():
            self._channel.say(content, message)

    def send_file(self, path: str) -> None:
        """Send a file of the work directory; raises the same errors as `say`."""
        with self._explained():
            self._channel.send_file(path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
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
            found = condition()
            if not found and self._error is not None:
                raise self._error
            return found

    def next_parameters(self, after: int | None) -> pb.Parameters | None:
        """Wait for the parameters of a round later than `after`, or of any round; None at the end."""
        self.wait(lambda: self.over(after))
        return None if self.ending else self.parameters

    def over(self, round_number: int | None) -> bool:
        """Whether the driver no longer waits for a round's result."""
        return self.ending or self.newer(round_number)

    def newer(self, round_number: int | None) -> bool:
        """Whether the parameters of a later round, or for None of any round, have arrived."""
        return self.parameters is not None and (round_number is None or self.parameters.round > round_number)

    def file(self, path: str, content: pb.Content) -> Path:
        """Path of a complete file of the driver's.

        Raises:
            BridgeError: PATH001 it isn't in the work directory, PATH004 it has another size.

        """
        found = self._directory.path.joinpath(*parts(path))
        size = found.stat().st_size
        if size != content.size:
            raise BridgeError("PATH004", f"{path} has another size", str(size), f"{content.size} bytes")
        return found

    def _listen(self) -> None:
        try:
            while not self.ending or self.leaving:
                content, message = self._channel.hear()
                with self._changed:
                    self._take(content, message)
                    self._changed.notify_all()
        except HyphaError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self, content: str, message: Any) -> None:
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


Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


class Round:
    """One round. It ends early if this trainer has to leave, or if the other workers have gone on without it.

    Args:
        line: connection to the driver.
        directory: directory of the files that are exchanged.
        message: the driver's message with the round's parameters.
        report_every_s: seconds between two sets of metrics.

    """

    def __init__(self, line: Line, directory: WorkDirectory, message: pb.Parameters, report_every_s: float) -> None:
        self._line = line
        self._directory = directory
        self._message = message
        self._report_every_s = report_every_s
        self.number: int = message.round
        self._samples = self._batches = self._tokens = self._scored = 0
        self._loss_sum = 0.0
        self._batch: Arrays = {}
        self.keys = np.empty((0, 3), np.int64)
        """Samples of the last batch, int64 [N, 3]: epoch, slice, and index in the slice's file."""
        self._files: dict[str, Samples] = {}
        self._reported = (0, 0.0, 0, 0, 0, time.monotonic())
        self._waited_s = 0.0

    def parameters(self) -> Arrays:
        """The weights at the start of the round, by name."""
        arrays: Arrays = load_file(self._line.file(self._message.update.model_path, self._message.content))
        return arrays

    def merged(self, seconds: float = 0.0) -> None:
        """Report that the model has the round's weights."""
        self._line.say("merged", pb.Merged(round=self.number, seconds=seconds))

    @property
    def evaluates(self) -> bool:
        """Whether there are samples to evaluate before the training; waits for the assignment."""
        assignment = self._assignment()
        return assignment is not None and bool(assignment.evaluate)

    def evaluation(self) -> Iterator[Arrays]:
        """Batches to evaluate the model on."""
        assignment = self._assignment()
        assert assignment is not None
        for one in assignment.evaluate:
            samples = self._load(one)
            for start in range(0, one.samples, assignment.batch_size):
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
            figures: of reinforcement learning: total and weight of each figure; None for other kinds of training.

        """
        given = {name: pb.Figure(total=total, weight=weight) for name, (total, weight) in (figures or {}).items()}
        message = pb.Evaluation(round=self.number, loss_sum=loss_sum, count=count, correct=correct, figures=given)
        self._line.say("evaluation", message)

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
        part = min(1.0, self._samples / max(1, sum(one.samples for one in assignment.train)))
        return assignment.learning_rate + part * (assignment.last_learning_rate - assignment.learning_rate)

    def batches(self) -> Iterator[Arrays]:
        """Yield the batches to train on."""
        if not self._batches:
            self._reported = (*self._reported[:5], time.monotonic())
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
        size = len(next(iter(self._batch.values())))
        scored = size if scored is None else scored
        self._batches = self._batches + 1
        self._samples = self._samples + size
        self._scored = self._scored + scored
        self._tokens += _tokens(self._batch) if tokens is None else tokens
        self._loss_sum += loss * scored
        if self._batches == 1 or time.monotonic() - self._reported[5] >= self._report_every_s:
            self._report(metrics)

    def hand_over(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Send the round's result: all trained parameters, or their mean gradient if the driver wants it.

        Nothing is sent if nothing was trained, or if the other workers have gone on.
        """
        if not self._samples or self._line.newer(self.number):
            return
        if self._samples > self._reported[0]:
            self._report({})
        path = f"updates/round_{self.number:06d}.safetensors"
        file = self._directory.path / path
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, file)
        content = content_of(file)
        if not self._line.shares_files:
            self._line.send_file(path)
            file.unlink()
        message = pb.Update(
            round=self.number,
            update=pb.WeightUpdate(model_path=path),
            content=content,
            samples=self._samples,
            tokens=self._tokens,
            batches=self._batches,
            loss=self._loss_sum / max(1, self._scored),
        )
        self._line.say("update", message)

    def _assignment(self) -> pb.Assignment | None:
        """Wait for this round's newest assignment; None if the round is over."""
        line = self._line
        line.wait(
            lambda: line.over(self.number) or (line.assignment is not None and line.assignment.round >= self.number)
        )
        assignment = line.assignment
        return assignment if assignment is not None and assignment.round == self.number else None

    def _next_batch(self) -> Samples | None:
        began = time.monotonic()
        while (assignment := self._assignment()) is not None and not self._line.over(self.number):
            samples = sum(one.samples for one in assignment.train)
            if self._samples < samples:
                batch = self._cut(assignment.train, min(assignment.batch_size, samples - self._samples))
                self._waited_s += time.monotonic() - began
                return batch
            if samples:
                break
            self._await_another(assignment)
        return None

    def _await_another(self, idle: pb.Assignment) -> None:
        self._line.wait(lambda: self._line.over(self.number) or self._line.assignment is not idle)

    def _cut(self, slices: Sequence[pb.Slice], size: int) -> Samples:
        """Read the next `size` samples of this round."""
        found: list[Samples] = []
        start = self._samples
        stop = self._samples + size
        for one in slices:
            first = max(start, 0)
            last = min(stop, one.samples)
            if first < last:
                found.append(self._load(one).part(slice(first, last)))
            start = start - one.samples
            stop = stop - one.samples
        return joined(found)

    def _load(self, one: pb.Slice) -> Samples:
        if one.path not in self._files:
            with safe_open(self._line.file(one.path, one.content), "numpy") as file:
                names = list(file.keys())
                notes = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in names}
            keys = np.zeros((one.samples, 3), np.int64)
            keys[:, 0], keys[:, 1] = int(notes.get("epoch", 0)), int(notes.get("slice", 0))
            keys[:, 2] = notes["indices"].split() if "indices" in notes else np.arange(one.samples)
            self._files[one.path] = Samples(arrays, keys)
        return self._files[one.path]

    def _report(self, metrics: Mapping[str, float]) -> None:
        """Send the figures since the last report."""
        samples, loss_sum, batches, tokens, scored, at = self._reported
        now = time.monotonic()
        items = {
            "loss": (self._loss_sum - loss_sum) / max(1, self._scored - scored),
            "batches": self._batches - batches,
            "scored": self._scored - scored,
            **({"tokens": self._tokens - tokens} if self._tokens else {}),
            "seconds": now - at,
            "data_wait_s": self._waited_s,
            "learning_rate": self.learning_rate,
            **metrics,
        }
        self._reported = self._samples, self._loss_sum, self._batches, self._tokens, self._scored, now
        self._waited_s = 0.0
        message = pb.MetricSet(items=items, data_processed=self._samples - samples, local_round=self.number)
        self._line.say("metrics", message)


def _tokens(batch: Arrays) -> int:
    """Number of tokens that aren't padding; 0 for data without tokens."""
    if "input_ids" not in batch:
        return 0
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].size
