#!/usr/bin/env bash
# ragas 0.4.3: ToolCallAccuracy with strict_order=False compares right calls with others if one call is wrong.
#
# With "tool calls can be in any order" both lists of calls are sorted by name and arguments, and compared place by
# place. A wrong call has another place in its list than the right one would have, so all between the two places are
# compared with neighbours: of four calls three can be right and the score 0. Which wrong argument it is decides, and
# numbers are sorted as texts. A call too few or too many is 0, too: the docstring promises a "proportional coverage
# penalty", and a warning says how many calls will be compared, but the names of all calls must agree or the score is
# multiplied by 0. Both the metric of ragas.metrics and the newer one of ragas.metrics.collections do it. For the
# places nothing is said.
#
# hypha_ray isn't touched: it doesn't use ragas.
#
# Seen with ragas 0.4.3, Python 3.11 (calls of one tool with one argument):
#   called (2, 1), wanted (1, 2): 1.00 and 1.00, right are 2 of 2
#   called (1, 9), wanted (1, 2): 0.50 and 0.50, right are 1 of 2
#   called (0, 1), wanted (1, 2): 0.00 and 0.00, right are 1 of 2
#   called (2, 3, 4, 9), wanted (1, 2, 3, 4): 0.00 and 0.00, right are 3 of 4
#   called (1, 2, 3, 9), wanted (1, 2, 3, 4): 0.75 and 0.75, right are 3 of 4
#   called (2, 3, 10), wanted (2, 3, 4): 0.00 and 0.00, right are 2 of 3
#   called (1, 2, 3), wanted (1, 2, 3, 4): 0.00 and 0.00, right are 3 of 4
#   called (1, 2, 3, 4, 5), wanted (1, 2, 3, 4): 0.00 and 0.00, right are 4 of 4
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 langchain-community==0.4.1 ragas==0.4.3

cat > "$work/calls.py" <<'PY'
import asyncio

from ragas.dataset_schema import MultiTurnSample
from ragas.messages import AIMessage, HumanMessage, ToolCall
from ragas.metrics import ToolCallAccuracy as OldAccuracy
from ragas.metrics.collections import ToolCallAccuracy

CASES = (
    ((2, 1), (1, 2)),
    ((1, 9), (1, 2)),
    ((0, 1), (1, 2)),
    ((2, 3, 4, 9), (1, 2, 3, 4)),
    ((1, 2, 3, 9), (1, 2, 3, 4)),
    ((2, 3, 10), (2, 3, 4)),
    ((1, 2, 3), (1, 2, 3, 4)),
    ((1, 2, 3, 4, 5), (1, 2, 3, 4)),
)


def calls(days):
    return [ToolCall(name="weather", args={"day": day}) for day in days]


async def main():
    for made, wanted in CASES:
        messages = [HumanMessage(content="?"), AIMessage(content="", tool_calls=calls(made))]
        metric = ToolCallAccuracy(strict_order=False)
        new = (await metric.ascore(user_input=messages, reference_tool_calls=calls(wanted))).value
        sample = MultiTurnSample(user_input=messages, reference_tool_calls=calls(wanted))
        old = await OldAccuracy(strict_order=False).multi_turn_ascore(sample)
        right = len(set(made) & set(wanted))
        print(f"called {made}, wanted {wanted}: {new:.2f} and {old:.2f}, right are {right} of {len(wanted)}")


asyncio.run(main())
PY
(cd "$work" && RAGAS_DO_NOT_TRACK=true env/bin/python -W ignore calls.py 2> errors | tee seen)
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
