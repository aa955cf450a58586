"""The job file: its schema, and the merge of files and flags into one job. Free of torch and ray."""

from hypha_ray.config.schema import Job

__all__ = ["Job"]
