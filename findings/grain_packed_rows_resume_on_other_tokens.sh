#!/usr/bin/env bash
# grain 0.2.18: a stream cut into rows resumes on other tokens from grain's own checkpoint, and leaves some out.
#
# ConcatThenSplitIterDataset lines up texts and cuts them into rows of one length. Its state has, for each feature, the slice
# of a text that is left over, as a pair, and the pair (-1, -1) for nothing left. CheckpointHandler, made for orbax, and the
# iterator's own save() write states as JSON, in which pairs become lists. When it is read, [-1, -1] isn't (-1, -1): a text
# is read as left over, and nothing of it is used. So a whole text is skipped, and all later rows are cut at other places.
# It depends on where texts end, which saves are affected. A state that stayed in memory is right, and so are the other
# packers. Near it, RebatchIterDataset: saved after its last batch and resumed, it gives one more, of no rows, and the
# mean of losses over that is NaN. No error, no warning.
#
# hypha_ray isn't touched: it packs without grain, and keeps its place in the data itself.
#
# Seen with grain 0.2.18, numpy 2.4.6, Python 3.11 (20 texts of 1 to 7 tokens; a token is ten times its text and its place):
#   cut, resumed from memory: 9 of 9 saves go on with the right rows
#   cut, resumed from a file: 6 of 9 saves go on with the right rows
#   fitted, resumed from memory: 11 of 11 saves go on with the right rows
#   fitted, resumed from a file: 11 of 11 saves go on with the right rows
#   rebatched, resumed from memory: 10 of 11 saves go on with the right rows
#   rebatched, resumed from a file: 10 of 11 saves go on with the right rows
#   cut, two rows read: [0, 10, 11, 20, 21, 22, 30, 31, 32, 33] [40, 41, 42, 43, 44, 50, 51, 52, 53, 54]
#     the third, resumed from memory: [55, 60, 61, 62, 63, 64, 65, 66, 70, 80]
#     the third, resumed from a file: [64, 65, 66, 70, 80, 81, 90, 91, 92, 100]
#     never read: [55, 60, 61, 62, 63]
#   rebatched, resumed from a file after its end: [[]]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 grain==0.2.18

cat > "$work/resume.py" <<'PY'
import sys
from pathlib import Path

import grain
import numpy as np
from grain import checkpoint, experimental


class Texts:
    def __len__(self):
        return 20

    def __getitem__(self, text):
        return {"tokens": np.arange(text * 10, text * 10 + text % 7 + 1)}


def cut():
    texts = grain.MapDataset.source(Texts()).to_iter_dataset()
    return experimental.ConcatThenSplitIterDataset(texts, length_struct={"tokens": 10})


def fitted():
    texts = grain.MapDataset.source(Texts()).to_iter_dataset()
    return experimental.FirstFitPackIterDataset(texts, length_struct={"tokens": 10}, num_packing_bins=2)


def rebatched():
    rows = grain.MapDataset.range(50).map(lambda row: {"tokens": np.asarray(row)}).to_iter_dataset()
    return experimental.RebatchIterDataset(rows.batch(3), batch_size=5)


def tokens(row):
    return (row[0] if isinstance(row, tuple) else row)["tokens"].tolist()


def resumed(make, after, folder):
    stopped, again = iter(make()), iter(make())
    for _ in range(after):
        next(stopped)
    if folder is None:
        again.set_state(stopped.get_state())
    else:
        handler = checkpoint.CheckpointHandler()
        handler.save(folder, stopped)
        handler.restore(folder, again)
    return [tokens(row) for row in again]


folder = Path(sys.argv[1])
for make in (cut, fitted, rebatched):
    whole = [tokens(row) for row in make()]
    for kind, place in {"memory": None, "a file": folder}.items():
        saves = range(len(whole) + 1)
        right = [after for after in saves if resumed(make, after, place) == whole[after:]]
        print(f"{make.__name__}, resumed from {kind}: {len(right)} of {len(saves)} saves go on with the right rows")
read, rest = [tokens(row) for row in cut()][:2], resumed(cut, 2, folder)
lost = sorted({token for row in map(tokens, cut()) for token in row} - {token for row in read + rest for token in row})
print(f"cut, two rows read: {read[0]} {read[1]}")
print(f"  the third, resumed from memory: {resumed(cut, 2, None)[0]}")
print(f"  the third, resumed from a file: {rest[0]}")
print(f"  never read: {lost}")
print(f"rebatched, resumed from a file after its end: {resumed(rebatched, 10, folder)}")
PY
mkdir "$work/checkpoint"
"$work/env/bin/python" "$work/resume.py" "$work/checkpoint" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
