#!/usr/bin/env bash
# torch 2.13.0: Adafactor takes the epsilon of all parameters of a group from the dtype of the first one.
#
# By default epsilon1, the least square root of the variance that a gradient is divided by, is the machine epsilon of the
# parameter's dtype: 1.2e-7 for float32, 7.8e-3 for bfloat16. The loop over parameters sets it at the first of them and
# keeps it for the rest; foreach goes over parameters of one dtype after the other, and does the same. A float32 weight
# behind one of bfloat16, as the norms of a model that keeps them in float32 are, is then divided by 7.8e-3 instead of the
# size of its own gradients. These are mostly smaller, so its steps are too small: a hundredth for gradients of 1e-4. With
# foreach it is so whichever comes first in the model. The other way round a weight of bfloat16 has the epsilon of float32.
# With a group for each dtype the steps are right. No warning.
#
# hypha_ray was touched where weights have several dtypes (inner_optimizer.name = "adafactor"): it makes a group of each.
#
# Seen with torch 2.13.0 on CPU, Python 3.11 (the step of a weight of float32, as a part of that by the documented formula;
# the group has these dtypes in this order):
#   gradients of 0.001, float32: loop 1.00, foreach 1.00
#   gradients of 0.001, float32, bfloat16: loop 1.00, foreach 0.12
#   gradients of 0.001, bfloat16, float32: loop 0.12, foreach 1.00
#   gradients of 0.001, a group for each dtype: loop 1.00
#   gradients of 0.0001, float32: loop 1.00, foreach 1.00
#   gradients of 0.0001, float32, bfloat16: loop 1.00, foreach 0.01
#   gradients of 0.0001, bfloat16, float32: loop 0.01, foreach 1.00
#   gradients of 0.0001, a group for each dtype: loop 1.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/steps.py" <<'PY'
import torch

RATE, LEAST_SCALE = 0.01, 1e-3
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def weight_of(dtype, size):
    generator = torch.Generator().manual_seed(5)
    parameter = torch.nn.Parameter(torch.randn(8, 8, generator=generator).to(dtype))
    parameter.grad = (size * torch.randn(8, 8, generator=generator)).to(dtype)
    return parameter


def norm(values):
    return float(values.double().square().mean().sqrt())


def by_formula(parameter):
    """Root mean square of the first step, by the formulas of the documentation with the parameter's own epsilon."""
    epsilon = torch.finfo(parameter.dtype).eps
    gradient, weight = parameter.grad.double(), parameter.detach().double()
    rows, columns = gradient.square().mean(1, keepdim=True), gradient.square().mean(0, keepdim=True)
    variance = rows @ columns / rows.mean().clamp(min=epsilon)
    update = gradient / variance.sqrt().clamp(min=epsilon)
    return max(LEAST_SCALE, norm(weight)) * RATE * norm(update) / max(1.0, norm(update))


def stepped(groups, foreach):
    """Root mean squares of the first steps of all parameters of the groups."""
    parameters = [parameter for group in groups for parameter in group]
    before = [parameter.detach().clone() for parameter in parameters]
    by_group = [{"params": group} for group in groups]
    torch.optim.Adafactor(by_group, lr=RATE, weight_decay=0.0, foreach=foreach).step()
    return [norm(parameter.detach() - old) for parameter, old in zip(parameters, before)]


for size in (1e-3, 1e-4):
    for order in ([torch.float32], [torch.float32, torch.bfloat16], [torch.bfloat16, torch.float32]):
        place = order.index(torch.float32)
        names = ", ".join(NAMES[dtype] for dtype in order)
        shares = []
        for foreach in (False, True):
            weights = [weight_of(dtype, size) for dtype in order]
            shares.append(stepped([weights], foreach)[place] / by_formula(weights[place]))
        print(f"gradients of {size:g}, {names}: loop {shares[0]:.2f}, foreach {shares[1]:.2f}")
    weights = [weight_of(dtype, size) for dtype in (torch.bfloat16, torch.float32)]
    share = stepped([[weight] for weight in weights], False)[1] / by_formula(weights[1])
    print(f"gradients of {size:g}, a group for each dtype: loop {share:.2f}")
PY
"$work/env/bin/python" "$work/steps.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
