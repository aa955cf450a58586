"""Train a model by DiLoCo: workers train on their own for a while, then a parameter server merges what they learned.

    python jobs/diloco.py @ jobs/configs/tiny.toml --dataset.path data/stdlib
    python jobs/diloco.py @ jobs/configs/tiny.toml --dataset.path data/stdlib --dry-run
    ray job submit --working-dir . -- python jobs/diloco.py @ jobs/configs/tiny.toml --dataset.path /data/stdlib

It joins the cluster that RAY_ADDRESS names, or starts Ray on this machine.
"""

import sys

from hypha_ray.config.cli import run
from hypha_ray.config.load import parse


def main() -> None:
    """Parse first, import later: `--help` and a mistyped key answer at once."""
    loaded = parse(sys.argv[1:], __doc__)
    from hypha_ray.scheduler.launch import launch

    launch(loaded, kind="diloco")


if __name__ == "__main__":
    run(main)
