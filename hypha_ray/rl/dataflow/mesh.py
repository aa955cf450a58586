"""Workers of a model by their ranks in data, pipeline and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hypha_ray.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Model workers that hold one model together.

    Tensor ranks are next to each other, then data ranks, then pipeline stages, as in Megatron-LM (arXiv:2104.04473).

    Raises:
        ConfigError: RL013 the workers can't be divided so.

    """

    workers: tuple[int, ...]
    """Numbers of the model workers, each once."""
    tensor: int = 1
    """Number of workers that share a layer."""
    pipeline: int = 1
    """Number of stages."""

    def __post_init__(self) -> None:
        one = self.tensor * self.pipeline
        if not self.workers or len(set(self.workers)) != len(self.workers) or len(self.workers) % one:
            fix = f"a multiple of {one} workers, each once"
            raise ConfigError(
                "RL013", "model workers can't be divided into copies of the model", str(self.workers), fix
            )

    @property
    def data(self) -> int:
        """Number of copies of the model, each of which gets another part of a batch."""
        return len(self.workers) // (self.tensor * self.pipeline)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Worker of each copy that holds its inputs and outputs: the last stage, tensor rank 0."""
        last = len(self.workers) - self.data * self.tensor
        return self.workers[last :: self.tensor]

    def copy(self, rank: int) -> tuple[int, ...]:
        """Return the workers of the copy with this data rank."""
        stage = self.data * self.tensor
        starts = range(rank * self.tensor, len(self.workers), stage)
        return tuple(worker for start in starts for worker in self.workers[start : start + self.tensor])
