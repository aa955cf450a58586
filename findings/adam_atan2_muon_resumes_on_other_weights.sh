#!/usr/bin/env bash
# adam-atan2-pytorch 0.4.1: a resumed MuonAdamAtan2 goes on with the averages of other weights.
#
# MuonAdamAtan2(muon_params, params) trains matrices by Muon and the other weights by Adam. By default it takes the
# matrices out of params, and it does so by a Python set. A set of parameters is ordered by their addresses in memory,
# which are others in each process. An optimizer's state is saved by number, as of all optimizers of torch: weight 3 of
# the resumed run gets the averages of weight 3 of the former run, another one. Norms and biases of a model often have
# one shape, so nothing fails (where shapes differ, a step ends with an error). Weights and optimizer are loaded without
# a word, and training goes another way. With remove_muon_params_from_params=False and a list the order is kept and the
# resume is exact. The README doesn't mention it.
#
# hypha_ray isn't touched: it doesn't use the package.
#
# Seen with adam-atan2-pytorch 0.4.1, torch 2.13.0, Python 3.11 (50 steps, a new process, 10 steps):
#   given all weights: each weight has its own averages False, trained on as if never stopped False
#   given the others only: each weight has its own averages True, trained on as if never stopped True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 einops==0.8.2 \
    adam-atan2-pytorch==0.4.1

cat > "$work/resume.py" <<'PY'
import subprocess
import sys
from tempfile import TemporaryDirectory

import torch
from adam_atan2_pytorch import MuonAdamAtan2
from torch import nn

ALL, OTHERS = "given all weights", "given the others only"
torch.set_num_threads(1)


def made(way):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(8)])
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    if way == ALL:
        return model, MuonAdamAtan2(matrices, model.parameters(), lr=1e-3)
    return model, MuonAdamAtan2(matrices, others, lr=1e-3, remove_muon_params_from_params=False)


def train(model, optimizer, first, last):
    for step in range(first, last):
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.flip(1)).backward()
        optimizer.step()


def averages(model, optimizer):
    return {name: optimizer.state[weight]["exp_avg"].clone() for name, weight in model.named_parameters()}


def begin(way, file):
    model, optimizer = made(way)
    train(model, optimizer, 0, 50)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "averages": averages(model, optimizer)}
    torch.save(saved, file)
    train(model, optimizer, 50, 60)
    torch.save(model.state_dict(), file + ".later")


def resume(way, file):
    model, optimizer = made(way)
    saved, later = torch.load(file), torch.load(file + ".later")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loaded = averages(model, optimizer)
    own = all(torch.equal(loaded[name], average) for name, average in saved["averages"].items())
    train(model, optimizer, 50, 60)
    same = all(torch.equal(weight, later[name]) for name, weight in model.state_dict().items())
    print(f"{way}: each weight has its own averages {own}, trained on as if never stopped {same}")


if len(sys.argv) > 1:
    {"begin": begin, "resume": resume}[sys.argv[1]](*sys.argv[2:])
else:
    with TemporaryDirectory() as folder:
        for way in (ALL, OTHERS):
            for task in ("begin", "resume"):
                subprocess.run([sys.executable, __file__, task, way, f"{folder}/state"], check=True)
PY
"$work/env/bin/python" -W ignore "$work/resume.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
