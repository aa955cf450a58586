#!/usr/bin/env bash
# FedLab 1.3.0: FedDyn's server enlarges a model that no client changes, and its clients train as FedAvg's do.
#
# The server's state h is to gather how far the clients moved: the sum of their models less as many times the global
# one. FedLab subtracts the global model once, so almost the whole sum is added to h in each round, and the model
# grows without end, the faster the more clients a round has. A client's linear and proximal terms are made of
# model_parameters, which are detached copies: the loss has their numbers, and its gradient doesn't. FedNova's
# default, weighted_scale, weighs the clients of a round by shares that sum to 1, and also multiplies by the number of
# all clients over those of the round: with 10 of 100 clients each step is ten times too long. Its two other options
# are right. Nothing is said.
#
# hypha_ray isn't touched: it doesn't use FedLab.
#
# Seen with fedlab 1.3.0, torch 2.13.0, Python 3.11:
#   FedDyn's server, 1 of 10 clients that change nothing: the length becomes 1.00, 1.00, 1.00, 1.00, 1.00
#   FedDyn's server, 2 of 10 clients that change nothing: the length becomes 1.10, 1.31, 1.65, 2.16, 2.88
#   FedDyn's server, 10 of 10 clients that change nothing: the length becomes 1.90, 4.51, 11.18, 27.91, 69.76
#   FedDyn's client, alpha 0: 0.000 from FedAvg's, 0.000 from the paper's
#   FedDyn's client, alpha 0.1: 0.000 from FedAvg's, 0.019 from the paper's
#   FedDyn's client, alpha 1: 0.000 from FedAvg's, 0.124 from the paper's
#   FedDyn's client, alpha 10: 0.000 from FedAvg's, 0.193 from the paper's
#   FedNova, weighted_scale, 10 of 100 clients, all move by 1: the model moves by 10.00
#   FedNova, uniform, 10 of 100 clients, all move by 1: the model moves by 1.00
#   FedNova, weighted_com, 10 of 100 clients, all move by 1: the model moves by 1.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 pandas==3.1.1 scikit-learn==1.9.1 tqdm==4.70.1 pillow==12.3.0 pynvml==13.0.1
"${pip[@]}" --no-deps fedlab==1.3.0

cat > "$work/steps.py" <<'PY'
import sys
from unittest.mock import MagicMock

import torch

sys.modules["torchvision"] = MagicMock()  # imported for data sets of images alone
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.feddyn import FedDynSerialClientTrainer, FedDynServerHandler
from fedlab.contrib.algorithm.fednova import FedNovaServerHandler
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
BATCHES = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(5)]
EPOCHS, RATE = 3, 0.05


class Data:
    def get_dataloader(self, client, batch_size):
        return BATCHES


def linear():
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3, bias=False)


def fedlab_client(trainer, *options):
    """What a client sends in its second round, after the global model has been moved."""
    trainer.setup_dataset(Data())
    trainer.setup_optim(EPOCHS, 8, RATE, *options)
    start = trainer.model_parameters
    for model in (start, start + 0.5):
        trainer.local_process([model], [0])
        sent = trainer.uplink_package
    return sent[0][0]


def paper_client(alpha):
    start = linear().weight.detach()
    slope = torch.zeros_like(start)
    for begin in (start, start + 0.5):
        weight = begin.clone()
        for inputs, labels in EPOCHS * BATCHES:
            weight.requires_grad_()
            loss = cross_entropy(inputs @ weight.T, labels)
            loss = loss - (slope * weight).sum() + alpha / 2 * (weight - begin).square().sum()
            (gradient,) = torch.autograd.grad(loss, weight)
            weight = weight.detach() - RATE * gradient
        slope = slope - alpha * (weight - begin)
    return weight.view(-1)


def lengths_without_training(clients_in_a_round):
    server = FedDynServerHandler(linear(), 100, clients_in_a_round / 10)
    server.num_clients = 10
    server.setup_optim(0.1)
    first = server.model_parameters.norm()
    for _ in range(5):
        for _ in range(clients_in_a_round):
            server.load([server.model_parameters])
        yield (server.model_parameters.norm() / first).item()


def nova_step(option):
    server = FedNovaServerHandler(linear(), 100, 0.1)
    server.num_clients = 100
    server.setup_optim(option)
    before = server.model_parameters
    for _ in range(10):
        server.load([before + 1, torch.tensor([15.0])])
    return (server.model_parameters - before).mean()


for clients in (1, 2, 10):
    lengths = ", ".join(f"{length:.2f}" for length in lengths_without_training(clients))
    print(f"FedDyn's server, {clients} of 10 clients that change nothing: the length becomes {lengths}")
average = fedlab_client(SGDSerialClientTrainer(linear(), 1))
for alpha in (0.0, 0.1, 1.0, 10.0):
    sent = fedlab_client(FedDynSerialClientTrainer(linear(), 1), alpha)
    right = (sent - paper_client(alpha)).norm()
    off = (sent - average).norm()
    print(f"FedDyn's client, alpha {alpha:g}: {off:.3f} from FedAvg's, {right:.3f} from the paper's")
for option in ("weighted_scale", "uniform", "weighted_com"):
    print(f"FedNova, {option}, 10 of 100 clients, all move by 1: the model moves by {nova_step(option):.2f}")
PY
"$work/env/bin/python" -W ignore "$work/steps.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
