"""hypha_ray: DiLoCo training on Ray, on many machines that are unequal, far apart and unreliable."""

__version__ = "0.1.0"
