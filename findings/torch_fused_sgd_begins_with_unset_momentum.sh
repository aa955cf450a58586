#!/usr/bin/env bash
# torch 2.13.0: if GradScaler skips the first step of fused SGD, its momentum begins as whatever was in the memory.
#
# The first scale of GradScaler is 65 536, so the first step of a float16 run often overflows and is skipped. The fused
# optimizer skips by itself: its kernel returns early. But the momentum was made just before by empty_like, for this first
# step to fill, and is kept. The next step takes it for the momentum of a step before, and adds it to the weights. Other
# implementations of SGD have no momentum after a skipped step. No warning; weights are right until the second step.
# Here torch fills new memory with NaN (deterministic algorithms, utils.deterministic.fill_uninitialized_memory); without
# that the values are arbitrary: 1e37 in one run, zeros, which are harmless but for dampening, in another. A first step
# that isn't skipped is right, and so are fused Adam, AdamW and Adagrad.
#
# hypha_ray's SGD is fused on GPUs, where steps are skipped likewise: it sets momentum to zero before the first one.
#
# Seen with torch 2.13.0 on CPU, Python 3.11:
#   SGD, for-loop: momentum after the skipped step: none, weights after the next: 0.95
#   SGD, foreach: momentum after the skipped step: none, weights after the next: 0.95
#   SGD, fused: momentum after the skipped step: nan, weights after the next: nan
#   SGD, fused, nothing skipped: momentum after the first step: 0.5, weights after the next: 0.855
#   Adam, AdamW, Adagrad, fused: weights after the next are those of the for-loop: True True True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/steps.py" <<'PY'
import torch

torch.use_deterministic_algorithms(True)
assert torch.utils.deterministic.fill_uninitialized_memory


def trained(kind, overflows, **arguments):
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = kind([weight], lr=0.1, **arguments)
    scaler = torch.amp.GradScaler("cpu")
    momentum = None
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale((0.5 * weight).sum()).backward()
        if overflows and step == 0:
            weight.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            momentum = optimizer.state[weight].get("momentum_buffer")
            momentum = None if momentum is None else momentum.clone()
            if overflows:
                assert bool((weight == 1).all())
    shown = "none" if momentum is None else f"{float(momentum[-1]):.4g}"
    return shown, float(weight.detach()[-1])


modes = {"for-loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
for name, mode in modes.items():
    momentum, weight = trained(torch.optim.SGD, True, momentum=0.9, **mode)
    print(f"SGD, {name}: momentum after the skipped step: {momentum}, weights after the next: {weight:.4g}")
momentum, weight = trained(torch.optim.SGD, False, momentum=0.9, fused=True)
print(f"SGD, fused, nothing skipped: momentum after the first step: {momentum}, weights after the next: {weight:.4g}")
right = []
for kind in [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]:
    fused, plain = trained(kind, True, fused=True)[1], trained(kind, True, foreach=False, fused=False)[1]
    right.append(abs(fused - plain) < 1e-6)
print("Adam, AdamW, Adagrad, fused: weights after the next are those of the for-loop:", *right)
PY
"$work/env/bin/python" "$work/steps.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
SGD, for-loop: momentum after the skipped step: none, weights after the next: 0.95
SGD, foreach: momentum after the skipped step: none, weights after the next: 0.95
SGD, fused: momentum after the skipped step: nan, weights after the next: nan
SGD, fused, nothing skipped: momentum after the first step: 0.5, weights after the next: 0.855
Adam, AdamW, Adagrad, fused: weights after the next are those of the for-loop: True True True
SEEN
echo 'as described'
