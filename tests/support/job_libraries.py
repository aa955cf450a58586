"""All that actors and job scripts load, Ray too, loaded by importing this module."""

import pkgutil
from importlib import import_module

import hypha_ray
import tests.support.libraries  # noqa: F401
from hypha_ray.heavy_imports import uncollected

with uncollected():
    for module in pkgutil.walk_packages(hypha_ray.__path__, "hypha_ray."):
        import_module(module.name)
