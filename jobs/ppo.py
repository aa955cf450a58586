"""Train a language model by its rewards and a critic: it answers prompts, and learns from what beats that one's value.

    python jobs/prepare.py --source problems:sort2 --tokenizer characters --out data/sort2
    python jobs/ppo.py @ jobs/configs/ppo-tiny.toml --dataset.path data/sort2
    python jobs/ppo.py @ jobs/configs/ppo-tiny.toml --dataset.path data/sort2 --dry-run
    python jobs/ppo.py --resume NAME --rounds.update_rounds 40

Workers are joined by DiLoCo as in jobs/diloco.py, actor and critic together; the exported model is the actor. All else
is as there. `rl.algorithm` is ppo unless it is set.
"""

import sys

from hypha_ray.config.entry_point import run
from hypha_ray.config.load import parse
from hypha_ray.driver.run_folders import find_run
from hypha_ray.driver.start import start


def main() -> None:
    """Parse first, import later: `--help` and a mistyped key answer at once."""
    loaded = parse(sys.argv[1:], __doc__, find_run, defaults=["--rl.algorithm", "ppo"])
    start(loaded, kind="ppo")


if __name__ == "__main__":
    run(main)
