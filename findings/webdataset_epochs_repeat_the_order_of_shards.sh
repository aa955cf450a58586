#!/usr/bin/env bash
# webdataset 1.0.2: shardshuffle draws one order of shards, and all epochs have it; with workers detshuffle's epochs have, too.
#
# WebDataset(urls, shardshuffle=100).shuffle(1000) is the usual beginning of a pipeline. Without a seed given, the constructor
# draws one, and the shuffler of shards begins with it anew in each iteration. So each epoch reads the shards in the order of
# the first, by chance another one in each process. Only the buffer of .shuffle() differs, which mixes neighbouring shards.
# Where shards differ by source, language or day, every epoch has the same drift at the same steps, and with a fixed number
# of steps an epoch the same shards are never read. detshuffle=True counts epochs, but in the process that iterates: workers
# of a loader begin anew each epoch, with count 0, if they aren't persistent. SimpleShardList(seed=True), which is
# documented to shuffle by a random seed, keeps one order, too. Nothing is said. (webdataset/webdataset, pull request 502,
# is open since July 2026 and would draw anew in each iteration of a WebDataset.)
#
# hypha_ray isn't touched: it doesn't read tar files, and draws a new order in each epoch.
#
# Seen with webdataset 1.0.2, torch 2.13.0, Python 3.11 (orders of 16 shards in 10 epochs):
#   shardshuffle=16, no workers: 1
#   shardshuffle=16, 1 worker: 1
#   shardshuffle=16, 1 worker, persistent: 1
#   detshuffle, no workers: 10
#   detshuffle, 1 worker: 1
#   detshuffle, 1 worker, persistent: 10
#   SimpleShardList(seed=True): 1
#   half an epoch of steps: 8 of 16 shards are read in 10 epochs
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 webdataset==1.0.2

cat > "$work/epochs.py" <<'PY'
import sys

import webdataset as wds

FOLDER, SHARDS, EPOCHS = sys.argv[1], 16, 10
URLS = [f"{FOLDER}/{shard:02}.tar" for shard in range(SHARDS)]


def shard_of(sample):
    return int(sample["shard.txt"])


def written():
    for shard, url in enumerate(URLS):
        with wds.TarWriter(url) as writer:
            writer.write({"__key__": f"{shard}", "shard.txt": str(shard)})


def loader(workers, persistent, **options):
    data = wds.WebDataset(URLS, shardshuffle=SHARDS, **options).map(shard_of)
    return wds.WebLoader(data, batch_size=None, num_workers=workers, persistent_workers=persistent)


def orders(data):
    epochs = {tuple(data) for _ in range(EPOCHS)}
    assert all(sorted(epoch) == list(range(SHARDS)) for epoch in epochs)
    return len(epochs)


written()
for name, options in {"shardshuffle=16": {}, "detshuffle": {"detshuffle": True, "seed": 0}}.items():
    print(f"{name}, no workers: {orders(loader(0, False, **options))}")
    print(f"{name}, 1 worker: {orders(loader(1, False, **options))}")
    print(f"{name}, 1 worker, persistent: {orders(loader(1, True, **options))}")
listed = wds.SimpleShardList(URLS, seed=True)
print(f"SimpleShardList(seed=True): {len({tuple(entry['url'] for entry in listed) for _ in range(EPOCHS)})}")
short = wds.WebDataset(URLS, shardshuffle=SHARDS).map(shard_of).slice(SHARDS // 2)
read = {shard for _ in range(EPOCHS) for shard in short}
print(f"half an epoch of steps: {len(read)} of {SHARDS} shards are read in {EPOCHS} epochs")
PY
mkdir "$work/shards"
"$work/env/bin/python" "$work/epochs.py" "$work/shards" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
