"""Train a model synchronously: in each step every worker has a part of the batch, a server steps on the mean gradient.

    python jobs/sync.py @ jobs/configs/sync.toml --dataset.path data/digits
    python jobs/sync.py @ jobs/configs/sync.toml --dataset.path data/digits --inner_optimizer.name RMSprop
    python jobs/sync.py --resume digits --rounds.update_rounds 400

A round is one step of `inner_optimizer`, on `rounds.samples_between_updates` samples. All else is as in jobs/diloco.py,
which it is the baseline for: gradients travel in every step.
"""

import sys

from hypha_ray.config.entry_point import run
from hypha_ray.config.load import parse
from hypha_ray.driver.run_folders import find_run
from hypha_ray.driver.start import start


def main() -> None:
    """Parse first, import later: `--help` and a mistyped key answer at once."""
    loaded = parse(["--sync.strategy", "sync", *sys.argv[1:]], __doc__, find_run)
    start(loaded, kind="sync")


if __name__ == "__main__":
    run(main)
