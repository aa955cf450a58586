#!/usr/bin/env bash
# Flower 1.42.0: four strategies and a wrapper mix up the weights of clients that list them in another order.
#
# An ArrayRecord is a dict of named arrays. A round goes on only if all replies have the same names; their order isn't
# compared. FedAvg, FedMedian, FedTrimmedAvg and FedAdam aggregate by name. FedAvgM, QFedAvg, Bulyan and the wrappers that
# clip on the server for differential privacy take the arrays as lists: they subtract the reply's first array from the
# server's first one, whatever their names are, and give the results the names in one of the two orders. Where shapes are
# equal, as in the layers of a transformer, weights of one layer become those of another, or a mean of both, and nothing is
# said. Krum and MultiKrum compare clients in this way, too. Orders differ easily: a state_dict has that of construction, a
# safetensors file has them sorted, and clients may be written with other frameworks than the server.
#
# hypha_ray isn't touched: tensors have one layout by their names, and contributions are ranges of it.
#
# Seen with flwr 1.42.0, numpy 2.4.6, Python 3.11 (weights of three layers are 1, 2 and 3 at the server, each client adds
# 0.1, and the server's rate of FedAvgM is 0.5; seven clients list the layers as the server does or reversed):
#   FedAvg: 1.10 2.10 3.10; three reversed: 1.10 2.10 3.10; all reversed: 1.10 2.10 3.10
#   FedMedian: 1.10 2.10 3.10; three reversed: 1.10 2.10 3.10; all reversed: 1.10 2.10 3.10
#   FedTrimmedAvg: 1.10 2.10 3.10; three reversed: 1.10 2.10 3.10; all reversed: 1.10 2.10 3.10
#   FedAvgM: 1.05 2.05 3.05; three reversed: 2.05 2.05 2.05; all reversed: 2.05 2.05 2.05
#   QFedAvg: 1.09 2.09 3.09; three reversed: 1.06 2.01 2.95; all reversed: 1.06 2.00 2.94
#   Bulyan: 1.10 2.10 3.10; three reversed: 1.96 2.10 2.24; all reversed: 1.10 2.10 3.10
#   DifferentialPrivacyServerSideFixedClipping: 1.10 2.10 3.10; three reversed: 1.77 2.06 2.36; all reversed: 2.66 2.02 1.37
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 flwr==1.42.0

cat > "$work/rounds.py" <<'PY'
import logging

import numpy as np
from flwr.common import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.CRITICAL)
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # A server sets them when it starts the app.
LAYERS = {"first": 1.0, "second": 2.0, "third": 3.0}
CLIENTS = 7


class Grid:
    def get_node_ids(self):
        return list(range(1, CLIENTS + 1))


def arrays(order, change=0.0):
    return ArrayRecord({name: Array(np.full((2, 2), LAYERS[name] + change, np.float32)) for name in order})


def reply(order):
    metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
    request = Message(content=RecordDict(), dst_node_id=1, message_type="train")
    return Message(RecordDict({"arrays": arrays(order, 0.1), "metrics": metrics}), reply_to=request)


def aggregated(strategy, reversed_clients):
    names = list(LAYERS)
    list(strategy.configure_train(1, arrays(names), ConfigRecord(), Grid()))
    replies = [reply(names[::-1] if client < reversed_clients else names) for client in range(CLIENTS)]
    result, _ = strategy.aggregate_train(1, replies)
    return " ".join(f"{result[name].numpy().mean():.2f}" for name in names)


clipped = {"noise_multiplier": 0.0, "clipping_norm": 1.0, "num_sampled_clients": CLIENTS}
for make in (
    lambda: strategies.FedAvg(),
    lambda: strategies.FedMedian(),
    lambda: strategies.FedTrimmedAvg(),
    lambda: strategies.FedAvgM(server_learning_rate=0.5),
    lambda: strategies.QFedAvg(client_learning_rate=0.1),
    lambda: strategies.Bulyan(),
    lambda: strategies.DifferentialPrivacyServerSideFixedClipping(strategies.FedAvg(), **clipped),
):
    rounds = [aggregated(make(), count) for count in (0, 3, 7)]
    print(f"{type(make()).__name__}: {rounds[0]}; three reversed: {rounds[1]}; all reversed: {rounds[2]}")
PY
"$work/env/bin/python" "$work/rounds.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
