#!/usr/bin/env bash
# FedML 0.9.6: its SCAFFOLD trains on the last client of each round alone, and clients' own variates stay 0.
#
# SCAFFOLD is for clients whose data differ. The server moves by the average of the clients' changes, and each client
# corrects its gradients by the server's control variate less its own. FedML's aggregator adds the weighted changes up,
# and then puts the last client's change in the place of the sum; the same with the variates, divided by the number of
# clients. All others have trained for nothing. The client computes its new variate and writes it into a dict that is
# thrown away, so that its own stays 0 and the correction is the server's alone. Nothing is said, and another order of
# the clients gives another model. SCAFFOLD is one of the optimizers that the simulation offers by name. In FedAvg and
# FedProx of the same function the sums are right.
#
# hypha_ray isn't touched: it has no SCAFFOLD.
#
# Seen with fedml 0.9.6, torch 2.13.0, numpy 1.26.4, Python 3.11 (3 clients with one label each, 40 rounds):
#   FedML, clients in order [0, 1, 2]: accuracy 37 %
#     the server's step is the last client's True, the clients' own variates are 0 True
#   by the paper, clients in order [0, 1, 2]: accuracy 100 %
#     the server's step is the last client's False, the clients' own variates are 0 False
#   FedML, clients in order [2, 1, 0]: accuracy 38 %
#     the server's step is the last client's True, the clients' own variates are 0 True
#   by the paper, clients in order [2, 1, 0]: accuracy 100 %
#     the server's step is the last client's False, the clients' own variates are 0 False
#   FedML, clients in order [0, 2, 1]: accuracy 36 %
#     the server's step is the last client's True, the clients' own variates are 0 True
#   by the paper, clients in order [0, 2, 1]: accuracy 100 %
#     the server's step is the last client's False, the clients' own variates are 0 False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==1.26.4 protobuf==3.20.3 setuptools==79.0.1 boto3==1.44.8 cachetools==8.0.2 \
    chardet==7.7.0 click==8.5.1 dill==0.4.1 docker==7.2.0 fastapi==0.165.0 GPUtil==1.4.0 h5py==3.16.0 httpx==0.28.1 \
    multiprocess==0.70.19 networkx==3.6.1 paho-mqtt==1.6.1 pandas==2.3.3 pathtools==0.1.2 pillow==13.0.0 \
    prettytable==3.18.0 promise==2.3 psutil==7.2.2 pydantic==2.14.4 python-dateutil==2.9.0.post0 \
    python-dotenv==1.2.4 PyYAML==6.0.4 redis==8.1.0 requests==2.34.2 scipy==1.17.1 sentry-sdk==2.75.0 \
    shortuuid==1.0.13 six==1.17.0 SQLAlchemy==2.1.9 tqdm==4.70.1 wget==3.2
"${pip[@]}" --no-deps fedml==0.9.6 wandb==0.13.2

cat > "$work/rounds.py" <<'PY'
import copy
import logging
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

# FedML imports torchvision for attacks and data sets that aren't used here; its wheel isn't for a torch without CUDA.
for name in ("torchvision", "torchvision.transforms", "torchvision.datasets", "torchvision.datasets.utils"):
    sys.modules[name] = MagicMock()
from fedml.ml.aggregator.agg_operator import FedMLAggOperator
from fedml.ml.trainer.scaffold_trainer import ScaffoldModelTrainer
from fedml.simulation.sp.scaffold.client import Client

logging.disable(logging.CRITICAL)
torch.set_num_threads(1)
CLIENTS, SIZE, ROUNDS = 3, 8, 40
ARGS = SimpleNamespace(
    federated_optimizer="SCAFFOLD",
    client_num_in_total=CLIENTS,
    client_num_per_round=CLIENTS,
    client_optimizer="sgd",
    learning_rate=0.05,
    epochs=1,
)
CENTERS = 2 * torch.eye(CLIENTS, SIZE)


def examples(label, count, seed):
    noise = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))
    return CENTERS[label] + 0.5 * noise, torch.full((count,), label)


def accuracy(model):
    unseen = [examples(label, 200, 9) for label in range(CLIENTS)]
    return 100 * torch.cat([model(inputs).argmax(1) == labels for inputs, labels in unseen]).float().mean().item()


def federation():
    torch.manual_seed(0)
    model = torch.nn.Linear(SIZE, CLIENTS)
    trainer = ScaffoldModelTrainer(model, ARGS)
    clients = []
    for label in range(CLIENTS):
        inputs, labels = examples(label, 40, label)
        batches = list(zip(inputs.split(8), labels.split(8)))
        clients.append(Client(label, batches, None, 40, ARGS, "cpu", trainer))
    return model, trainer, clients


def trained(order, by_paper):
    model, trainer, clients = federation()
    weights = copy.deepcopy(trainer.get_model_params())
    control = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for _ in range(ROUNDS):
        replies = []
        for client in (clients[number] for number in order):
            trainer.set_id(client.client_idx)
            change, control_change = client.train(copy.deepcopy(weights), control)
            replies.append((client.get_sample_number(), copy.deepcopy(change), copy.deepcopy(control_change)))
            if by_paper:
                with torch.no_grad():
                    for name, own in client.c_model_local.named_parameters():
                        own += control_change[name]
        changes = [change for _, change, _ in replies]
        if by_paper:
            step = {name: sum(change[name] for change in changes) / CLIENTS for name in weights}
            control_step = {name: sum(change[name] for _, _, change in replies) / CLIENTS for name in weights}
        else:
            step, control_step = FedMLAggOperator.agg(ARGS, replies)
        last = all(torch.equal(step[name], changes[-1][name]) for name in weights)
        for name in weights:
            weights[name] = weights[name] + step[name]
            control[name] = control[name] + control_step[name]
    trainer.set_model_params(weights)
    own = sum(weight.abs().sum() for client in clients for weight in client.c_model_local.parameters())
    print(f"{'by the paper' if by_paper else 'FedML'}, clients in order {order}: accuracy {accuracy(model):.0f} %")
    print(f"  the server's step is the last client's {last}, the clients' own variates are 0 {own.item() == 0}")


for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1]):
    for by_paper in (False, True):
        trained(order, by_paper)
PY
"$work/env/bin/python" -W ignore "$work/rounds.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
