#!/usr/bin/env bash
# datasets 5.2.0: take(n) and skip(n) of a stream are other rows with each number of loader workers: held-out rows are
# trained on, and others are never read.
#
# The documentation splits a stream by take(n) for validation and skip(n) for training. A DataLoader with workers gives each
# its own shards, and n is divided between the workers, so that the first rows of each worker's shards are taken or left.
# With the same number of workers on both sides the parts are disjoint. With 0 for validation and 2 for training, the common
# case, a third of the validation set is trained on here; with other shards it is more. As many rows are in neither part.
# Where shards are smaller than a worker's share, take(n) gives fewer than n rows. No warning. (huggingface/datasets 8568,
# mended in this release, was about skip() after split_dataset_by_node.)
#
# hypha_ray isn't touched: it has no loaders of torch, and holds rows out once, when it prepares a dataset.
#
# Seen with datasets 5.2.0, torch 2.13.0, Python 3.11 (40 rows in 4 shards, 12 of them taken without workers):
#   training with 0 workers: in both [], in neither []
#   training with 2 workers: in both [6, 7, 8, 9], in neither [12, 13, 14, 15]
#   training with 4 workers: in both [3, 4, 5, 6, 7, 8, 9], in neither [12, 20, 21, 22, 30, 31, 32]
#   take(20) of shards of 2 and 30 rows: 20 rows without workers, 12 with 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 datasets==5.2.0

cat > "$work/split.py" <<'PY'
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader


def number(row):
    return row["i"]


def numbers(stream, workers):
    return sorted(DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=number))


def rows_of(sizes):
    for size in sizes:
        yield from ({"i": n} for n in range(size))


if __name__ == "__main__":
    stream = Dataset.from_dict({"i": list(range(40))}).to_iterable_dataset(num_shards=4)
    held_out = set(numbers(stream.take(12), 0))
    for workers in (0, 2, 4):
        trained = set(numbers(stream.skip(12), workers))
        both, neither = sorted(held_out & trained), sorted(set(range(40)) - held_out - trained)
        print(f"training with {workers} workers: in both {both}, in neither {neither}")
        taken = set(numbers(stream.take(12), workers))
        assert not taken & trained and taken | trained == set(range(40))
    unequal = IterableDataset.from_generator(rows_of, gen_kwargs={"sizes": [2, 30]})
    counts = [len(numbers(unequal.take(20), workers)) for workers in (0, 2)]
    print(f"take(20) of shards of 2 and 30 rows: {counts[0]} rows without workers, {counts[1]} with 2")
PY
HF_HOME="$work/cache" "$work/env/bin/python" "$work/split.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
