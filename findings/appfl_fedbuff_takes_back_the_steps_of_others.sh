#!/usr/bin/env bash
# appfl 1.12.0: FedBuff adds a late client's distance to the newest model, and so takes back what others did meanwhile.
#
# By the paper that the class names, a client of FedBuff sends how far it moved the model that it had downloaded, and the
# server adds K such changes at once. FedBuffAggregator gets the client's model, and subtracts the global model of the time
# when it arrives. That is the client's change less all progress since its download: one that is n versions late and
# changed nothing sets the model back by n versions. Only clients that are never late give FedBuff, and lateness is what it
# is for. (FedAsync is meant to go towards a late model, and its formula is the same here.) staleness_fn makes the step back
# shorter. Nothing is said. With gradient_based=True and clients that send the negated difference it is FedBuff.
#
# hypha_ray isn't touched: a worker of an asynchronous run sends its change.
#
# Seen with appfl 1.12.0, torch 2.13.0, Python 3.11 (one weight; punctual clients have added 1 a version, K = 1, alpha = 1):
#   0 versions late, change 0: 0 becomes 0, by the paper 0
#   1 versions late, change 0: 1 becomes 0, by the paper 1
#   5 versions late, change 0: 5 becomes 0, by the paper 5
#   10 versions late, change 0: 10 becomes 0, by the paper 10
#   0 versions late, change 1: 0 becomes 1, by the paper 1
#   1 versions late, change 1: 1 becomes 1, by the paper 2
#   5 versions late, change 1: 5 becomes 1, by the paper 6
#   10 versions late, change 1: 10 becomes 1, by the paper 11
#   5 versions late, change 1, polynomial: 5 becomes 3.37, by the paper 5.41
#   5 versions late, change 1, sent as a difference: 5 becomes 6, by the paper 6
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 omegaconf==2.3.0 packaging opacus==1.6.0
"${pip[@]}" --no-deps appfl==1.12.0

cat > "$work/late.py" <<'PY'
import torch
from appfl.algorithm.aggregator import FedBuffAggregator
from omegaconf import OmegaConf


def server(**options):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return FedBuffAggregator(model, OmegaConf.create({"K": 1, "alpha": 1.0, "num_clients": 1, **options}))


def moved(state, change):
    return {name: weight + change for name, weight in state.items()}


def uploaded(aggregator, client, downloaded, change):
    sent = moved(downloaded, change)
    if aggregator.aggregator_configs.get("gradient_based", False):
        sent = {name: downloaded[name] - weight for name, weight in sent.items()}
    return aggregator.aggregate(client, sent)["weight"].item()


def late_step(versions, change, **options):
    aggregator = server(**options)
    downloaded = aggregator.get_parameters(client_id="late")
    before = 0.0
    for _ in range(versions):
        before = uploaded(aggregator, "punctual", aggregator.get_parameters(client_id="punctual"), 1.0)
    return before, uploaded(aggregator, "late", downloaded, change)


POLYNOMIAL = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}
for change in (0.0, 1.0):
    for versions in (0, 1, 5, 10):
        before, after = late_step(versions, change)
        print(f"{versions} versions late, change {change:g}: {before:g} becomes {after:g}, by the paper {before + change:g}")
before, after = late_step(5, 1.0, **POLYNOMIAL)
print(f"5 versions late, change 1, polynomial: {before:g} becomes {after:.2f}, by the paper {before + 6**-0.5:.2f}")
before, after = late_step(5, 1.0, gradient_based=True)
print(f"5 versions late, change 1, sent as a difference: {before:g} becomes {after:g}, by the paper {before + 1:g}")
PY
"$work/env/bin/python" -W ignore "$work/late.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
