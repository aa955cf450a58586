"""List the job files that come with hypha_ray, or print one: python jobs/configs.py [NAME].

    python jobs/configs.py
    python jobs/configs.py tiny > job.toml

A training job takes one by its name, as in `@ tiny`. A file of that name in the current folder, with or without .toml,
is taken instead.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hypha_ray.config.entry_point import run
from hypha_ray.config.options import parse_options


@dataclass(frozen=True)
class Configs:
    """List the job files that come with hypha_ray, or print one."""

    name: str | None = None
    """name of the job file to print, with or without .toml; default: all are listed"""


def main() -> None:
    """Print the list, or the text of a job file."""
    options = parse_options(Configs, __doc__, sys.argv[1:], position="name")
    from hypha_ray.config.document import config_lines, shipped_config

    if options.name is None:
        print(*config_lines(), sep="\n")
    else:
        print(shipped_config(options.name), end="")


if __name__ == "__main__":
    run(main)
