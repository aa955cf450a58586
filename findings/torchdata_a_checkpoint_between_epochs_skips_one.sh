#!/usr/bin/env bash
# torchdata 0.11.0: a loader with torchdata's StatefulDistributedSampler that was saved between two epochs resumes with an
# epoch of no batches, and says nothing.
#
# StatefulDataLoader is to go on where its state was taken. The sampler counts the rows that it gave, and sets the count
# to 0 as the first row of an epoch is asked for, not as the epoch begins. So a state from the end of an epoch, the usual
# place of a checkpoint, has all rows as given: the resumed loader skips them and is at its end. The loop over the epoch
# ends at once, and schedules and counts of epochs go on. So it is in the loading process itself (num_workers=0). With worker
# processes it needs a state that is taken after iter() and before the first batch; and with snapshot_every_n_steps=3 the
# first two batches of each epoch but the first have such a state, too: there iter() raises a bare StopIteration.
# RandomSampler and no sampler are right at the same places, and so is this sampler after a batch whose snapshot was taken.
# set_epoch() is called in each run as it should be. (For torchdata.nodes the like is reported, meta-pytorch/data 1513, open;
# pull request 1439 was about the end of an epoch with other samplers.)
#
# hypha_ray isn't touched: it has no loaders of torch, and keeps its place in the data itself.
#
# Seen with torchdata 0.11.0, torch 2.13.0, Python 3.11 (batches of the resumed epoch, those of the run that wasn't
# interrupted, or none):
#   StatefulDistributedSampler, 0 workers, snapshots of 1:
#     after epoch 0: 0 of 4; before batch 1 of epoch 1: 0 of 4; after batch 1: 3 of 3; after batch 2: 2 of 2
#   StatefulDistributedSampler, 2 workers, snapshots of 1:
#     after epoch 0: 4 of 4; before batch 1 of epoch 1: 0 of 4; after batch 1: 3 of 3; after batch 2: 2 of 2
#   StatefulDistributedSampler, 2 workers, snapshots of 3:
#     after epoch 0: 4 of 4; before batch 1 of epoch 1: 0 of 4; after batch 1: StopIteration; after batch 2: StopIteration
#   RandomSampler, 0 workers, snapshots of 1:
#     after epoch 0: 4 of 4; before batch 1 of epoch 1: 4 of 4; after batch 1: 3 of 3; after batch 2: 2 of 2
#   RandomSampler, 2 workers, snapshots of 3:
#     after epoch 0: 4 of 4; before batch 1 of epoch 1: 4 of 4; after batch 1: 3 of 3; after batch 2: 2 of 2
#   no sampler, 0 workers, snapshots of 1:
#     after epoch 0: 4 of 4; before batch 1 of epoch 1: 4 of 4; after batch 1: 3 of 3; after batch 2: 2 of 2
#   no sampler, 2 workers, snapshots of 3:
#     after epoch 0: 4 of 4; before batch 1 of epoch 1: 4 of 4; after batch 1: 3 of 3; after batch 2: 2 of 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy torchdata==0.11.0

cat > "$work/resume.py" <<'PY'
import copy

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

ROWS = list(range(24))


def loader(kind, workers, every):
    if kind == "StatefulDistributedSampler":
        sampler = StatefulDistributedSampler(ROWS, num_replicas=2, rank=0, seed=4)
    elif kind == "RandomSampler":
        sampler = RandomSampler(ROWS[:12], generator=torch.Generator().manual_seed(4))
    else:
        sampler = None
    rows = ROWS if kind == "StatefulDistributedSampler" else ROWS[:12]
    return StatefulDataLoader(rows, sampler=sampler, batch_size=3, num_workers=workers, snapshot_every_n_steps=every)


def begin(source, epoch):
    if hasattr(source.sampler, "set_epoch"):
        source.sampler.set_epoch(epoch)


def epoch_of(source, epoch):
    begin(source, epoch)
    return [batch.tolist() for batch in source]


def resumed(kind, workers, every, batches):
    stopped = loader(kind, workers, every)
    epoch_of(stopped, 0)
    if batches is not None:
        begin(stopped, 1)
        iterator = iter(stopped)
        for _ in range(batches):
            next(iterator)
    again = loader(kind, workers, every)
    again.load_state_dict(copy.deepcopy(stopped.state_dict()))
    try:
        return epoch_of(again, 1)
    except StopIteration:
        return None


def outcome(kind, workers, every, batches):
    whole = loader(kind, workers, every)
    expected = [epoch_of(whole, 0), epoch_of(whole, 1)][1][batches or 0 :]
    found = resumed(kind, workers, every, batches)
    if found is None:
        return "StopIteration"
    return f"{len(found)} of {len(expected)}" if found in ([], expected) else "other"


PLACES = {"after epoch 0": None, "before batch 1 of epoch 1": 0, "after batch 1": 1, "after batch 2": 2}
for kind, workers, every in [
    ("StatefulDistributedSampler", 0, 1),
    ("StatefulDistributedSampler", 2, 1),
    ("StatefulDistributedSampler", 2, 3),
    ("RandomSampler", 0, 1),
    ("RandomSampler", 2, 3),
    ("no sampler", 0, 1),
    ("no sampler", 2, 3),
]:
    seen = "; ".join(f"{place}: {outcome(kind, workers, every, batches)}" for place, batches in PLACES.items())
    print(f"{kind}, {workers} workers, snapshots of {every}:\n  {seen}")
PY
"$work/env/bin/python" "$work/resume.py" 2> "$work/errors" | tee "$work/seen"
if grep Warning "$work/errors" | grep -v set_vital; then exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
