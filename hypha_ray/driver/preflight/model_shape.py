"""Size of a job's model and its layers, from its configuration alone."""

from __future__ import annotations

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError, HubError
from hypha_ray.heavy_imports import uncollected
from hypha_ray.simulation.advice.exchange import ModelShape
from hypha_ray.types.layout import is_trained

FRAGMENTS = (2, 4, 8)
"""Numbers of fragments that may be proposed."""


def model_shape(job: Job) -> ModelShape:
    """Measure what a job trains and exchanges, on torch's meta device.

    Raises:
        HyphaError: the model can't be built from its configuration, or that can't be had here.

    """
    if not job.model.repository and job.model.config is None and job.model.factory is None:
        fix = "give [model] in the job file, or --parameters 1.1e9"
        raise ConfigError("CFG012", "the job has no model, so its size isn't known", fix=fix)
    with uncollected():
        from hypha_ray.model.layout import layers_of, layout_of
        from hypha_ray.model.trained import sketch_trained

    try:
        network = sketch_trained(job)
    except HubError as error:
        fix = f"{error.fix or 'try again'}, or give the model's size by --parameters"
        raise HubError(error.code, error.what, error.got, error.allowed, fix) from None
    layout = layout_of(network)
    sizes = {entry.name: entry.size for entry in layout.entries if is_trained(entry.group)}
    layers = len(set(layers_of(sizes).values()))
    parts = {}
    for fragments in FRAGMENTS:
        if fragments <= layers:
            divided = layout_of(network, fragments, "strided")
            parts[fragments] = tuple(divided.parameters(fragment) for fragment in range(fragments))
    return ModelShape(layout.parameters(), layers, parts)
