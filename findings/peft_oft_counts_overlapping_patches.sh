#!/usr/bin/env bash
# PEFT 0.21.2: an OFT adapter on a convolution with a kernel larger than 1x1 changes the model before it is trained, and
# merging it gives another model than the one that was trained.
#
# OFT multiplies a frozen weight by a rotation, and an adapter begins with the identity: adding one should change nothing.
# For Conv2d the input is cut into patches, each patch is rotated, and the patches are put together again by torch's fold,
# which adds up where they overlap. So a place is counted once a patch that covers it: once in a corner, nine times inside
# an image for a 3x3 kernel. The convolution then reads that sum. Merging rotates the weight itself, as the method says,
# so a merged adapter is free of the counts. All training was done with them.
# Stride and padding of the layer change nothing about it. No error, no warning. 1x1 kernels and linear layers are right,
# and HRA, another method of rotations, is right for every kernel.
# (That the kernel has to be square has been reported: huggingface/peft 3150.)
#
# hypha_ray isn't touched: it trains LoRA adapters only.
#
# Seen with peft 0.21.2, torch 2.13.0, Python 3.11 (relative distance of outputs; "rotated" are adapters with other weights):
#   OFT, kernel 1: untrained from base 0.00; rotated from merged 0.00; rotated and unmerged again 0.00
#   OFT, kernel 2: untrained from base 2.11; rotated from merged 1.11; rotated and unmerged again 0.00
#   OFT, kernel 3: untrained from base 2.83; rotated from merged 1.06; rotated and unmerged again 0.00
#   OFT, kernel 3, stride 2, padding 1: untrained from base 2.69; rotated from merged 1.08; rotated and unmerged again 0.00
#   HRA, kernel 1: untrained from base 0.00; rotated from merged 0.00; rotated and unmerged again 0.00
#   HRA, kernel 2: untrained from base 0.00; rotated from merged 0.00; rotated and unmerged again 0.00
#   HRA, kernel 3: untrained from base 0.00; rotated from merged 0.00; rotated and unmerged again 0.00
#   HRA, kernel 3, stride 2, padding 1: untrained from base 0.00; rotated from merged 0.00; rotated and unmerged again 0.00
#   what an untrained OFT adapter makes of an image of ones before a 3x3 convolution:
#   1 2 3 2 1
#   2 4 6 4 2
#   3 6 9 6 3
#   2 4 6 4 2
#   1 2 3 2 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() { "$work/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy
pip torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/patches.py" <<'PY'
import copy

import torch
from peft import HRAConfig, OFTConfig, get_peft_model
from torch import nn

METHODS = {
    "OFT": OFTConfig(target_modules=["0"], r=0, oft_block_size=4),
    "HRA": HRAConfig(target_modules=["0"], r=4),
}
LAYERS = {
    "kernel 1": {"kernel_size": 1},
    "kernel 2": {"kernel_size": 2},
    "kernel 3": {"kernel_size": 3},
    "kernel 3, stride 2, padding 1": {"kernel_size": 3, "stride": 2, "padding": 1},
}


def base(channels, **layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(channels, 8, **layer))


def rotate(model):
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape)


def distance(found, wanted):
    return f"{float((found - wanted).norm() / wanted.norm()):.2f}"


torch.manual_seed(1)
images = torch.randn(4, 16, 12, 12)
with torch.no_grad():
    for method, config in METHODS.items():
        for name, layer in LAYERS.items():
            before = base(16, **layer)(images)
            model = get_peft_model(base(16, **layer), copy.deepcopy(config)).eval()
            untrained = distance(model(images), before)
            rotate(model)
            trained = model(images)
            assert float((trained - before).norm() / before.norm()) > 0.1
            model.base_model.merge_adapter()
            merged = distance(model(images), trained)
            model.base_model.unmerge_adapter()
            again = distance(model(images), trained)
            words = f"untrained from base {untrained}; rotated from merged {merged}; rotated and unmerged again {again}"
            print(f"{method}, {name}: {words}")

    print("what an untrained OFT adapter makes of an image of ones before a 3x3 convolution:")
    model = get_peft_model(base(4, kernel_size=3), OFTConfig(target_modules=["0"], r=0, oft_block_size=4)).eval()
    inputs = []
    convolution = next(module for module in model.modules() if type(module) is nn.Conv2d)
    convolution.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model(torch.ones(1, 4, 5, 5))
    for row in inputs[0][0, 0]:
        print(*(f"{float(value):.0f}" for value in row))
PY
"$work/env/bin/python" -W always "$work/patches.py" 2> "$work/errors" | tee "$work/seen"
if grep -Eqi 'oft|conv|kernel' "$work/errors"; then echo 'PEFT speaks of it now'; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
