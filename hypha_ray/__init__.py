"""hypha_ray: DiLoCo training on Ray, on many machines that are unequal, far apart and unreliable.

run = hypha_ray.train({"model": …, "dataset": …})
run = hypha_ray.Run("tiny")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypha_ray.driver.run import Run, train

__all__ = ["Run", "__version__", "train"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the interface when it is used: a job script that parses its command line needs none of it."""
    if name not in ("Run", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hypha_ray.driver import run

    return getattr(run, name)
