#!/usr/bin/env bash
# datasets 5.2.0: set_epoch(n) shuffles the shards of a stream that was never shuffled, and makes all seeds one.
#
# By the documentation set_epoch tells a shuffled stream which epoch it is in, so that its seed becomes the initial
# seed plus the epoch. In this release each epoch but 0 shuffles the shards of any stream, by a generator of the epoch alone.
# So a stream for evaluation has its rows in another order in the second pass of accelerate's loader, which calls set_epoch
# itself. Rows that are held out by their place (filter with_indices) are others in each epoch: what was held out is trained
# on, and nothing says so. A mixture (interleave_datasets with probabilities and a seed) draws its sources by the seed
# in epoch 0, and by the epoch alone from then on: runs with 20 seeds have one order.
#
# hypha_ray isn't touched: it reads a stream once, in order, when it prepares a dataset, and sets no epoch.
#
# Seen with datasets 5.2.0, Python 3.11 (16 rows in 4 shards; every seventh is held out; epoch 1 happens to keep the order):
#   epoch 0, never shuffled: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
#   epoch 0, of [0, 7, 14], held out, in training: []
#   epoch 0, mixtures of 20 seeds: 20 orders
#   epoch 1, never shuffled: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
#   epoch 1, of [0, 7, 14], held out, in training: []
#   epoch 1, mixtures of 20 seeds: 1 orders
#   epoch 2, never shuffled: 12 13 14 15 8 9 10 11 0 1 2 3 4 5 6 7
#   epoch 2, of [0, 7, 14], held out, in training: [0, 7, 14]
#   epoch 2, mixtures of 20 seeds: 1 orders
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0

cat > "$work/epochs.py" <<'PY'
from datasets import Dataset, interleave_datasets


def numbers(stream, epoch):
    stream.set_epoch(epoch)
    return [row["i"] for row in stream]


def stream(first, count, shards):
    return Dataset.from_dict({"i": list(range(first, first + count))}).to_iterable_dataset(num_shards=shards)


plain = stream(0, 16, 4)
training = plain.filter(lambda row, place: place % 7 != 0, with_indices=True)
held_out = set(range(16)) - set(numbers(training, 0))
for epoch in range(3):
    print(f"epoch {epoch}, never shuffled:", *numbers(plain, epoch))
    trained = held_out & set(numbers(training, epoch))
    print(f"epoch {epoch}, of {sorted(held_out)}, held out, in training: {sorted(trained)}")
    orders = set()
    for seed in range(20):
        mixture = interleave_datasets([stream(0, 40, 1), stream(100, 40, 1)], probabilities=[0.5, 0.5], seed=seed)
        orders.add(tuple(numbers(mixture.shuffle(seed=seed, buffer_size=1), epoch)))
    print(f"epoch {epoch}, mixtures of 20 seeds: {len(orders)} orders")
PY
HF_HOME="$work/cache" "$work/env/bin/python" "$work/epochs.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
