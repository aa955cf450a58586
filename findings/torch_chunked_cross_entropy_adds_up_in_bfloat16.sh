#!/usr/bin/env bash
# torch 2.13.0: linear_cross_entropy in chunks adds up its loss, and the gradient of the weights, in bfloat16.
#
# With LinearCrossEntropyOptions head and loss are computed for some rows at a time, so that there are never all logits.
# acc_dtype is documented as the dtype for internal accumulation, float32 by default for bfloat16, and a scratch of that
# dtype as the one for "cross-chunk weight-grad accumulation". But each chunk overwrites the scratch, and is added to a
# gradient of bfloat16; the loss itself is a sum in bfloat16, too. From 4 on such a sum takes no term below 1/64, so with
# many chunks the loss stops growing: it is 2 where it should be 7.7. Left to itself the function makes about twice as many
# chunks as there are classes for each feature (64 for 128 000 classes of 4096 features), half as many on CPUs. Ignored
# rows change nothing of this. No warning. In float16 the loss is added up in float32, the gradient in float16.
#
# hypha_ray isn't touched: its own fused loss adds up in float32.
#
# Seen with torch 2.13.0 on CPU, Python 3.11 (8192 rows, 32 features, 2048 classes; gradients by their relative difference
# from those in float64 of the same values):
#   float64: loss 7.67
#   bfloat16, not in chunks: loss 7.56, inputs 0.002, weights 0.002
#   bfloat16, 1 chunks: loss 7.66, inputs 0.002, weights 0.002
#   bfloat16, 8 chunks: loss 7.72, inputs 0.002, weights 0.003
#   bfloat16, 64 chunks: loss 7.09, inputs 0.002, weights 0.011
#   bfloat16, 256 chunks: loss 7.72, inputs 0.002, weights 0.028
#   bfloat16, 1024 chunks: loss 2.00, inputs 0.002, weights 0.046
#   bfloat16, its own choice: loss 7.09, inputs 0.002, weights 0.011
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/losses.py" <<'PY'
import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

ROWS, FEATURES, CLASSES = 8192, 32, 2048
torch.manual_seed(0)
hidden = torch.randn(ROWS, FEATURES).bfloat16()
head = (0.05 * torch.randn(CLASSES, FEATURES)).bfloat16()
targets = torch.randint(CLASSES, (ROWS,))


def results(dtype, options):
    inputs, weight = hidden.clone().to(dtype).requires_grad_(), head.clone().to(dtype).requires_grad_()
    loss = linear_cross_entropy(inputs, weight, targets, options=options)
    loss.backward()
    return loss.item(), inputs.grad.double(), weight.grad.double()


def away(found, right):
    return float((found - right).norm() / right.norm())


right = results(torch.float64, None)
choices = {"not in chunks": None}
for count in (1, 8, 64, 256, 1024):
    choices[f"{count} chunks"] = LinearCrossEntropyOptions(
        batch_chunk_size=ROWS // count, chunking_method=None, acc_policy="balanced", acc_dtype=torch.float32
    )
choices["its own choice"] = LinearCrossEntropyOptions()
print(f"float64: loss {right[0]:.2f}")
for name, options in choices.items():
    loss, inputs, weight = results(torch.bfloat16, options)
    print(f"bfloat16, {name}: loss {loss:.2f}, inputs {away(inputs, right[1]):.3f}, weights {away(weight, right[2]):.3f}")
PY
"$work/env/bin/python" "$work/losses.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
