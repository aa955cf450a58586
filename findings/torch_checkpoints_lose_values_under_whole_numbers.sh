#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint loads a number under a whole-number key nowhere, and says nothing.
#
# dcp.load fills the state that it is given. Its keys may be whole numbers below the first level, and tensors under them come
# back. Other values are put back by a path in which each key has become text: {0: 100} is loaded as {0: 0, "0": 100}. What
# reads the state finds the old number under 0. With torch.save all is as it was saved, and with text as keys here too.
# Loading is strict by default, and refuses a state that lacks a key: by its names none is lacking. Counts by epoch, rank or
# data set are such states, and so is torch's own MultiStepLR, whose milestones are a Counter. Resumed, it has each milestone
# twice, and its next state can't be saved: both keys have one name.
#
# hypha_ray isn't touched: it writes its checkpoints itself, not by torch.distributed.checkpoint.
#
# Seen with torch 2.13.0, Python 3.11 (one process):
#   torch.save, keys of text: {'a': 100, 'b': 50}
#   torch.save, whole numbers: {0: 100, 1: 50}
#   torch.save, a tensor under 0: {0: tensor(100)}
#   torch.save, MultiStepLR resumed: {2: 1, 4: 1}
#   torch.save, its next state: taken
#   dcp, keys of text: {'a': 100, 'b': 50}
#   dcp, whole numbers: {0: 0, 1: 0, '0': 100, '1': 50}
#   dcp, a tensor under 0: {0: tensor(100)}
#   dcp, MultiStepLR resumed: {2: 1, 4: 1, '2': 1, '4': 1}
#   dcp, its next state: refused, duplicated flatten key scheduler.milestones.2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/keys.py" <<'PY'
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import MultiStepLR

WORK = Path(sys.argv[1])


def by_dcp(saved, fresh, name):
    dcp.save(saved, checkpoint_id=WORK / name)
    dcp.load(fresh, checkpoint_id=WORK / name)
    return fresh


def by_torch_save(saved, fresh, name):
    torch.save(saved, WORK / f"{name}.pt")
    return torch.load(WORK / f"{name}.pt", weights_only=False)


def scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return MultiStepLR(optimizer, [2, 4], gamma=0.1)


def resumed(carry):
    second = scheduler()
    state = carry({"scheduler": scheduler().state_dict()}, {"scheduler": second.state_dict()}, "first")
    second.load_state_dict(state["scheduler"])
    try:
        carry({"scheduler": second.state_dict()}, {"scheduler": scheduler().state_dict()}, "second")
    except CheckpointException as error:
        return dict(second.milestones), f"refused, {str(error).strip().rpartition('ValueError: ')[2]}"
    return dict(second.milestones), "taken"


for name, carry in {"torch.save": by_torch_save, "dcp": by_dcp}.items():
    print(f"{name}, keys of text: {carry({'read': {'a': 100, 'b': 50}}, {'read': {'a': 0, 'b': 0}}, 'text')['read']}")
    print(f"{name}, whole numbers: {carry({'read': {0: 100, 1: 50}}, {'read': {0: 0, 1: 0}}, 'whole')['read']}")
    tensors = carry({"read": {0: torch.tensor(100)}}, {"read": {0: torch.tensor(0)}}, "tensors")["read"]
    print(f"{name}, a tensor under 0: {tensors}")
    milestones, next_state = resumed(carry)
    print(f"{name}, MultiStepLR resumed: {milestones}")
    print(f"{name}, its next state: {next_state}")
PY
"$work/env/bin/python" "$work/keys.py" "$work" 2> "$work/warnings" | tee "$work/seen"
if grep -qi 'Warning.*\(key\|milestone\)' "$work/warnings"; then cat "$work/warnings"; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
