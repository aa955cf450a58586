#!/usr/bin/env bash
# heavyball 3.2.1: the first step of Scion replaces the model's weights by random ones, and biases and norms' gains by zeros.
#
# The initialization is in the optimizer. At its first step each matrix becomes a random orthogonal one, each vector 0, and
# the update by the gradient, which was that of the former weights, is added. So a model that was loaded to be trained
# further is lost at once, a LayerNorm's gain is 0 and not 1, and a model's own initialization has no effect. Neither the
# docstring nor the README says it, and no setting turns it off. The seed is a parameter's place in its group: the same
# matrices in every run, and layers of one shape in groups of their own begin equal. A resume with the optimizer's state
# keeps the weights; one with the weights alone loses them.
#
# hypha_ray isn't touched: its optimizers are torch's and its own.
#
# Seen with heavyball 3.2.1, torch 2.13.0, Python 3.11 (one step at a rate of 1e-9 after a training by Adam):
#   before: loss 0.00
#   SGD: loss 0.00, first matrix moved by 0.0 of its length, 0 of 64 gains are 0
#   AdamW: loss 0.00, first matrix moved by 0.0 of its length, 0 of 64 gains are 0
#   SOAP: loss 0.00, first matrix moved by 0.0 of its length, 0 of 64 gains are 0
#   Muon: loss 0.00, first matrix moved by 0.0 of its length, 0 of 64 gains are 0
#   Scion: loss 1.07, first matrix moved by 1.9 of its length, 64 of 64 gains are 0
#   Scion, two layers in two groups: equal True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 heavyball==3.2.1

cat > "$work/step.py" <<'PY'
from copy import deepcopy

import heavyball
import torch
from torch import nn

torch.set_num_threads(1)
heavyball.utils.compile_mode = None
DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(256, 8, generator=DRAW)
TARGETS = torch.stack([INPUTS[:, 0] * INPUTS[:, 1], INPUTS[:, 2].abs()], dim=1)


def loss(model):
    return nn.functional.mse_loss(model(INPUTS), TARGETS)


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model


def after_a_step(model, name):
    model = deepcopy(model)
    optimizer = getattr(heavyball, name)(model.parameters(), lr=1e-9)
    loss(model).backward()
    optimizer.step()
    return model


before = trained()
print(f"before: loss {loss(before).item():.2f}")
for name in ("SGD", "AdamW", "SOAP", "Muon", "Scion"):
    after = after_a_step(before, name)
    moved = (after[0].weight - before[0].weight).norm() / before[0].weight.norm()
    zeros = int((after[1].weight.abs() < 1e-6).sum())
    print(f"{name}: loss {loss(after).item():.2f}, first matrix moved by {moved:.1f} of its length, {zeros} of 64 gains are 0")
layers = [nn.Linear(16, 16, bias=False) for _ in range(2)]
optimizer = heavyball.Scion([{"params": layer.parameters()} for layer in layers], lr=1e-9)
layers[1](layers[0](torch.randn(4, 16))).square().sum().backward()
optimizer.step()
print(f"Scion, two layers in two groups: equal {torch.allclose(layers[0].weight, layers[1].weight, atol=1e-6)}")
PY
"$work/env/bin/python" "$work/step.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
