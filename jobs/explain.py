"""Tell cause and remedy of an error code: python jobs/explain.py CODE.

python jobs/explain.py CFG004
python jobs/explain.py CFG        # all codes with these letters, a line each
python jobs/explain.py            # all codes
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hypha_ray.config.entry_point import run
from hypha_ray.config.options import parse_options


@dataclass(frozen=True)
class Explain:
    """Tell cause and remedy of an error code."""

    code: str | None = None
    """code of the error, such as CFG004, or its letters; default: all codes are listed with their causes"""


def main() -> None:
    """Print the explanation, or the list."""
    options = parse_options(Explain, __doc__, sys.argv[1:], position="code")
    from hypha_ray.config.entry_point import explanations, explanations_of

    listed = list(explanations().values())
    if options.code is not None:
        listed = explanations_of(options.code)
    if len(listed) == 1:
        print(*listed[0].lines(), sep="\n")
        return
    for explanation in listed:
        print(f"{explanation.code:<9} {explanation.cause}")


if __name__ == "__main__":
    run(main)
