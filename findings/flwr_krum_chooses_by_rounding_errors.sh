#!/usr/bin/env bash
# Flower 1.42.0: Krum, MultiKrum and Bulyan choose clients by rounding errors if the clients differ little.
#
# Krum keeps the client whose weights are nearest to the others', so that those of malicious ones are left out. Flower
# computes the squared distance of x and y as |x|^2 + |y|^2 - 2 xy, of all weights, in the clients' float32. Three
# numbers as large as the model are subtracted to get one as small as a round's change squared. If weights change by
# less than about a ten-thousandth of their size, as in fine-tuning with small rates, nothing of it is left: distances
# are rounding errors (here a hundred times the true ones), some are negative, a client isn't the nearest to itself, and
# a malicious one is chosen as often as by lot (8 of 40 rounds with 2 of 10 malicious, where this was seen). The
# differences, in the same float32 weights, tell them apart each time. Nothing is said; the docstrings give the
# formula's name, "squared L2 distances".
#
# hypha_ray isn't touched: it has no Krum.
#
# Seen with flwr 1.42.0, numpy 2.4.6, Python 3.11 (weights of size 0.05; malicious clients are three times as far; 40
# rounds):
#   changes of 0.001: malicious clients chosen False, by differences False
#   changes of 3e-06: malicious clients chosen True, by differences False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 flwr==1.42.0

cat > "$work/krum.py" <<'PY'
import logging

import numpy as np
from flwr.common import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Krum
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.CRITICAL)
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # A server sets them when it starts the app.
CLIENTS, MALICIOUS, ROUNDS, SIZE = 10, 2, 40, 200_000


class Grid:
    def get_node_ids(self):
        return list(range(1, CLIENTS + 1))


def record(weights):
    return ArrayRecord({"weights": Array(weights)})


def reply(weights):
    request = Message(content=RecordDict(), dst_node_id=1, message_type="train")
    content = RecordDict({"arrays": record(weights), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=request)


def chosen_by_flower(weights):
    strategy = Krum(num_malicious_nodes=MALICIOUS)
    list(strategy.configure_train(1, record(weights[0]), ConfigRecord(), Grid()))
    result, _ = strategy.aggregate_train(1, [reply(one) for one in weights])
    result = result["weights"].numpy()
    return next(number for number, one in enumerate(weights) if np.array_equal(one, result))


def chosen_by_hand(weights):
    sums = []
    for one in weights:
        distances = sorted(np.square(one.astype(np.float64) - other).sum() for other in weights)
        sums.append(sum(distances[1 : CLIENTS - MALICIOUS - 1]))
    return int(np.argmin(sums))


for change in (1e-3, 3e-6):
    draw = np.random.default_rng(0)
    flower = hand = 0
    for _ in range(ROUNDS):
        model = 0.05 * draw.standard_normal(SIZE)
        # The honest differ from each other by some change, the malicious are three times as far away.
        lengths = np.where(np.arange(CLIENTS) < MALICIOUS, 3, 1) * change
        weights = [(model + length * draw.standard_normal(SIZE)).astype(np.float32) for length in lengths]
        flower += chosen_by_flower(weights) < MALICIOUS
        hand += chosen_by_hand(weights) < MALICIOUS
    print(f"changes of {change:g}: malicious clients chosen {flower > 0}, by differences {hand > 0}")
PY
"$work/env/bin/python" -W ignore "$work/krum.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
