#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict before the first step takes a step of its own, and training goes otherwise.
#
# The functions of torch.distributed.checkpoint.state_dict return a state to be saved. Of an optimizer that hasn't stepped
# they make one: they step with gradients of 0 and a rate of 0, so that weights stay. The rest doesn't: Adam counts that
# step, and its first real one is corrected for bias as a second one, 0.0744 instead of the rate of 0.1. RAdam, NAdam, Adamax
# and ASGD count likewise, the momentum of SGD is dampened from the first gradient on, and a decay that is coupled to the
# gradient enters the averages. Rprop keeps 0 as its step, so the first real one is 1e-6, its smallest, and grows by a fifth
# each time: 63 steps of one sign until it is at the rate. So a run that saves at step 0 goes another way than one that
# doesn't, without a warning, and the checkpoint has the extra step in it. optimizer.state_dict() avoids it, and so does a
# gradient that is there already.
# Known for AdamW since October 2025 (pytorch/pytorch, issue 164929, open); torchtitan mended its own copy for Adam alone in
# August 2026 (pytorch/torchtitan, pull request 4382).
#
# hypha_ray isn't touched: it saves optimizer.state_dict().
#
# Seen with torch 2.13.0, Python 3.11 (one weight, gradients of 1, how far it goes in the first three steps):
#   Adam: 0.1000 0.1000 0.1000, state read before: 0.0744 0.0858 0.0910
#   AdamW: 0.1000 0.1000 0.1000, state read before: 0.0744 0.0858 0.0910
#   Adam, weight_decay 0.1: 0.1000 0.1000 0.0999, state read before: 0.0802 0.0890 0.0930
#   RAdam: 0.1000 0.1000 0.1000, state read before: 0.0526 0.0701 0.0788
#   NAdam: 0.1056 0.0784 0.0732, state read before: 0.1045 0.0850 0.0805
#   Adamax: 0.1000 0.1000 0.1000, state read before: 0.0526 0.0701 0.0788
#   ASGD: 0.1000 0.1000 0.1000, state read before: 0.0000 0.1000 0.1000
#   SGD, momentum 0.9: 0.1000 0.1900 0.2710, state read before: 0.1000 0.1900 0.2710
#   SGD, momentum 0.9, dampening 0.9: 0.1000 0.1000 0.1000, state read before: 0.0100 0.0190 0.0271
#   Rprop: 0.1000000 0.1200000 0.1440000, state read before: 0.0000010 0.0000012 0.0000014
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/steps.py" <<'PY'
from math import isclose, sqrt

import torch
from torch import optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

KINDS = {
    "Adam": (optim.Adam, {}),
    "AdamW": (optim.AdamW, {"weight_decay": 0}),
    "Adam, weight_decay 0.1": (optim.Adam, {"weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {}),
    "NAdam": (optim.NAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "ASGD": (optim.ASGD, {"lambd": 0}),
    "SGD, momentum 0.9": (optim.SGD, {"momentum": 0.9}),
    "SGD, momentum 0.9, dampening 0.9": (optim.SGD, {"momentum": 0.9, "dampening": 0.9}),
    "Rprop": (optim.Rprop, {}),
}


def moves(kind, options, read=None):
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    if read:
        before = model.weight.item()
        read(model, optimizer)
        assert model.weight.item() == before and model.weight.grad is None
    distances = []
    for _ in range(3):
        before = model.weight.item()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        distances.append(before - model.weight.item())
    return distances


def adam_by_hand(count, skipped):
    mean = square = 0.0
    for _ in range(count):
        mean, square = 0.9 * mean + 0.1, 0.999 * square + 0.001
    steps = count + skipped
    return 0.1 * mean / (1 - 0.9**steps) / sqrt(square / (1 - 0.999**steps))


for name, (kind, options) in KINDS.items():
    plain = moves(kind, options)
    assert moves(kind, options, lambda model, optimizer: optimizer.state_dict()) == plain
    saved = moves(kind, options, get_optimizer_state_dict)
    if name == "Adam":
        for skipped, distances in enumerate([plain, saved]):
            by_hand = [adam_by_hand(count, skipped) for count in (1, 2, 3)]
            assert all(isclose(*pair, rel_tol=1e-6) for pair in zip(distances, by_hand))
    digits = 7 if name == "Rprop" else 4
    plain, saved = (" ".join(f"{distance:.{digits}f}" for distance in row) for row in (plain, saved))
    print(f"{name}: {plain}, state read before: {saved}")
PY
"$work/env/bin/python" -W error "$work/steps.py" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
