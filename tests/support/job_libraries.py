"""Everything that job scripts load, loaded by importing this module."""

import pkgutil
from importlib import import_module

import hypha_ray
from hypha_ray.heavy_imports import uncollected

with uncollected():
    import datasets  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.vit.modeling_vit  # noqa: F401

    for module in pkgutil.walk_packages(hypha_ray.__path__, "hypha_ray."):
        import_module(module.name)
