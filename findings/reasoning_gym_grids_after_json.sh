#!/usr/bin/env bash
# reasoning-gym 0.1.25: the right answer of an ARC task scores 0.05 if its entry has been through JSON.
#
# A dataset of prompts is stored as JSON or Parquet, where tuples become lists. `score_answer` of arc_agi and rearc
# compares the parsed answer, a tuple of tuples, with the entry's `output`, which is a list of
# lists then: never equal, so the reward is that of any well-formed wrong grid, whatever a model answers.
#
# Seen with reasoning-gym 0.1.25, Python 3.11:
#   arc_agi: right answer 1.0, the same after JSON 0.05
#   rearc:   right answer 1.0, the same after JSON 0.05
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25
"$work/env/bin/python" - <<'PY' | tee "$work/seen"
import json

import reasoning_gym

for name in ("arc_agi", "rearc"):
    tasks = reasoning_gym.create_dataset(name, size=3, seed=5)
    for entry in tasks:
        stored = json.loads(json.dumps(entry))
        right, after = tasks.score_answer(entry["answer"], entry), tasks.score_answer(entry["answer"], stored)
        print(f"{name}: right answer {right}, the same after JSON {after}")
PY
test "$(grep -c '^arc_agi: right answer 1.0, the same after JSON 0.05$' "$work/seen")" = 3
test "$(grep -c '^rearc: right answer 1.0, the same after JSON 0.05$' "$work/seen")" = 3
echo 'as described'
