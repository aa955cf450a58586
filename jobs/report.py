"""Write one page about a run, finished or not: python jobs/report.py RUN.

    python jobs/report.py texts-1
    python jobs/report.py --run texts-1 --out report.html
    python jobs/report.py texts-1 --with-hosts

The page is one HTML file with curves, workers round by round, traffic, costs, events, responses, settings and
provenance. It needs no network, and shows no users, machines and addresses unless they are asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.entry_point import STDOUT, require_writable, run, write_result
from hypha_ray.config.options import parse_options
from hypha_ray.errors import ConfigError


@dataclass(frozen=True)
class Report:
    """Write one page about a run, finished or not."""

    run: str
    """name of the run, or its directory"""
    out: Path | None = None
    """file for the page, in .html; -: standard output; default: report.html in the run's directory"""
    with_hosts: bool = False
    """also show users, machines and addresses"""
    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""


def main() -> None:
    """Write the page, and print its path."""
    options = parse_options(Report, __doc__, sys.argv[1:], position="run")
    if options.out not in (None, STDOUT) and options.out.suffix not in (".html", ".htm"):
        raise ConfigError("CFG003", "--out is out of range", str(options.out), "a name in .html", "name one")
    require_writable("--out", options.out)
    from hypha_ray.driver.run_folders import existing_run
    from hypha_ray.history.report import report_of, write_report

    folder = existing_run(options.run, options.dir)
    if options.out is None:
        print(write_report(folder, with_hosts=options.with_hosts))
        return
    write_result("--out", options.out, report_of(folder, options.with_hosts))
    if options.out != STDOUT:
        print(options.out.absolute())


if __name__ == "__main__":
    run(main)
