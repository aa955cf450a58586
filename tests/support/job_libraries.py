"""Libraries of job scripts, loaded by importing this module."""

from hypha_ray.heavy_imports import uncollected

with uncollected():
    import datasets  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.vit.modeling_vit  # noqa: F401

    import hypha_ray.data.preparation.prepare
    import hypha_ray.driver.launch
    import hypha_ray.driver.loss_on_samples
    import hypha_ray.model.saved_model
    import hypha_ray.store.snapshots
    import hypha_ray.telemetry.plots  # noqa: F401
