#!/usr/bin/env bash
# google-tunix 0.1.7: DAPO's penalty for overlong answers counts letters, and has no end.
#
# DAPO takes away nothing up to max_response_length - overlong_buffer_length tokens, then linearly more, and never more
# than overlong_buffer_penalty. tunix' settings have the paper's values: 20480 tokens, "Hard maximum generation length",
# a buffer of 4096, a penalty of 1. Its reward function gets the answers as text and takes len of it: letters. In
# English, with 4 to 5 letters a token, an answer is punished from a fifth or a fourth of the length that is meant. The
# bound is missing too, so an answer of 8000 tokens, which is far within the limit, loses 5.8, and one of 20480 loses
# 21, where a right answer earns 1: wrong short answers beat right long ones, and the more letters a language has for a
# token, the more. The function is on by default, and DAPOLearner adds it to the given ones. No word says that the
# lengths are letters.
#
# hypha_ray isn't touched: it has no such penalty.
#
# Seen with google-tunix 0.1.7, jax 0.10.2, flax 0.12.8, Python 3.11 (default DAPOConfig; words of 4 letters, a word and
# its space being a token; right answers earn 1):
#   1000 tokens, right: reward 1.00, by the paper 1.00
#   3276 tokens, right: reward 1.00, by the paper 1.00
#   4096 tokens, right: reward 0.00, by the paper 1.00
#   8000 tokens, right: reward -4.77, by the paper 1.00
#   16384 tokens, right: reward -15.00, by the paper 1.00
#   18432 tokens, right: reward -17.50, by the paper 0.50
#   20480 tokens, right: reward -20.00, by the paper 0.00
#   100 tokens, wrong: reward 0.00, by the paper 0.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" jax==0.10.2 flax==0.12.8 optax==0.2.8 numpy==2.4.6 qwix==0.1.8 google-metrax==0.2.4 google-tunix==0.1.7

cat > "$work/lengths.py" <<'PY'
from tunix.rl import reward_manager
from tunix.rl.grpo import dapo_learner

CONFIG = dapo_learner.DAPOConfig()
BUFFER = CONFIG.overlong_buffer
ANSWERS = [(length, "right") for length in (1000, 3276, 4096, 8000, 16384, 18432, 20480)] + [(100, "wrong")]


def is_right(prompts, completions, **_):
    return [float(completion.startswith("good")) for completion in completions]


def by_the_paper(tokens, right):
    over = tokens - (BUFFER["max_response_length"] - BUFFER["overlong_buffer_length"])
    share = min(max(over / BUFFER["overlong_buffer_length"], 0.0), 1.0)
    return float(right) - BUFFER["overlong_buffer_penalty"] * share


def rewards(answers):
    manager = reward_manager.SequenceRewardManager([is_right, dapo_learner.reward_shaping], CONFIG)
    return manager(prompts=["?"] * len(answers), completions=answers, mode="train")["rewards"]


texts = [("good " if kind == "right" else "poor ") * tokens for tokens, kind in ANSWERS]
for (tokens, kind), reward in zip(ANSWERS, rewards(texts), strict=True):
    paper = by_the_paper(tokens, kind == "right")
    print(f"{tokens} tokens, {kind}: reward {reward:.2f}, by the paper {paper:.2f}")
PY
"$work/env/bin/python" -W ignore "$work/lengths.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
