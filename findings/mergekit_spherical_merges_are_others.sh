#!/usr/bin/env bash
# mergekit 0.1.5: nuslerp takes rows for columns, and multislerp doesn't interpolate on the sphere.
#
# nuslerp interpolates whole matrices as one vector, or, with nuslerp_flatten off, their columns; nuslerp_row_wise is
# described as the switch from column vectors to row vectors. It is the other way round: off, each row of a matrix as
# safetensors and torch have it (the weights of one output) is interpolated by itself; on, each column.
# multislerp is described as interpolation on a hypersphere for more models: in the tangent space at the weighted mean of
# the directions, and back. The sum that is made there is the mean itself without its part along the mean, so it is 0, and
# the result is the mean direction, scaled to the mean length. That is the linear interpolation that slerp is chosen to
# avoid: a small weight turns the result by less than its share of the angle. So two models merged by multislerp aren't
# those merged by nuslerp with the same weights and the same base. No error, no warning.
#
# hypha_ray isn't touched: it merges no models by mergekit.
#
# Seen with mergekit 0.1.5, transformers 5.23.0, torch 2.13.0, Python 3.11 (differences from a base, two models, float32):
#   nuslerp_row_wise off: slerp of rows 0.00 away, of columns 0.09
#   nuslerp_row_wise on: slerp of rows 0.09 away, of columns 0.00
#   weights 0.9 and 0.1: nuslerp turns by 0.10 of the angle, multislerp by 0.07
#   weights 0.7 and 0.3: nuslerp turns by 0.30 of the angle, multislerp by 0.26
#   multislerp from the mean direction of three models, weights 0.6, 0.3 and 0.1: 0.000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() { "$work/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy
pip torch==2.13.0 transformers==5.23.0 peft==0.21.2 mergekit==0.1.5

cat > "$work/sphere.py" <<'PY'
import sys

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

MATRIX = "model.layers.0.mlp.up_proj.weight"


def saved(name, seed=None):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4,
    ))
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(f"{root}/{name}")
    return f"{root}/{name}"


def weights_of(folder):
    return load_file(f"{folder}/model.safetensors")[MATRIX].double()


def merged(method, weights, **parameters):
    merged.count += 1
    out = f"{root}/merged{merged.count}"
    config = {
        "merge_method": method, "dtype": "float32", "base_model": base, "parameters": parameters,
        "models": [{"model": tuned[place], "parameters": {"weight": weight}} for place, weight in enumerate(weights)],
    }
    run_merge(MergeConfiguration.model_validate(config), out, MergeOptions(copy_tokenizer=False, quiet=True))
    return weights_of(out) - weights_of(base)


def angle(first, second, dim):
    unit = [vectors / vectors.norm(dim=dim, keepdim=True) for vectors in (first, second)]
    return torch.acos((unit[0] * unit[1]).sum(dim=dim, keepdim=True))


def slerp(share, first, second, dim):
    theta = angle(first, second, dim)
    return (torch.sin((1 - share) * theta) * first + torch.sin(share * theta) * second) / torch.sin(theta)


def away(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


root = sys.argv[1]
merged.count = 0
base = saved("base")
tuned = [saved(f"tuned{seed}", seed) for seed in (1, 2, 3)]
changes = [weights_of(folder) - weights_of(base) for folder in tuned]

for word, row_wise in (("off", False), ("on", True)):
    found = merged("nuslerp", [0.7, 0.3], nuslerp_flatten=False, nuslerp_row_wise=row_wise)
    rows, columns = (away(found, slerp(0.3, *changes[:2], dim)) for dim in (1, 0))
    print(f"nuslerp_row_wise {word}: slerp of rows {rows:.2f} away, of columns {columns:.2f}")

flat = [change.flatten() for change in changes]
whole = float(angle(flat[0], flat[1], 0))
for pair in ([0.9, 0.1], [0.7, 0.3]):
    turns = [float(angle(flat[0], merged(method, pair).flatten(), 0)) / whole for method in ("nuslerp", "multislerp")]
    print(f"weights {pair[0]} and {pair[1]}: nuslerp turns by {turns[0]:.2f} of the angle, multislerp by {turns[1]:.2f}")

triple = [0.6, 0.3, 0.1]
mean = sum(weight * change / change.norm() for weight, change in zip(triple, flat))
length = sum(weight * change.norm() for weight, change in zip(triple, flat))
distance = away(merged("multislerp", triple).flatten(), mean / mean.norm() * length)
print(f"multislerp from the mean direction of three models, weights 0.6, 0.3 and 0.1: {distance:.3f}")
PY
"$work/env/bin/python" -W always "$work/sphere.py" "$work/models" 2> "$work/errors" | tee "$work/seen"
if grep -Eqi 'row|tangent|sphere' "$work/errors"; then echo 'mergekit speaks of it now'; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
