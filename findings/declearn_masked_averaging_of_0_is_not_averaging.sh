#!/usr/bin/env bash
# declearn 2.9.1: masked averaging with a threshold of 0 is not averaging: it drops what two clients disagree on.
#
# GradientMaskedAveraging multiplies a coordinate by how far the clients agree on its sign, or by 1 where the agreement
# reaches the threshold. Its docstring says "1 if agree >= threshold", and "FedAvg being the 0 edge case". The code asks
# for more than the threshold. Agreement takes few values, so that it meets the threshold is common. With two clients,
# it is 0 or 1, and at 0 a coordinate becomes 0 in the mode that is to be plain averaging: about half of them. With four
# clients it is 0, 0.5 or 1: a threshold of 0.5 does what one of 0.99 does. Nothing is said.
#
# hypha_ray isn't touched: its averaging has no masks.
#
# Seen with declearn 2.9.1, numpy 2.4.6, Python 3.11 (1000 random coordinates a client):
#   2 clients, threshold 0: 47 % are 0, 53 % the average, 53 % as documented
#   2 clients, threshold 0.25: 47 % are 0, 53 % the average, 100 % as documented
#   2 clients, threshold 1: 47 % are 0, 53 % the average, 100 % as documented
#   4 clients, threshold 0: 37 % are 0, 63 % the average, 63 % as documented
#   4 clients, threshold 0.25: 37 % are 0, 63 % the average, 100 % as documented
#   4 clients, threshold 0.5: 37 % are 0, 13 % the average, 50 % as documented
#   4 clients, threshold 0.99: 37 % are 0, 13 % the average, 100 % as documented
#   4 clients, threshold 1: 37 % are 0, 13 % the average, 100 % as documented
#   4 clients, thresholds of 0.5 and 0.99 are the same: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 scikit-learn==1.9.1 declearn==2.9.1

cat > "$work/masks.py" <<'PY'
import numpy as np
from declearn.aggregator import AveragingAggregator, GradientMaskedAveraging
from declearn.model.sklearn import NumpyVector

CLIENTS = np.random.default_rng(0).normal(size=(4, 1000))


def aggregated(aggregator, updates):
    total = sum(aggregator.prepare_for_sharing(NumpyVector({"w": update}), n_steps=10) for update in updates)
    return aggregator.finalize_updates(total).coefs["w"]


def documented(threshold, updates):
    agreement = np.abs(np.sign(updates).mean(axis=0))
    return np.where(agreement >= threshold, 1.0, agreement) * updates.mean(axis=0)


def share(first, second):
    return f"{100 * np.isclose(first, second).mean():.0f} %"


for clients, thresholds in ((2, (0.0, 0.25, 1.0)), (4, (0.0, 0.25, 0.5, 0.99, 1.0))):
    updates = CLIENTS[:clients]
    average = aggregated(AveragingAggregator(), updates)
    assert np.allclose(average, updates.mean(axis=0))
    for threshold in thresholds:
        masked = aggregated(GradientMaskedAveraging(threshold), updates)
        shares = f"{share(masked, 0)} are 0, {share(masked, average)} the average"
        right = share(masked, documented(threshold, updates))
        print(f"{clients} clients, threshold {threshold:g}: {shares}, {right} as documented")
half, more = (aggregated(GradientMaskedAveraging(threshold), CLIENTS) for threshold in (0.5, 0.99))
print(f"4 clients, thresholds of 0.5 and 0.99 are the same: {np.array_equal(half, more)}")
PY
"$work/env/bin/python" -W ignore "$work/masks.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
