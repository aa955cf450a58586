#!/usr/bin/env bash
# openfl 1.9: FedCurv's Fisher information is that of the last batch, divided by the number of batches.
#
# FedCurv ties each weight to what other clients need by the diagonal of their Fisher information. openfl goes through
# the client's data, squares each batch's gradient, divides it by the number of batches, and keeps it instead of
# adding it up: each batch overwrites the one before. So the penalty knows the last batch alone, which is often a
# short one, and is about as many times too weak as there are batches: a client with ten times the data holds others
# back ten times less. An input that this batch doesn't use isn't guarded at all. The order of the batches changes it,
# and with a shuffled loader it is another at each call. The docstring speaks of "the diagonal of the Fisher
# information matrix". Nothing is said.
#
# hypha_ray isn't touched: it doesn't use openfl.
#
# Seen with openfl 1.9, torch 2.13.0, Python 3.11 (1000 rows; each half uses two of 4 inputs, by input):
#   2 batches in order: 0 %, 0 %, 100 %, 100 % of the mean; a share of the last batch True
#   2 batches backwards: 100 %, 100 %, 0 %, 0 % of the mean; a share of the last batch True
#   10 batches in order: 0 %, 0 %, 55 %, 68 % of the mean; a share of the last batch True
#   10 batches backwards: 16 %, 5 %, 0 %, 0 % of the mean; a share of the last batch True
#   20 batches in order: 0 %, 0 %, 6 %, 14 % of the mean; a share of the last batch True
#   20 batches backwards: 0 %, 4 %, 0 %, 0 % of the mean; a share of the last batch True
#   100 batches in order: 0 %, 0 %, 0 %, 0 % of the mean; a share of the last batch True
#   100 batches backwards: 1 %, 1 %, 0 %, 0 % of the mean; a share of the last batch True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 pandas==3.1.1 dynaconf==3.3.5 tqdm==4.70.1
"${pip[@]}" --no-deps openfl==1.9

cat > "$work/fisher.py" <<'PY'
import torch
from openfl.utilities.fedcurv.torch import FedCurv
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
HALF = 500
INPUTS = torch.randn(2 * HALF, 4)
INPUTS[:HALF, 2:] = 0
INPUTS[HALF:, :2] = 0
LABELS = torch.randint(3, (2 * HALF,))


def seen(batches):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3, bias=False)
    curvature = FedCurv(model, importance=1.0)
    curvature.on_train_begin(model)
    curvature.on_train_end(model, batches, "cpu")
    return model.get_buffer("weight_u")


def mean_of_batches(batches):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3, bias=False)
    total = torch.zeros(3, 4)
    for inputs, labels in batches:
        (gradient,) = torch.autograd.grad(cross_entropy(model(inputs), labels), [model.weight])
        total += gradient**2 / len(batches)
    return total


for size in (500, 100, 50, 10):
    batches = list(zip(INPUTS.split(size), LABELS.split(size)))
    for name, order in (("in order", batches), ("backwards", batches[::-1])):
        found, right = seen(order), mean_of_batches(order)
        shares = ", ".join(f"{100 * share:.0f} %" for share in found.sum(0) / right.sum(0))
        last = torch.allclose(found, mean_of_batches(order[-1:]) / len(order), rtol=1e-4, atol=1e-12)
        print(f"{len(order)} batches {name}: {shares} of the mean; a share of the last batch {last}")
PY
"$work/env/bin/python" -W ignore "$work/fisher.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
