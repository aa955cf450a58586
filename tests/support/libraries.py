"""All that actors and job scripts load but Ray, loaded by importing this module.

Processes that are forked afterwards load Ray by themselves: it reads variables, and draws the seed of its random ids.
"""

import pkgutil
import sys
from contextlib import suppress
from importlib import import_module

import hypha_ray
from hypha_ray.files import uncollected

LIBRARIES = ("datasets", "grpc", "matplotlib.pyplot", "numba", "transformers.optimization")
OF_RAY = (
    "click",
    "google.protobuf.descriptor",
    "jsonschema",
    "msgpack",
    "pdb",
    "prometheus_client",
    "pydantic.v1",
    "requests",
    "starlette.datastructures",
)
"""What Ray itself loads, of which none loads Ray."""
MODELS = ("bert", "gpt2", "llama", "vit")


def load_own_modules(but: str | None = None) -> None:
    """Load the modules of `hypha_ray`, except those that import the module `but`; None: all of them."""
    if but is not None:
        sys.modules[but] = None  # type: ignore[assignment] # To import it fails.
    with uncollected():
        for module in pkgutil.walk_packages(hypha_ray.__path__, "hypha_ray."):
            with suppress(ImportError):
                import_module(module.name)
    if but is not None:
        del sys.modules[but]


with uncollected():
    for name in (*LIBRARIES, *OF_RAY, *(f"transformers.models.{model}.modeling_{model}" for model in MODELS)):
        import_module(name)
load_own_modules(but="ray")
