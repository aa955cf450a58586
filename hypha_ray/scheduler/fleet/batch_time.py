"""Running estimates of durations, which follow a lasting change and ignore an outlier."""

from __future__ import annotations

from hypha_ray.scheduler.planning.planner import SECONDS


class Decayed:
    """Exponentially decayed mean of durations in seconds, such as those of uploads.

    * The first observation is taken as it is; from then on the mean lies between the least and the greatest one.
    * A single observation that is more than `outlier` times as large or as small as the mean counts as if it were just
      that much. A second one in succession on the same side is no outlier: the past is forgotten, and the estimate
      restarts from the nearer of the two.
    * A value that is no duration (negative, NaN, or longer than a planner accepts) has no effect.

    Args:
        half_life: after so many observations, what was known before counts half.
        outlier: largest believed ratio between one observation and the mean; also the most by which one changes it.

    """

    def __init__(self, half_life: float = 3.0, outlier: float = 2.0) -> None:
        self._half_life = half_life
        self._outlier = outlier
        self._weight = 0.0
        self._doubted: float | None = None
        self.mean: float | None = None
        """Estimate in seconds; None before the first observation."""

    def observe(self, seconds: float, count: int = 1) -> None:
        """Take in the mean of `count` durations."""
        if not self._is_duration(seconds) or count < 1:
            return
        if self.mean is None or not self._weight:
            self._restart(seconds, count)
        else:
            self._follow(self.mean, seconds, count)

    def fade(self, factor: float) -> None:
        """Multiply the estimate by `factor` (0 to 1); the next observation replaces it.

        After a round without an observation, so that an old bad figure doesn't leave a worker without work for ever.
        """
        if self.mean is not None:
            self.mean *= factor
            self._weight = 0.0
            self._doubted = None

    def _is_duration(self, seconds: float) -> bool:
        return 0 <= seconds <= SECONDS[1]

    def _restart(self, seconds: float, count: int) -> None:
        self.mean = seconds
        self._doubted = None
        self._weight = self._gain(count)

    def _follow(self, mean: float, seconds: float, count: int) -> None:
        believed = min(max(seconds, mean / self._outlier), mean * self._outlier)
        earlier = self._doubted
        self._doubted = None if believed == seconds else seconds
        if self._doubted is not None and earlier is not None and (earlier > mean) == (seconds > mean):
            self._restart(min(earlier, seconds) if seconds > mean else max(earlier, seconds), count)
            return
        gain = self._gain(count)
        self._weight = gain + (1 - gain) * self._weight
        share = gain / self._weight
        self.mean = min(max(mean + share * (believed - mean), min(mean, believed)), max(mean, believed))

    def _gain(self, count: int) -> float:
        """Weight of `count` new observations against an infinite past."""
        return float(1 - 0.5 ** (count / self._half_life))


class BatchTime(Decayed):
    """A worker's seconds per batch, within a planner's limits. A round's first batch is warm-up and isn't observed."""

    def __init__(self, half_life: float = 16.0, outlier: float = 2.0) -> None:
        super().__init__(half_life, outlier)

    def fade(self, factor: float) -> None:
        """Multiply the estimate, see `Decayed`; it stays within a planner's limits."""
        super().fade(factor)
        if self.mean is not None:
            self.mean = max(self.mean, SECONDS[0])

    def _is_duration(self, seconds: float) -> bool:
        return super()._is_duration(seconds) and seconds >= SECONDS[0]
