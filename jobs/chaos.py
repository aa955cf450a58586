"""Kill parts of a running job, one after the other, and measure what it costs and whether anything is lost.

    python jobs/chaos.py --mean-rounds-between-kills 5.5 --rounds 60 --roles worker
    python jobs/chaos.py --mean-rounds-between-kills 1.38 --rounds 60 --roles worker,server,shard,scheduler,driver
    python jobs/chaos.py --mean-rounds-between-kills 4 --round-seconds 4 --roles scheduler --kills 10

It starts a Ray cluster of its own on this machine, each worker on a node, and a small job, which it watches from
outside: the job doesn't know. See docs/chaos.md. Ends with 0 if the run ended well and nothing was lost, else with 1.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from hypha_ray.config.entry_point import require_writable, run, write_result
from hypha_ray.config.options import parse_options
from hypha_ray.files import use_tools


def main() -> None:
    """Parse, do it, print and write the figures."""
    use_tools()
    from chaoslab.options import Options

    options = parse_options(Options, __doc__, sys.argv[1:])
    options.check()
    require_writable("--json", options.json)
    os.environ.update(RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")  # Read on import.
    from chaoslab.campaign import carry_out
    from chaoslab.report import figures, page

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out = (options.out or Path(tempfile.mkdtemp(prefix="chaos"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    report = figures(options, carry_out(options, out))
    print(page(report))
    if options.json is not None:
        write_result("--json", options.json, json.dumps(report, indent=2) + "\n")
    if options.out is None and not report["problems"]:
        shutil.rmtree(out)
    else:
        print(f"run and logs: {out}")
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    run(main)
