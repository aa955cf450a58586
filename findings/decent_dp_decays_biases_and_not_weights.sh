#!/usr/bin/env bash
# decent-dp 0.2.3: its optimizers decay the biases and batch norms, and not one of the weight matrices.
#
# DecentralizedDataParallel takes a function that makes an optimizer, and the package has four of them; the README's
# example uses optim_fn_adamw. Each splits the parameters by name, "grouped by weight decay and no weight decay". The
# two lists are swapped: what has "bn" or "bias" in its name gets weight_decay, and all other parameters get 0. So the
# setting has no effect on the matrices, however large it is, and pulls every bias and every gain of a batch norm to 0.
# Without gradients a step of AdamW should multiply a weight by 1 - lr * weight_decay and leave a bias; here it is the
# other way round. No word of the documentation says it, and nothing is said in a run.
#
# hypha_ray isn't touched: its optimizers are torch's and its own.
#
# Seen with decent-dp 0.2.3, torch 2.13.0, Python 3.11 (all parameters 1, no gradient, lr 0.1, weight_decay 0.5, 10
# steps):
#   torch's AdamW: linear.weight 0.60, linear.bias 0.60, bn.weight 0.60, bn.bias 0.60
#   optim_fn_adamw: linear.weight 1.00, linear.bias 0.60, bn.weight 0.60, bn.bias 0.60
#   optim_fn_accum_adamw: linear.weight 1.00, linear.bias 0.60, bn.weight 0.60, bn.bias 0.60
#   optim_fn_adam: linear.weight 1.00, linear.bias 0.08, bn.weight 0.08, bn.bias 0.08
#   optim_fn_accum_adam: linear.weight 1.00, linear.bias 0.06, bn.weight 0.06, bn.bias 0.06
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 loguru==0.7.3 decent-dp==0.2.3

cat > "$work/decay.py" <<'PY'
from functools import partial

import torch
from decent_dp import optim
from torch import nn

torch.set_num_threads(1)
SETTINGS = {"lr": 0.1, "weight_decay": 0.5}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def shown(label, model):
    values = [f"{name} {parameter.mean():.2f}" for name, parameter in model.named_parameters()]
    print(f"{label}: {', '.join(values)}")


def without_gradients(label, make):
    model = Model()
    optimizer = make(list(model.named_parameters()))
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    shown(label, model)


without_gradients("torch's AdamW", lambda named: torch.optim.AdamW([value for _, value in named], **SETTINGS))
for name in ("optim_fn_adamw", "optim_fn_accum_adamw", "optim_fn_adam", "optim_fn_accum_adam"):
    without_gradients(name, partial(getattr(optim, name), **SETTINGS))
PY
"$work/env/bin/python" -W ignore "$work/decay.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
