#!/usr/bin/env bash
# fluke 0.8.1: FedAVGM throws the first round's training away, and is a round late from then on.
#
# FedAVGM keeps a running sum of the changes of the global model, and subtracts it in each round. In the first round the sum
# is made as zeros, and the change of that round isn't added: the clients train, their models are averaged, and the global
# model stays as it was. So one round gives the model that went in, momentum 0 isn't FedAvg, and a comparison with other
# algorithms by rounds is unfair by the round in which most is gained. Nothing is said; the losses of clients that are
# shown are right. The documentation describes no warm-up.
#
# hypha_ray isn't touched: its outer optimizer is its own, and its tests hold it against torch's SGD.
#
# Seen with fluke-fl 0.8.1, torch 2.13.0, Python 3.11 (one weight, one client, which adds 1 a round):
#   FedAvg: 1.00, 2.00, 3.00, 4.00
#   FedAVGM, momentum 0.0: 0.00, 1.00, 2.00, 3.00; by torch's SGD 1.00, 2.00, 3.00, 4.00
#   FedAVGM, momentum 0.9: 0.00, 1.00, 2.90, 5.61; by torch's SGD 1.00, 2.90, 5.61, 9.05
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 omegaconf==2.3.0 packaging opacus==1.6.0 pandas scikit-learn seaborn torchmetrics
"${pip[@]}" diskcache rich psutil cerberus
"${pip[@]}" --no-deps fluke-fl==0.8.1

cat > "$work/rounds.py" <<'PY'
from types import SimpleNamespace

import torch
from fluke.algorithms.fedavgm import FedAVGMServer
from fluke.server import Server
from torch import nn

CLIENT = SimpleNamespace(index=0, n_examples=1)


def model(weight):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return layer


def rounds(server):
    weights = []
    for _ in range(4):
        trained = model(server.model.weight.item() + 1.0)
        server.aggregate([CLIENT], [trained])
        weights.append(server.model.weight.item())
    return ", ".join(f"{weight:.2f}" for weight in weights)


def by_sgd(momentum):
    layer, weights = model(0.0), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=momentum)
    for _ in range(4):
        layer.weight.grad = torch.full((1, 1), -1.0)
        optimizer.step()
        weights.append(layer.weight.item())
    return ", ".join(f"{weight:.2f}" for weight in weights)


print(f"FedAvg: {rounds(Server(model(0.0), None, [CLIENT], weighted=False))}")
for momentum in (0.0, 0.9):
    server = FedAVGMServer(model(0.0), None, [CLIENT], weighted=False, momentum=momentum)
    print(f"FedAVGM, momentum {momentum}: {rounds(server)}; by torch's SGD {by_sgd(momentum)}")
PY
HOME="$work" "$work/env/bin/python" -W ignore "$work/rounds.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
