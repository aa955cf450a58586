"""Examine this machine and its cluster, a line a check with its remedy: python jobs/doctor.py.

    python jobs/doctor.py
    python jobs/doctor.py --json doctor.json
    RAY_ADDRESS=HEAD:6379 python jobs/doctor.py

A line begins with ok, note or fail. The cluster is that of RAY_ADDRESS, or the one that this machine is a node of. Then
versions, clocks, ports and links of the other nodes are measured, as seen from here. Credentials are tried, and never
shown. The exit code is 0 if nothing fails, 2 for this machine's settings, 4 for credentials and 75 for the cluster.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.entry_point import Phases, require_writable, run, write_result
from hypha_ray.config.options import parse_options


@dataclass(frozen=True)
class Doctor:
    """Examine this machine and its cluster."""

    json: Path | None = None
    """file for the list of checks, as JSON; -: standard output"""
    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""


def main() -> None:
    """Print a line for each check, and write the list."""
    options = parse_options(Doctor, __doc__, sys.argv[1:])
    require_writable("--json", options.json)
    phases = Phases()
    phases.begin("examining this machine")
    from hypha_ray.driver.preflight.doctor import error_of, machine_reports, own_reports, rows, store_reports
    from hypha_ray.history.overview import aligned
    from hypha_ray.store.directory import runs

    reports = [*machine_reports(), *own_reports(runs(options.dir)), *store_reports()]
    phases.begin("examining the cluster")
    from hypha_ray.driver.ray_cluster import cluster_reports

    reports += cluster_reports()
    phases.end()
    print(*aligned(rows(reports)), sep="\n")
    if options.json is not None:
        content = json.dumps([report.as_json() for report in reports], indent=1)
        write_result("--json", options.json, content + "\n")
    error = error_of(reports)
    if error is not None:
        raise error


if __name__ == "__main__":
    run(main)
