#!/usr/bin/env bash
# torch 2.13.0 on CPU: fused SGD, Adam, AdamW and Adagrad go through memory and not through indices, so a parameter whose
# gradient or average lies in another order is stepped on with the numbers of other elements, and nothing is said.
#
# fused is a matter of speed. On GPUs tensors of unlike strides are refused ("must have same dtype, device, and layout",
# pytorch/pytorch 106951 and 110758); on CPUs there is no such check. Backward passes give a dense parameter a gradient in
# its own order, so it takes one of these, all of them right without fused:
# - a gradient that is set by hand, such as a part of a flat buffer that was averaged, beside a transposed weight;
# - a checkpoint from before model.to(memory_format=torch.channels_last), or the other way round: averages keep the order
#   that they were saved in;
# - a parameter that is a strided view. Its gradient is dense, and the step changes elements of the tensor below that
#   belong to no parameter: here the odd columns of a table of which the even ones are trained.
#
# hypha_ray was touched, and is no longer: its AdamW was fused on CPUs whatever the order of the weights, and a server sets
# gradients from flat arrays. It is fused now if all parameters are contiguous.
#
# Seen with torch 2.13.0 on CPU, Python 3.11 (largest difference from the same steps by hand in float64, learning rate 0.1):
#   SGD, contiguous weight and gradient: loop 0.0, foreach 0.0, fused 0.0
#   SGD, transposed weight, gradient of a flat buffer: loop 0.0, foreach 0.0, fused 0.4
#   AdamW, contiguous weight and gradient: loop 0.0, foreach 0.0, fused 0.0
#   AdamW, transposed weight, gradient of a flat buffer: loop 0.0, foreach 0.0, fused 0.3
#   Adam, Adagrad, transposed weight: fused is another step than loop: True, True
#   convolution resumed in channels_last, AdamW: loop goes on as before, fused differs by 0.2
#   even columns trained by backward passes, odd ones belong to nobody, change of these: loop 0.0, fused 0.3
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/fused.py" <<'PY'
import copy
import math
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def matrices(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def stepped(kind, way, transposed, steps=3):
    start = matrices(1, seed=0)[0]
    weight = torch.nn.Parameter(start.t().contiguous().t() if transposed else start.clone())
    optimizer = kind([weight], lr=0.1, **WAYS[way])
    for gradient in matrices(steps):
        flat = gradient.flatten()
        weight.grad = flat.view(4, 6)
        optimizer.step()
    return weight.detach().double()


def sgd_by_hand():
    weight = matrices(1, seed=0)[0].double()
    for gradient in matrices(3):
        weight -= 0.1 * gradient.double()
    return weight


def adamw_by_hand():
    weight = matrices(1, seed=0)[0].double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(matrices(3), 1):
        gradient = gradient.double()
        weight *= 1 - 0.1 * 0.01
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient * gradient
        weight -= 0.1 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
    return weight


def distance(one, other):
    return round(float((one - other).abs().max()), 1)


for kind, right in {SGD: sgd_by_hand(), AdamW: adamw_by_hand()}.items():
    for name, transposed in {"contiguous weight and gradient": False, "transposed weight, gradient of a flat buffer": True}.items():
        found = ", ".join(f"{way} {distance(stepped(kind, way, transposed), right)}" for way in WAYS)
        print(f"{kind.__name__}, {name}: {found}")
others = [stepped(kind, "fused", True).sub(stepped(kind, "loop", True)).abs().max() > 0.1 for kind in (Adam, Adagrad)]
print(f"Adam, Adagrad, transposed weight: fused is another step than loop: {bool(others[0])}, {bool(others[1])}")


def trained(layer, optimizer, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()


def resumed(way, memory_format):
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 5, 3)
    optimizer = AdamW(layer.parameters(), lr=0.1, **WAYS[way])
    trained(layer, optimizer, 3, seed=1)
    saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    layer = torch.nn.Conv2d(3, 5, 3)
    layer.load_state_dict(saved[0])
    layer = layer.to(memory_format=memory_format)
    optimizer = AdamW(layer.parameters(), lr=0.1, **WAYS[way])
    optimizer.load_state_dict(saved[1])
    trained(layer, optimizer, 3, seed=2)
    return layer.weight.detach().contiguous()


last, first = torch.channels_last, torch.contiguous_format
assert torch.allclose(resumed("loop", last), resumed("loop", first), atol=1e-4)
assert torch.allclose(resumed("fused", first), resumed("loop", first), atol=1e-4)
change = float((resumed("fused", last) - resumed("fused", first)).abs().max())
print(f"convolution resumed in channels_last, AdamW: loop goes on as before, fused differs by {change:.1f}")


def neighbours(way):
    table = torch.zeros(4, 12)
    even = torch.nn.Parameter(table[:, ::2])
    optimizer = AdamW([even], lr=0.1, **WAYS[way])
    for factor in matrices(3):
        optimizer.zero_grad()
        (even * factor).sum().backward()
        optimizer.step()
    return round(float(table[:, 1::2].abs().max()), 1)


print("even columns trained by backward passes, odd ones belong to nobody, change of these: "
      f"loop {neighbours('loop')}, fused {neighbours('fused')}")
PY
"$work/env/bin/python" "$work/fused.py" 2> "$work/warnings" | tee "$work/seen"
if grep -q Warning "$work/warnings"; then cat "$work/warnings"; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
