#!/usr/bin/env bash
# torchmetrics 1.9.0: a running mean that was saved and loaded drops its newest values and keeps its oldest.
#
# Running, and with it RunningMean and RunningSum, has a ring of slots, and writes into the one that the number of
# values seen names. Slots are states, which state_dict() has once persistent(True) is called. The number is a plain
# attribute: it isn't saved, and is 0 after loading. So the next values overwrite slots from the first on, whatever
# they hold, unless the window divides the number that had been seen. Values that should leave the window stay, and
# newer ones leave it, until the window has gone round: with a window of 1000 batches for up to 999, in which a
# falling loss is shown too large. The first compute() after loading is right. Nothing is said.
#
# hypha_ray isn't touched: it doesn't use torchmetrics.
#
# Seen with torchmetrics 1.9.0, torch 2.13.0, Python 3.11 (values 0, 1, 2, ...; a window of 100; 0, 10, 50, 90 and
# 100 values after loading):
#   RunningMean, saved after 200, without a break: 149.5, 159.5, 199.5, 239.5, 249.5
#   RunningMean, saved after 200, resumed: 149.5, 159.5, 199.5, 239.5, 249.5
#   RunningMean, saved after 250, without a break: 199.5, 209.5, 249.5, 289.5, 299.5
#   RunningMean, saved after 250, resumed: 199.5, 204.5, 224.5, 284.5, 299.5
#   Running, saved after 200, without a break: 149.5, 159.5, 199.5, 239.5, 249.5
#   Running, saved after 200, resumed: 149.5, 159.5, 199.5, 239.5, 249.5
#   Running, saved after 250, without a break: 199.5, 209.5, 249.5, 289.5, 299.5
#   Running, saved after 250, resumed: 199.5, 204.5, 224.5, 284.5, 299.5
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0

cat > "$work/window.py" <<'PY'
import torch
from torchmetrics import MeanMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.wrappers import Running

WINDOW = 100


def made(kind):
    metric = RunningMean(WINDOW) if kind == "RunningMean" else Running(MeanMetric(), WINDOW)
    metric.persistent(True)
    return metric


def means(kind, saved_after, more):
    """The mean of the window, without a break and with one."""
    straight, metric = made(kind), made(kind)
    for value in range(saved_after):
        straight.update(float(value))
        metric.update(float(value))
    resumed = made(kind)
    resumed.load_state_dict(metric.state_dict(), strict=True)
    for value in range(saved_after, saved_after + more):
        straight.update(float(value))
        resumed.update(float(value))
    values = torch.arange(saved_after + more, dtype=torch.float64)[-WINDOW:]
    assert torch.isclose(straight.compute().double(), values.mean())
    return straight.compute().item(), resumed.compute().item()


for kind in ("RunningMean", "Running"):
    for saved_after in (200, 250):
        pairs = [(more, *means(kind, saved_after, more)) for more in (0, 10, 50, 90, 100)]
        for name, place in (("without a break", 1), ("resumed", 2)):
            shown = ", ".join(f"{pair[place]:.1f}" for pair in pairs)
            print(f"{kind}, saved after {saved_after}, {name}: {shown}")
PY
"$work/env/bin/python" -W ignore "$work/window.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
