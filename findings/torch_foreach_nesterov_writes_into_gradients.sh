#!/usr/bin/env bash
# torch 2.13.0: SGD with Nesterov momentum and foreach overwrites p.grad with its own step; without foreach it doesn't.
#
# foreach is a matter of speed, and the default on GPUs. With nesterov, and neither weight_decay nor maximize, the gradients
# aren't copied before momentum is added to them in place. So after step() each p.grad is the gradient plus momentum times
# the average. The step itself is right. A norm that is logged after it is not, nor is a gradient that stays for the next
# backward pass to add to, or that is stepped with twice, or a buffer that p.grad is a view of, such as the averaged deltas
# of an outer optimizer. Other optimizers were cured of this in January 2023 (pytorch/pytorch, pull request 92706, by which
# SGD had no need); weight_decay or maximize makes a copy by chance.
#
# hypha_ray isn't touched: its outer Nesterov is its own, and no gradient of its inner SGD is read after the step.
#
# Seen with torch 2.13.0 on CPU, Python 3.11 (momentum 0.9, gradients of 1, two steps):
#   loop: p.grad after each step 1.0 and 1.0
#   foreach: p.grad after each step 1.9 and 2.71
#   foreach and weight_decay: p.grad after each step 1.0 and 1.0
#   foreach and maximize: p.grad after each step 1.0 and 1.0
#   foreach without nesterov: p.grad after each step 1.0 and 1.0
#   fused: p.grad after each step 1.0 and 1.0
#   gradients added up over three steps, weight: loop -1.4559, foreach -2.5206
#   flat buffer of deltas that the gradients are views of, sum after a step: loop 8.0, foreach 15.2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/nesterov.py" <<'PY'
import torch

FOREACH, LOOP = {"foreach": True}, {"foreach": False}


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **({"nesterov": True} | options))


def kept(**options):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer, seen = sgd([weight], **options), []
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
        assert weight.grad.unique().numel() == 1
        seen.append(round(float(weight.grad[0]), 4))
    return f"p.grad after each step {seen[0]} and {seen[1]}"


def added_up(**options):
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = sgd([weight], **options)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
    return round(float(weight.detach()[0]), 4)


def by_hand():
    weight = momentum = gradient = 0.0
    for _ in range(3):
        gradient += 1.0
        momentum = 0.9 * momentum + gradient
        weight -= 0.1 * (gradient + 0.9 * momentum)
    return round(weight, 4)


def buffer(**options):
    deltas = torch.ones(8)
    weights = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(3))]
    for weight, part in zip(weights, deltas.split([5, 3])):
        weight.grad = part
    sgd(weights, **options).step()
    return round(float(deltas.sum()), 4)


print("loop:", kept(**LOOP))
print("foreach:", kept(**FOREACH))
print("foreach and weight_decay:", kept(weight_decay=0.01, **FOREACH))
print("foreach and maximize:", kept(maximize=True, **FOREACH))
print("foreach without nesterov:", kept(nesterov=False, **FOREACH))
print("fused:", kept(fused=True))
assert added_up(**LOOP) == by_hand()
print(f"gradients added up over three steps, weight: loop {added_up(**LOOP)}, foreach {added_up(**FOREACH)}")
print(f"flat buffer of deltas that the gradients are views of, sum after a step: "
      f"loop {buffer(**LOOP)}, foreach {buffer(**FOREACH)}")
PY
"$work/env/bin/python" "$work/nesterov.py" 2> "$work/warnings" | tee "$work/seen"
if grep -q Warning "$work/warnings"; then cat "$work/warnings"; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
