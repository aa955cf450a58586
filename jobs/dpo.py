"""Train a language model on preferences: of two answers to a prompt it learns to prefer the chosen one.

    python jobs/prepare.py --source preferences.jsonl --kind preferences --out data/preferences
    python jobs/dpo.py @ jobs/configs/dpo.toml --dataset.path data/preferences
    python jobs/dpo.py @ jobs/configs/dpo.toml --dataset.path data/preferences --preference.loss ipo
    python jobs/dpo.py --resume NAME --rounds.update_rounds 40

Workers are joined by DiLoCo as in jobs/diloco.py, and all else is as there. `preference.loss` is dpo unless it is set.
"""

import sys

from hypha_ray.config.entry_point import run
from hypha_ray.config.load import parse
from hypha_ray.driver.run_folders import find_run
from hypha_ray.driver.start import start


def main() -> None:
    """Parse first, import later: `--help` and a mistyped key answer at once."""
    loaded = parse(sys.argv[1:], __doc__, find_run, defaults=["--preference.loss", "dpo"])
    start(loaded, kind="dpo")


if __name__ == "__main__":
    run(main)
