#!/usr/bin/env bash
# declearn 2.9.1: round_reset of seven optimizer modules has no effect: the setting is lost on its way to the clients.
#
# round_reset=True is to forget momentum and squared gradients when a round starts. A client gets its optimizer from the
# server, as what get_config() says, and get_config() of momentum, ewma, yogi-momentum, adagrad, rmsprop, adam and yogi
# leaves round_reset out. The client's default is False, so it begins each round with the moments of its last one. The
# server's own optimizer keeps the setting, but the server never starts a round. Gradient masked averaging loses its
# steps_weighted in the same way: clients always weight by steps. Nothing is said, and a saved optimizer loses it, too.
#
# hypha_ray isn't touched: its optimizers are torch's and its own.
#
# Seen with declearn 2.9.1, scikit-learn 1.9.1, Python 3.11 (changes of a weight in 4 rounds of 3 steps by 1):
#   momentum: a client of a federation 5.610, 12.220, 17.038, 20.551
#   momentum: the same optimizer alone 5.610, 5.610, 5.610, 5.610, and without round_reset 5.610, 12.220, 17.038, 20.551
#   ewma: a client of a federation 0.561, 1.222, 1.704, 2.055
#   ewma: the same optimizer alone 0.561, 0.561, 0.561, 0.561, and without round_reset 0.561, 1.222, 1.704, 2.055
#   adagrad: a client of a federation 2.284, 1.355, 1.065, 0.906
#   adagrad: the same optimizer alone 2.284, 2.284, 2.284, 2.284, and without round_reset 2.284, 1.355, 1.065, 0.906
#   rmsprop: a client of a federation 7.377, 4.729, 3.987, 3.627
#   rmsprop: the same optimizer alone 7.377, 7.377, 7.377, 7.377, and without round_reset 7.377, 4.729, 3.987, 3.627
#   AveragingAggregator, changes of 1 and 9, steps_weighted=True: 8.2
#   AveragingAggregator, changes of 1 and 9, steps_weighted=False: 5
#   GradientMaskedAveraging, changes of 1 and 9, steps_weighted=True: 8.2
#   GradientMaskedAveraging, changes of 1 and 9, steps_weighted=False: 8.2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 scikit-learn==1.9.1 websockets==13.1 declearn==2.9.1

cat > "$work/reset.py" <<'PY'
import asyncio
import logging
import socket

import numpy as np
from declearn.aggregator import AveragingAggregator, GradientMaskedAveraging
from declearn.communication import NetworkClientConfig, NetworkServerConfig
from declearn.dataset import InMemoryDataset
from declearn.main import FederatedClient, FederatedServer
from declearn.main.config import FLOptimConfig, FLRunConfig
from declearn.model.sklearn import NumpyVector, SklearnSGDModel
from declearn.optimizer import Optimizer
from sklearn.linear_model import SGDRegressor

logging.disable(logging.WARNING)
ROUNDS, STEPS = 4, 3


class Watched(Optimizer):
    """A server's optimizer that writes down the weight after each round."""

    def apply_gradients(self, model, gradients):
        super().apply_gradients(model, gradients)
        self.weights.append(float(model.get_weights().coefs["coef"][0]))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def federation(at_clients, aggregator, sizes, rounds):
    port = free_port()
    regressor = SGDRegressor(loss="epsilon_insensitive", epsilon=0.0, penalty=None, fit_intercept=False)
    optimizer = Watched(lrate=1.0)
    optimizer.weights = [0.0]
    server = FederatedServer(
        SklearnSGDModel(regressor),
        NetworkServerConfig(protocol="websockets", host="127.0.0.1", port=port, heartbeat=0.1),
        FLOptimConfig.from_params(aggregator=aggregator, client_opt=at_clients, server_opt=optimizer),
    )
    clients = [
        FederatedClient(
            NetworkClientConfig(protocol="websockets", server_uri=f"ws://127.0.0.1:{port}", name=f"client {size}"),
            InMemoryDataset(np.ones((size, 1)), np.full(size, 1e6)),
            verbose=False,
        )
        for size in sizes
    ]
    config = FLRunConfig.from_params(
        rounds=rounds,
        register={"min_clients": len(sizes), "max_clients": len(sizes), "timeout": 60},
        training={"batch_size": 1, "n_epoch": 1},
        evaluate={"batch_size": 8},
    )
    await asyncio.gather(server.async_run(config), *(client.async_run() for client in clients))
    return np.diff(optimizer.weights)


def alone(modules):
    model = SklearnSGDModel(SGDRegressor(fit_intercept=False))
    model.initialize({"features_shape": (1,), "data_type": "float64"})
    optimizer = Optimizer(1.0, modules=modules)
    weights = [0.0]
    for _ in range(ROUNDS):
        optimizer.start_round()
        for _ in range(STEPS):
            optimizer.apply_gradients(model, NumpyVector({"coef": np.array([-1.0]), "intercept": np.array([0.0])}))
        weights.append(float(model.get_weights().coefs["coef"][0]))
    return np.diff(weights)


def shown(changes):
    return ", ".join(f"{change:.3f}" for change in changes)


for name in ("momentum", "ewma", "adagrad", "rmsprop"):
    kept, reset = ([(name, {"round_reset": setting})] for setting in (False, True))
    seen = asyncio.run(federation({"lrate": 1.0, "modules": reset}, "averaging", [STEPS], ROUNDS))
    print(f"{name}: a client of a federation {shown(seen)}")
    print(f"{name}: the same optimizer alone {shown(alone(reset))}, and without round_reset {shown(alone(kept))}")
for aggregator in (AveragingAggregator, GradientMaskedAveraging):
    for weighted in (True, False):
        (change,) = asyncio.run(federation({"lrate": 1.0}, aggregator(steps_weighted=weighted), [1, 9], 1))
        print(f"{aggregator.__name__}, changes of 1 and 9, steps_weighted={weighted}: {change:g}")
PY
"$work/env/bin/python" -W ignore "$work/reset.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
