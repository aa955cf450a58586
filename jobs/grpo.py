"""Train a language model by its rewards: it answers prompts in groups, and learns from what beats the group's mean.

    python jobs/prepare.py --source problems:sort2 --tokenizer characters --out data/sort2
    python jobs/grpo.py @ jobs/configs/grpo-tiny.toml --dataset.path data/sort2
    python jobs/grpo.py @ jobs/configs/grpo-tiny.toml --dataset.path data/sort2 --resources.num_workers 2
    python jobs/grpo.py --resume NAME --rounds.update_rounds 40

Workers are joined by DiLoCo as in jobs/diloco.py, and all else is as there. `rl.algorithm` is grpo unless it is set.
"""

import sys

from hypha_ray.config.entry_point import run
from hypha_ray.config.load import parse
from hypha_ray.driver.run_folders import find_run
from hypha_ray.driver.start import start


def main() -> None:
    """Parse first, import later: `--help` and a mistyped key answer at once."""
    loaded = parse(sys.argv[1:], __doc__, find_run, defaults=["--rl.algorithm", "grpo"])
    start(loaded, kind="grpo")


if __name__ == "__main__":
    run(main)
