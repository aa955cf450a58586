#!/usr/bin/env bash
# litdata 0.2.76: batching_method="per_stream" doesn't keep the weights of its streams, and is resumed on others.
#
# CombinedStreamingDataset mixes streams by weights, "the sampling ratio" by its documentation. With "stratified", the
# default, each row is drawn by them. With "per_stream" each batch is of one stream. There the next stream is drawn again
# until it is another one than the last, so two streams take turns whatever their weights are: 0.9 and 0.1 give half of the
# batches each. With more streams the share is w(1-w), scaled to a sum of 1: 0.8, 0.1, 0.1 give 0.47, 0.26, 0.26.
# And a state doesn't hold how many draws there were. A loader that resumes draws once for each row that was read. That is
# right with "stratified"; here the run drew once or more for each batch. So it goes on with other streams than the run that
# wasn't interrupted, and reads other rows until the epoch ends. No warning.
#
# hypha_ray isn't touched: it mixes its datasets itself.
#
# Seen with litdata 0.2.76, torch 2.13.0, Python 3.11 (batches of 3 rows; A, B and C are the streams of the batches):
#   stratified, weights 0.9 0.1: shares 0.90 0.10
#   per_stream, weights 0.9 0.1: shares 0.50 0.50
#     w(1-w), scaled: 0.50 0.50
#   stratified, weights 0.8 0.1 0.1: shares 0.79 0.11 0.10
#   per_stream, weights 0.8 0.1 0.1: shares 0.47 0.27 0.26
#     w(1-w), scaled: 0.47 0.26 0.26
#   stratified, resumed after 4 batches: the same rows
#   stratified, resumed after 12 batches: the same rows
#   per_stream: ACBABACABABACABCACBACABC, resumed after 4: ACBABABACABCACBACABCACBA
#   per_stream: ACBABACABABACABCACBACABC, resumed after 12: ACBABACABABACBACABCACBAB
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy litdata==0.2.76

cat > "$work/streams.py" <<'PY'
import sys
from pathlib import Path

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming import Cache

ROWS, BATCH = 6000, 3


def written(folder, first):
    cache = Cache(input_dir=str(folder), chunk_size=1000)
    for row in range(ROWS):
        cache[row] = first + row
    cache.done()
    cache.merge()
    return str(folder)


def loader(folders, weights, method):
    streams = [StreamingDataset(folder) for folder in folders[: len(weights)]]
    mixed = CombinedStreamingDataset(
        streams, weights=list(weights), seed=1, iterate_over_all=False, batching_method=method
    )
    return StreamingDataLoader(mixed, batch_size=BATCH)


def shares(rows, count):
    return " ".join(f"{sum(row // ROWS == stream for row in rows) / len(rows):.2f}" for stream in range(count))


def batches(source, limit=None):
    read = []
    for batch in source:
        read.append([int(row) for row in batch])
        if len(read) == limit:
            break
    return read


def letters(read):
    return "".join("ABC"[batch[0] // ROWS] for batch in read)


def resumed(folders, weights, method, at):
    stopped = loader(folders, weights, method)
    read = batches(stopped, at)
    again = loader(folders, weights, method)
    again.load_state_dict(stopped.state_dict())
    return read + batches(again, 24 - at)


work = Path(sys.argv[1])
folders = [written(work / f"stream{number}", number * ROWS) for number in range(3)]
for weights in [(0.9, 0.1), (0.8, 0.1, 0.1)]:
    by_formula = [weight * (1 - weight) for weight in weights]
    expected = " ".join(f"{share / sum(by_formula):.2f}" for share in by_formula)
    for method in ["stratified", "per_stream"]:
        rows = [row for batch in batches(loader(folders, weights, method), 1500) for row in batch]
        print(f"{method}, weights {' '.join(map(str, weights))}: shares {shares(rows, len(weights))}")
    print(f"  w(1-w), scaled: {expected}")
for method in ["stratified", "per_stream"]:
    whole = batches(loader(folders, (0.5, 0.3, 0.2), method), 24)
    for at in [4, 12]:
        read = resumed(folders, (0.5, 0.3, 0.2), method, at)
        assert read[:at] == whole[:at]
        if method == "stratified":
            print(f"stratified, resumed after {at} batches: {'the same rows' if read == whole else 'other rows'}")
        else:
            print(f"per_stream: {letters(whole)}, resumed after {at}: {letters(read)}")
PY
HOME="$work" "$work/env/bin/python" "$work/streams.py" "$work" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
