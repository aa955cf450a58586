#!/usr/bin/env bash
# grain 0.2.18: a state of interleaved files can be set once; set again, the stream leaves rows out and reads others twice.
#
# InterleaveIterDataset reads several files in turns. set_state() keeps the list of open files of the state that it is given,
# and writes into it when it opens the next one. So the state changes with the stream that was set to it. A state that was
# kept to read the same part again, as before each evaluation, or to go back after a bad step, is right for the first
# time, and names files with the places of others from then on. It does no harm before another file is opened. States of
# other streams stay as they are, and a deep copy of this one is right, as is one out of a file. No error, no warning.
#
# hypha_ray isn't touched: it reads its datasets itself.
#
# Seen with grain 0.2.18, numpy 2.4.6, Python 3.11 (five files of 7 rows, three passes over 20 rows; passes 2 and 3 against 1):
#   concatenated, a copy, 0 rows read before: the same, the same
#   concatenated, a copy, 10 rows read before: the same, the same
#   concatenated, the state itself, 0 rows read before: the same, the same
#   concatenated, the state itself, 10 rows read before: the same, the same
#   mixed, a copy, 0 rows read before: the same, the same
#   mixed, a copy, 10 rows read before: the same, the same
#   mixed, the state itself, 0 rows read before: the same, the same
#   mixed, the state itself, 10 rows read before: the same, the same
#   interleaved, a copy, 0 rows read before: the same, the same
#   interleaved, a copy, 10 rows read before: the same, the same
#   interleaved, the state itself, 0 rows read before: the same, the same
#   interleaved, the state itself, 10 rows read before: others, others
#   first pass: [103, 203, 4, 104, 204, 5, 105, 205, 6, 106, 206, 300, 400, 301, 401, 302, 402, 303, 403, 304]
#   second pass: [403, 203, 304, 404, 204, 305, 405, 205, 306, 406, 206, 300, 400, 301, 401, 302, 402, 303, 403, 304]
#   left out: [4, 5, 6, 103, 104, 105, 106], new: [305, 306, 404, 405, 406], twice: 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 grain==0.2.18

cat > "$work/passes.py" <<'PY'
import copy
import itertools

import grain
from grain import experimental


def stream(kind):
    files = [grain.MapDataset.range(100 * number, 100 * number + 7) for number in range(5)]
    if kind == "interleaved":
        return iter(experimental.InterleaveIterDataset(files, cycle_length=3))
    if kind == "mixed":
        return iter(grain.IterDataset.mix([rows.to_iter_dataset() for rows in files]))
    return iter(grain.MapDataset.concatenate(files).to_iter_dataset())


def passes(kind, state, count, keep):
    """Rows of several passes over the same part, each begun from the same state."""
    rows = stream(kind)
    for _ in range(state):
        next(rows)
    start, read = rows.get_state(), []
    for _ in range(count):
        rows.set_state(copy.deepcopy(start) if keep else start)
        read.append(list(itertools.islice(rows, 20)))
    return read


for kind in ("concatenated", "mixed", "interleaved"):
    for keep in (True, False):
        for before in (0, 10):
            read = passes(kind, before, 3, keep)
            same = ["the same" if rows == read[0] else "others" for rows in read[1:]]
            print(f"{kind}, {'a copy' if keep else 'the state itself'}, {before} rows read before: {', '.join(same)}")
first, second, _ = passes("interleaved", 10, 3, False)
print(f"first pass: {first}\nsecond pass: {second}")
left_out, new = sorted(set(first) - set(second)), sorted(set(second) - set(first))
print(f"left out: {left_out}, new: {new}, twice: {len(second) - len(set(second))}")
PY
"$work/env/bin/python" "$work/passes.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
