"""All that actors and job scripts load, Ray with it, loaded by importing this module.

Ray reads variables as it is loaded, so a fork is for the same variables alone. It seeds its random ids at the first
one, and nothing that is loaded here draws any.
"""

from importlib import import_module

from hypha_ray.files import uncollected
from tests.support.libraries import load_own_modules

with uncollected():
    import_module("ray._private.workers.default_worker")
load_own_modules()
