#!/usr/bin/env bash
# pytorch_optimizer 4.1.0: Adan with maximize=True takes another way than minimizing the negative: its first difference of
# gradients is twice the gradient.
#
# Adan adds a running mean of the differences between one gradient and the last to Adam's update. There is no last gradient
# at the first step, and the difference is to be 0. The state begins with the gradient as backward() left it, before
# maximize turns its sign, so the difference is twice the first gradient, in the running means of differences and of squares
# as well, and the weights are up to a seventh of the way apart for dozens of steps. DAdaptAdan begins in this way, too;
# its estimate of the rate carries that on. Maximizing f and minimizing -f is one path in the other optimizers here, as in
# torch. No warning. (kozistr/pytorch_optimizer, pull request 528, is about Adai, which turned the sign twice.)
#
# hypha_ray isn't touched: its optimizers are torch's and its own, and it minimizes losses.
#
# Seen with pytorch_optimizer 4.1.0, torch 2.13.0, Python 3.11 (distance between both ways, as a part of the one minimized):
#   adam: step 1 0.00, step 2 0.00, step 10 0.00, step 50 0.00
#   lion: step 1 0.00, step 2 0.00, step 10 0.00, step 50 0.00
#   adabelief: step 1 0.00, step 2 0.00, step 10 0.00, step 50 0.00
#   ademamix: step 1 0.00, step 2 0.00, step 10 0.00, step 50 0.00
#   lamb: step 1 0.00, step 2 0.00, step 10 0.00, step 50 0.00
#   adan: step 1 0.00, step 2 0.06, step 10 0.14, step 50 0.10
#   dadaptadan: step 1 0.04, step 2 0.12, step 10 0.41, step 50 0.38
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pytorch_optimizer==4.1.0

cat > "$work/maximize.py" <<'PY'
import torch
from pytorch_optimizer import load_optimizer

torch.set_num_threads(1)
DRAW = torch.Generator().manual_seed(0)
TARGET = torch.randn(4, 4, generator=DRAW)


def path(name, maximize, steps):
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = load_optimizer(name)([weight], lr=0.01, maximize=maximize)
    places = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((weight - TARGET) ** 2).sum()
        (-loss if maximize else loss).backward()
        optimizer.step()
        places.append(weight.detach().clone())
    return places


def apart(name, steps):
    low, high = path(name, False, steps), path(name, True, steps)
    return [float((one - other).norm() / one.norm()) for one, other in zip(low, high)]


for name in ("adam", "lion", "adabelief", "ademamix", "lamb", "adan", "dadaptadan"):
    distances = apart(name, 50)
    print(f"{name}: " + ", ".join(f"step {step} {distances[step - 1]:.2f}" for step in (1, 2, 10, 50)))
PY
"$work/env/bin/python" "$work/maximize.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
