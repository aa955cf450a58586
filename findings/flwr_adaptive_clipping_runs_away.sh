#!/usr/bin/env bash
# Flower 1.42.0: adaptive clipping runs away from the quantile it is to find, to 0 or without end, and its noise is
# another's.
#
# The DifferentialPrivacy...AdaptiveClipping strategies are to find the length to which clients' updates are clipped: by
# the paper they name (arXiv 1905.03871) the norm is multiplied by exp(-rate * (b - quantile)), where b is the share of
# updates that weren't clipped. Flower counts those that were, under the name of norm bit, and keeps the sign. So a norm
# that is too short gets shorter and one that is too long gets longer, by up to a tenth a round: nothing holds it. From
# 0.1, the documented default, with updates of length 1, it is 0.0000045 after 100 rounds, and training stands still;
# from above the quantile it grows until nothing is clipped, and the noise of privacy, which is a multiple of it, drowns
# the model. A quantile of 0.5, the default, means the same by either reading of "quantile of updates which should be
# clipped".
#
# The noise of a round is drawn after the norm was changed, in proportion to the next round's norm. While the norm
# shrinks it is less than the noise multiplier promises, and so is the privacy. Both are the same in client-side
# clipping, which shares the two functions, and in the older strategies of flwr.server. Nothing is said.
#
# hypha_ray isn't touched: it has no differential privacy.
#
# Seen with flwr 1.42.0, numpy 2.4.6, Python 3.11 (100 clients, half of the updates shorter than 1, nine in ten than
# 1.9):
#   quantile 0.5, from 0.1: 4.5e-06 after 100 rounds, by the paper 0.99
#   quantile 0.5, from 0.9: 0.00011 after 100 rounds, by the paper 0.99
#   quantile 0.5, from 1.1: 1e+04 after 100 rounds, by the paper 1
#   quantile 0.5, from 10.0: 2.2e+05 after 100 rounds, by the paper 1
#   quantile 0.9, from 0.1: 0.014 after 100 rounds, by the paper 2
#   quantile 0.9, from 0.9: 3.2e+07 after 100 rounds, by the paper 2
#   quantile 0.9, from 1.1: 5.4e+07 after 100 rounds, by the paper 2
#   quantile 0.9, from 10.0: 6.6e+08 after 100 rounds, by the paper 2
#   clipped to 1, all updates clipped: noise 0.89, by the paper 1.01; the next norm is 0.89
#   clipped to 1, none clipped: noise 1.10, by the paper 1.01; the next norm is 1.10
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 flwr==1.42.0

cat > "$work/clipping.py" <<'PY'
import logging
import math

import numpy as np
from flwr.common import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.disable(logging.CRITICAL)
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # A server sets them when it starts the app.
CLIENTS = 100
# Of these lengths of the clients' updates half are below 1, and nine in ten below 1.9.
LENGTHS = np.exp(0.5 * np.sort(np.random.default_rng(0).standard_normal(CLIENTS)))
LENGTHS /= np.median(LENGTHS)


class Grid:
    def get_node_ids(self):
        return list(range(1, CLIENTS + 1))


def record(weights):
    return ArrayRecord({"weights": Array(np.asarray(weights))})


def reply(weights):
    request = Message(content=RecordDict(), dst_node_id=1, message_type="train")
    content = RecordDict({"arrays": record(weights), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=request)


def one_round(strategy, number, lengths, width):
    list(strategy.configure_train(number, record(np.zeros(width)), ConfigRecord(), Grid()))
    updates = [np.full(width, length / width**0.5) for length in lengths]
    result, _ = strategy.aggregate_train(number, [reply(update) for update in updates])
    return result["weights"].numpy()


def made(norm, **options):
    options = {"noise_multiplier": 0.0, "num_sampled_clients": CLIENTS, "initial_clipping_norm": norm, **options}
    return DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), **options)


def by_paper(norm, rounds, quantile, rate=0.2):
    for _ in range(rounds):
        norm *= math.exp(-rate * (np.mean(LENGTHS <= norm) - quantile))
    return norm


for quantile in (0.5, 0.9):
    for norm in (0.1, 0.9, 1.1, 10.0):
        strategy = made(norm, target_clipped_quantile=quantile)
        for number in range(1, 101):
            one_round(strategy, number, LENGTHS, 4)
        paper = by_paper(norm, 100, quantile)
        found = strategy.clipping_norm
        print(f"quantile {quantile}, from {norm}: {found:.2g} after 100 rounds, by the paper {paper:.2g}")
np.random.seed(0)
for length, kind in ((2.0, "all updates clipped"), (0.5, "none clipped")):
    strategy = made(1.0, noise_multiplier=1.0)
    weights = one_round(strategy, 1, [length] * CLIENTS, 40000)
    noise = (weights - min(length, 1.0) / len(weights) ** 0.5).std() * CLIENTS
    due, following = strategy.noise_multiplier, strategy.clipping_norm
    print(f"clipped to 1, {kind}: noise {noise:.2f}, by the paper {due:.2f}; the next norm is {following:.2f}")
PY
"$work/env/bin/python" -W ignore "$work/clipping.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
