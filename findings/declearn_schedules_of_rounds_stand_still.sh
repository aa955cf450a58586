#!/usr/bin/env bash
# declearn 2.9.1: learning rates that go by rounds never move at the server; a warm-up there keeps the rate 0 for good.
#
# Schedules have step_level=False, or are warmup-rounds, to change from round to round. An optimizer counts rounds in
# start_round(). The clients' loop calls it; the server's never does, so its schedule stays at round -1. A warm-up over
# rounds is then 0 in every round: all clients train, and the global model never changes. A decay stays above its own
# base. Clients count, but an optimizer fetches its next rate at the end of a step: the first step of a round has the
# rate of the round before, and the first of all that of round -1. cosine-annealing-warm-restarts takes its cycles from
# the number of steps even with step_level=False, and the place in a cycle from the number of rounds, which is never
# taken modulo the period: after one period the rate is its least, and no restart comes. The docstrings promise all of
# it, and nothing is said.
#
# hypha_ray isn't touched: its outer rate is a number, and its schedules count their own steps.
#
# Seen with declearn 2.9.1, scikit-learn 1.9.1, Python 3.11 (changes of a weight in 5 rounds of 3 steps, one client,
# a gradient of 1, and a rate of 1 on the other side):
#   server, constant: 3, 3, 3, 3, 3; by the schedule 3, 3, 3, 3, 3
#   server, linear-decay: 3.6, 3.6, 3.6, 3.6, 3.6; by the schedule 3, 2.4, 1.8, 1.2, 0.6
#   server, warmup-rounds: 0, 0, 0, 0, 0; by the schedule 1.5, 3, 3, 3, 3
#   server, warm-restarts: 1.5, 1.5, 1.5, 1.5, 1.5; by the schedule 3, 1.5, 3, 1.5, 3
#   clients, constant: 3, 3, 3, 3, 3; by the schedule 3, 3, 3, 3, 3
#   clients, linear-decay: 3.2, 2.6, 2, 1.4, 0.8; by the schedule 3, 2.4, 1.8, 1.2, 0.6
#   clients, warmup-rounds: 1, 2.5, 3, 3, 3; by the schedule 1.5, 3, 3, 3, 3
#   clients, warm-restarts: 2.5, 2, 0.5, 0, 0; by the schedule 3, 1.5, 3, 1.5, 3
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 scikit-learn==1.9.1 websockets==13.1 declearn==2.9.1

cat > "$work/rounds.py" <<'PY'
import asyncio
import logging
import math
import socket

import numpy as np
from declearn.communication import NetworkClientConfig, NetworkServerConfig
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient, FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.model.sklearn import SklearnSGDModel
from declearn.optimizer import Optimizer
from sklearn.linear_model import SGDRegressor

logging.disable(logging.WARNING)
STEPS = 3


class Watched(Optimizer):
    """A server's optimizer that writes down the weight after each round."""

    def apply_gradients(self, model, gradients):
        super().apply_gradients(model, gradients)
        self.weights.append(float(model.get_weights().coefs["coef"][0]))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def federation(at_clients, at_server, rounds):
    port = free_port()
    regressor = SGDRegressor(loss="epsilon_insensitive", epsilon=0.0, penalty=None, fit_intercept=False)
    optimizer = Watched(lrate=at_server)
    optimizer.weights = [0.0]
    server = FederatedServer(
        SklearnSGDModel(regressor),
        NetworkServerConfig(protocol="websockets", host="127.0.0.1", port=port, heartbeat=0.1),
        FLOptimConfig.from_params(aggregator="averaging", client_opt={"lrate": at_clients}, server_opt=optimizer),
    )
    client = FederatedClient(
        NetworkClientConfig(protocol="websockets", server_uri=f"ws://127.0.0.1:{port}", name="client"),
        InMemoryDataset(np.ones((8, 1)), np.full(8, 1e6)),
        verbose=False,
    )
    config = FLRunConfig.from_params(
        rounds=rounds,
        register={"min_clients": 1, "max_clients": 1, "timeout": 60},
        training={"batch_size": 8, "n_steps": STEPS, "n_epoch": None},
        evaluate={"batch_size": 8},
    )
    await asyncio.gather(server.async_run(config), client.async_run())
    return np.diff(optimizer.weights)


def shown(changes):
    return ", ".join(f"{change:.4g}" for change in changes)


SCHEDULES = {
    "constant": (1.0, lambda number: 1.0),
    "linear-decay": (
        ("linear-decay", {"base": 1.0, "rate": 0.2, "step_level": False}),
        lambda number: 1 - 0.2 * number,
    ),
    "warmup-rounds": (("warmup-rounds", {"base": 1.0, "warmup": 2}), lambda number: min(1, (number + 1) / 2)),
    "warm-restarts": (
        ("cosine-annealing-warm-restarts", {"base": 0.0, "max_lr": 1.0, "period": 2, "step_level": False}),
        lambda number: (1 + math.cos(math.pi * (number % 2) / 2)) / 2,
    ),
}
for place in ("server", "clients"):
    for name, (schedule, rate) in SCHEDULES.items():
        rates = {"server": (1.0, schedule), "clients": (schedule, 1.0)}[place]
        seen = asyncio.run(federation(*rates, rounds=5))
        print(f"{place}, {name}: {shown(seen)}; by the schedule {shown(STEPS * rate(number) for number in range(5))}")
PY
"$work/env/bin/python" -W ignore "$work/rounds.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
