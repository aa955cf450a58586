"""The job file: what may stand in it, and how files and flags become one job. Free of torch and ray."""

from hypha_ray.config.schema import Job

__all__ = ["Job"]
