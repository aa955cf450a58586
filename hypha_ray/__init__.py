"""hypha_ray: DiLoCo training on Ray, on many machines that are unequal, far apart and unreliable.

run = hypha_ray.train({"model": …, "dataset": …})
run = hypha_ray.Run("tiny")
hypha_ray.runs()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypha_ray.driver.run import Run, Runs, runs, train
    from hypha_ray.driver.training import Callback, StopTraining, Training, TrainingProgress

__all__ = [
    "Callback",
    "Run",
    "Runs",
    "StopTraining",
    "Training",
    "TrainingProgress",
    "__version__",
    "runs",
    "train",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the interface when it is used: a job script that parses its command line needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hypha_ray.driver import run, training

    return getattr(training if hasattr(training, name) and name != "Run" else run, name)


def __dir__() -> list[str]:
    """Names of the interface."""
    return list(__all__)
