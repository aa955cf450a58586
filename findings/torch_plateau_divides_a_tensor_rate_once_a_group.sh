#!/usr/bin/env bash
# torch 2.13.0: ReduceLROnPlateau with a rate that is a tensor multiplies by factor once for each parameter group.
#
# A rate may be a tensor: torch's page on compiled optimizers asks for it, lest each new rate compile the step again. All
# groups without a rate of their own then share that one tensor. ReduceLROnPlateau goes through the groups, reads the rate
# and writes its product in place: the second group finds what the first has written. Weights with decay and without are
# two groups, so a factor of 0.5 becomes 0.25. No warning, and the scheduler's last rates agree with the optimizer's.
# 21 other schedules of lr_scheduler and swa_utils take all products before they write, and are right with shared tensors.
# A remedy is a tensor of its own in each group.
#
# hypha_ray isn't touched: its rates are floats, and its schedules are functions of the step.
#
# Seen with torch 2.13.0, Python 3.11:
#   1 group: 0.8 -> float 0.4, tensor 0.4
#   2 groups: 0.8 -> float 0.4, tensor 0.2
#   3 groups: 0.8 -> float 0.4, tensor 0.1
#   2 groups, each a tensor of its own: 0.4 and 0.4
#   2 groups, min_lr 0.3 and 0.1: float 0.4 and 0.4, tensor 0.2 and 0.2
#   2 groups, ExponentialLR: float 0.4, tensor 0.4
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/rates.py" <<'PY'
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau


def optimizer_of(groups, rate, own=False):
    described = []
    for _ in range(groups):
        group = {"params": [torch.nn.Parameter(torch.ones(1))]}
        if own:
            group["lr"] = rate.clone()
        described.append(group)
    return torch.optim.AdamW(described, lr=rate)


def rates(optimizer):
    return [round(float(group["lr"]), 4) for group in optimizer.param_groups]


def reduced(optimizer, **arguments):
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **arguments)
    for loss in [1.0, 1.0]:
        optimizer.step()
        scheduler.step(loss)
    assert [round(float(rate), 4) for rate in scheduler.get_last_lr()] == rates(optimizer)
    return rates(optimizer)


def decayed(optimizer):
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    return rates(optimizer)


def tensor():
    return torch.tensor(0.8)


for groups in [1, 2, 3]:
    plain, shared = reduced(optimizer_of(groups, 0.8)), reduced(optimizer_of(groups, tensor()))
    assert len(set(plain)) == len(set(shared)) == 1
    print(f"{groups} group{'s' if groups > 1 else ''}: 0.8 -> float {plain[0]}, tensor {shared[0]}")
first, second = reduced(optimizer_of(2, tensor(), own=True))
print(f"2 groups, each a tensor of its own: {first} and {second}")
plain = reduced(optimizer_of(2, 0.8), min_lr=[0.3, 0.1])
shared = reduced(optimizer_of(2, tensor()), min_lr=[0.3, 0.1])
print(f"2 groups, min_lr 0.3 and 0.1: float {plain[0]} and {plain[1]}, tensor {shared[0]} and {shared[1]}")
print(f"2 groups, ExponentialLR: float {decayed(optimizer_of(2, 0.8))[0]}, tensor {decayed(optimizer_of(2, tensor()))[0]}")
PY
"$work/env/bin/python" "$work/rates.py" 2> "$work/warnings" | tee "$work/seen"
if grep -q Warning "$work/warnings"; then cat "$work/warnings"; exit 1; fi
diff "$work/seen" - <<'SEEN'
1 group: 0.8 -> float 0.4, tensor 0.4
2 groups: 0.8 -> float 0.4, tensor 0.2
3 groups: 0.8 -> float 0.4, tensor 0.1
2 groups, each a tensor of its own: 0.4 and 0.4
2 groups, min_lr 0.3 and 0.1: float 0.4 and 0.4, tensor 0.2 and 0.2
2 groups, ExponentialLR: float 0.4, tensor 0.4
SEEN
echo 'as described'
