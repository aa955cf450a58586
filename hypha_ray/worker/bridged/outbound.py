"""Weights and samples for an external trainer, as files of its work directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.paths import WorkDirectory
from hypha_ray.bridge.transport.channel import Channel
from hypha_ray.store.tensorfile import chunks
from hypha_ray.types import Plan, Span
from hypha_ray.worker.batches import BatchSource
from hypha_ray.worker.bridged.told import Contents, contents_of


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
