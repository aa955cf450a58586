#!/usr/bin/env bash
# ema-pytorch 0.8.3: PostHocEMA averages over other spans than sigma_rel says, unless it is updated at every step.
#
# By Karras et al. (arXiv 2312.02696) the average of weights at step t has a profile of relative width sigma_rel: its standard
# deviation is that share of the training so far. update_every is described as how often to actually update, to save on
# compute; the README's example has 10, and KarrasEMA's default is 100. But each update decays the average as one step
# would, though it stands for 10 or 100. So old weights stay in it for too long: with 100 an average that should lie 5 % of
# the training behind lies in its first fifth. What PostHocEMA synthesizes for a sigma_rel from such snapshots is another
# average, too, since they aren't what the formula takes them for. No error, no warning.
#
# hypha_ray isn't touched: it keeps no average of weights.
#
# Seen with ema-pytorch 0.8.3, torch 2.13.0, Python 3.11 (2000 steps, snapshots every 200 in float64):
#   every 1 steps: 0.05 has width 0.05 around 0.95; 0.07, synthesized, has width 0.07 around 0.93
#   every 10 steps: 0.05 has width 0.25 around 0.64; 0.07, synthesized, has width 0.29 around 0.53
#   every 100 steps: 0.05 has width 0.24 around 0.15; 0.07, synthesized, has width 0.21 around 0.10
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy ema-pytorch==0.8.3

cat > "$work/widths.py" <<'PY'
import sys

import torch
from ema_pytorch import PostHocEMA

STEPS = 2000


class Moments(torch.nn.Module):
    """Its weights are time and time squared, so their average has the mean and the width of the profile."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


def described(average):
    mean, square = average.ema_model.weights.tolist()
    return f"width {(square - mean * mean) ** 0.5:.2f} around {mean:.2f}"


for every in (1, 10, 100):
    model = Moments()
    averages = PostHocEMA(
        model, sigma_rels=(0.05, 0.1), update_every=every, checkpoint_every_num_steps=200,
        checkpoint_dtype=torch.float64, checkpoint_folder=f"{sys.argv[1]}/{every}",
    )
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            time = step / STEPS
            model.weights.copy_(torch.tensor([time, time * time]))
        averages.update()
    kept, synthesized = averages.ema_models[0], averages.synthesize_ema_model(sigma_rel=0.07)
    print(f"every {every} steps: 0.05 has {described(kept)}; 0.07, synthesized, has {described(synthesized)}")
PY
"$work/env/bin/python" "$work/widths.py" "$work" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
