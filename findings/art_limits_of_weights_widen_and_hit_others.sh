#!/usr/bin/env bash
# openpipe-art 0.5.18: a truncation threshold makes importance weights larger, and a limit for bad answers hits good
# ones.
#
# Two settings of TrainConfig limit the weight with which a token trains, exp(new log-probability - sampler's). The
# docstrings: truncated_importance_sampling is the "Truncation threshold for importance sampling weights", and
# max_negative_advantage_importance_sampling_weight the "Maximum weight for negative advantage samples". The first
# multiplies the loss, which has the weight in it already, by the truncated weight: with a threshold of 2 a token of
# weight 3 trains with 6, one of 0.5 with 0.25. It is as written only with precalculate_logprobs=True, which is off by
# default. The second is applied to all tokens: good answers, with a positive advantage, are held back alike, though
# they are what its name leaves out. Nothing is said.
#
# hypha_ray isn't touched: it has its own losses.
#
# Seen with openpipe-art 0.5.18, torch 2.13.0, Python 3.11 (the weight of a token's gradient per unit of advantage):
#   no limit, advantage 1: ratio 0.5 has weight 0.50, ratio 1 has weight 1.00, ratio 3 has weight 3.00
#   no limit, advantage -1: ratio 0.5 has weight 0.50, ratio 1 has weight 1.00, ratio 3 has weight 3.00
#   truncated at 2, advantage 1: ratio 0.5 has weight 0.25, ratio 1 has weight 1.00, ratio 3 has weight 6.00
#   truncated at 2, advantage -1: ratio 0.5 has weight 0.25, ratio 1 has weight 1.00, ratio 3 has weight 6.00
#   truncated at 5, advantage 1: ratio 0.5 has weight 0.25, ratio 1 has weight 1.00, ratio 3 has weight 9.00
#   truncated at 5, advantage -1: ratio 0.5 has weight 0.25, ratio 1 has weight 1.00, ratio 3 has weight 9.00
#   at most 2 if negative, advantage 1: ratio 0.5 has weight 0.50, ratio 1 has weight 1.00, ratio 3 has weight 2.00
#   at most 2 if negative, advantage -1: ratio 0.5 has weight 0.50, ratio 1 has weight 1.00, ratio 3 has weight 2.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 openpipe-art==0.5.18

cat > "$work/weights.py" <<'PY'
import torch
from art.loss import loss_fn

RATIOS = (0.5, 1.0, 3.0)
SETTINGS = {
    "no limit": {},
    "truncated at 2": {"truncated_importance_sampling": 2.0},
    "truncated at 5": {"truncated_importance_sampling": 5.0},
    "at most 2 if negative": {"max_negative_advantage_importance_sampling_weight": 2.0},
}


def row(values, first):
    return torch.tensor([[first, *values]])


def weights(advantage, settings):
    sampled = [-4.0] * len(RATIOS)
    inputs = {
        "logprobs": row(sampled, float("nan")),
        "advantages": row([advantage] * len(RATIOS), 0.0),
        "assistant_mask": row([True] * len(RATIOS), False),
        "weights": row([1.0] * len(RATIOS), 0.0),
        "group_ids": row([1] * len(RATIOS), 0),
    }
    new = torch.tensor([[-4.0] * len(RATIOS) + [0.0]])
    new[0, : len(RATIOS)] += torch.tensor(RATIOS).log()
    new.requires_grad_(True)
    loss_fn(inputs, new, None, None, settings, reduction="sum").policy_loss.backward()
    return (-new.grad[0, : len(RATIOS)] / advantage).tolist()


for name, settings in SETTINGS.items():
    for advantage in (1.0, -1.0):
        found = zip(RATIOS, weights(advantage, settings), strict=True)
        texts = [f"ratio {ratio:g} has weight {weight:.2f}" for ratio, weight in found]
        print(f"{name}, advantage {advantage:g}: {', '.join(texts)}")
PY
"$work/env/bin/python" -W ignore "$work/weights.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
