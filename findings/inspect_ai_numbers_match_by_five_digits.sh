#!/usr/bin/env bash
# inspect-ai 0.3.285: match(numeric=True) counts a wrong number as right if its first five digits are.
#
# By its documentation the scorer strips signs of currency, separators of thousands and marks of formatting, and then
# compares numbers. Since May 2026 it compares them for equality, no longer as text (UKGovernmentBEIS/inspect_ai, pull
# request 3916, in which 711 counted as 11). But both are first written with five significant digits, so answers of six
# digits or more, as in arithmetic and word problems with money or years in seconds, are right within 0.01 %. The answer
# that the log shows is the shortened one, for right answers, too. A decimal number that is given with more
# digits than five has the same room. No setting changes it; match() without numeric compares texts.
#
# hypha_ray isn't touched: it has rewards of its own, and its evaluations are lm-eval's.
#
# Seen with inspect-ai 0.3.285, Python 3.11 (target, what the model said, verdict of match(numeric=True), answer in the log):
#   12345, "The answer is 12346": I, 12346
#   123456, "The answer is 123456": C, 1.2346e+05
#   123456, "The answer is 123463": C, 1.2346e+05
#   123456, "The answer is 123,644": I, 1.2364e+05
#   1000000, "The answer is $1,000,049": C, 1e+06
#   86400000, "The answer is 86,399,999": C, 8.64e+07
#   3.14159265, "The answer is 3.1416": C, 3.1416
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check inspect-ai==0.3.285

cat > "$work/score.py" <<'PY'
import asyncio

from inspect_ai.model import ModelName, ModelOutput
from inspect_ai.scorer import Target, match
from inspect_ai.solver import TaskState

MODEL = "mockllm/model"
SAID = {
    "12345": ["12346"],
    "123456": ["123456", "123463", "123,644"],
    "1000000": ["$1,000,049"],
    "86400000": ["86,399,999"],
    "3.14159265": ["3.1416"],
}


async def verdict(target, text):
    output = ModelOutput.from_content(MODEL, text)
    state = TaskState(model=ModelName(MODEL), sample_id=1, epoch=1, input="?", messages=[], output=output)
    score = await match(numeric=True)(state, Target(target))
    return f"{score.value}, {score.answer}"


for target, numbers in SAID.items():
    for number in numbers:
        text = f"The answer is {number}"
        print(f'{target}, "{text}": {asyncio.run(verdict(target, text))}')
PY
HOME="$work" "$work/env/bin/python" "$work/score.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
