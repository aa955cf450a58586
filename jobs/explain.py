"""Tell cause and remedy of an error code: python jobs/explain.py CODE.

python jobs/explain.py CFG004
python jobs/explain.py            # all codes, a line each
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hypha_ray.config.cli.entry_point import run
from hypha_ray.config.cli.options import parse_options


@dataclass(frozen=True)
class Explain:
    """Tell cause and remedy of an error code."""

    code: str | None = None
    """code of the error, such as CFG004; default: all codes are listed with their causes"""


def main() -> None:
    """Print the explanation, or the list."""
    options = parse_options(Explain, __doc__, sys.argv[1:], position="code")
    from hypha_ray.config.explained import explanation_of, explanations

    if options.code is None:
        for explanation in explanations().values():
            print(f"{explanation.code:<9} {explanation.cause}")
    else:
        print(*explanation_of(options.code).lines(), sep="\n")


if __name__ == "__main__":
    run(main)
