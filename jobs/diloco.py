"""Train a model by DiLoCo: workers train on their own for a while, then a parameter server merges what they learned.

    python jobs/diloco.py @ jobs/configs/tiny.toml --dataset.path data/stdlib
    python jobs/diloco.py @ jobs/configs/tiny.toml --dataset.path data/stdlib --dry-run
    python jobs/diloco.py --resume tiny --rounds.update_rounds 40
    ray job submit --working-dir . -- python jobs/diloco.py @ jobs/configs/tiny.toml --dataset.path /data/stdlib

It joins the cluster that RAY_ADDRESS names, or starts Ray on this machine. If it was killed, the same command again
goes on from the run's last commit.
"""

import sys

from hypha_ray.config.entry_point import run
from hypha_ray.config.load import parse
from hypha_ray.driver.run_folders import find_run
from hypha_ray.driver.start import start


def main() -> None:
    """Parse first, import later: `--help` and a mistyped key answer at once."""
    loaded = parse(sys.argv[1:], __doc__, find_run)
    start(loaded, kind="diloco")


if __name__ == "__main__":
    run(main)
