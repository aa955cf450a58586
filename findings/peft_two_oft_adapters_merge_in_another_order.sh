#!/usr/bin/env bash
# PEFT 0.21.2: two active OFT adapters merge into another linear layer than the one that they were.
#
# Several OFT adapters can be active at once, and merge_adapter and merge_and_unload merge all of them. Unmerged, the input
# goes through the first rotation, then through the second, then through the weight. Merging multiplies the weight by the
# first rotation, and the result by the second, from the same side: now the input meets the second first. Rotations don't
# commute, so the merged layer is another one. merge_adapter with the names in the opposite order gives the right layer.
# One adapter is right, unmerging gives back the start, and HRA, whose rotations don't commute either, merges in its order.
# So does OFT's layer for embeddings, which has its rotation on the other side. No error, no warning.
# (The like was reported of DoRA, huggingface/peft 3608, and is mended there.)
#
# hypha_ray isn't touched: it trains one LoRA adapter at a time.
#
# Seen with peft 0.21.2, torch 2.13.0, Python 3.11 (relative distance of outputs from those of the unmerged adapters):
#   OFT, Linear: one merged 0.00, two merged 0.43, two in the opposite order 0.00, unmerged again 0.00
#   OFT, Embedding: one merged 0.00, two merged 0.00, two in the opposite order 0.44, unmerged again 0.00
#   HRA, Linear: one merged 0.00, two merged 0.00, two in the opposite order 0.50, unmerged again 0.00
#   OFT, Linear, merge_and_unload: 0.43
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() { "$work/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy
pip torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/order.py" <<'PY'
import torch
from peft import HRAConfig, OFTConfig, get_peft_model
from torch import nn

torch.manual_seed(1)
LAYERS = {
    "Linear": (lambda: nn.Linear(16, 8), torch.randn(64, 16)),
    "Embedding": (lambda: nn.Embedding(64, 16), torch.arange(64)),
}


def config(method):
    if method == "HRA":
        return HRAConfig(target_modules=["0"], r=4)
    return OFTConfig(target_modules=["0"], r=0, oft_block_size=4, use_cayley_neumann=False)


def adapted(method, layer):
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(LAYERS[layer][0]()), config(method), adapter_name="first")
    model.add_adapter("second", config(method))
    torch.manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "first" in key or "second" in key:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model.eval()


def distance(found, wanted):
    return f"{float((found - wanted).norm() / wanted.norm()):.2f}"


def merged(method, layer, active, order=None):
    """Distances of the merged and of the unmerged layer from the active adapters."""
    model, inputs = adapted(method, layer), LAYERS[layer][1]
    model.base_model.set_adapter(active)
    wanted = model(inputs)
    model.base_model.merge_adapter(order)
    found = model(inputs)
    model.base_model.unmerge_adapter()
    return distance(found, wanted), distance(model(inputs), wanted)


BOTH = ["first", "second"]
with torch.no_grad():
    for method, layer in (("OFT", "Linear"), ("OFT", "Embedding"), ("HRA", "Linear")):
        one, _ = merged(method, layer, ["first"])
        two, again = merged(method, layer, BOTH)
        opposite, _ = merged(method, layer, BOTH, ["second", "first"])
        words = f"one merged {one}, two merged {two}, two in the opposite order {opposite}, unmerged again {again}"
        print(f"{method}, {layer}: {words}")
    model, inputs = adapted("OFT", "Linear"), LAYERS["Linear"][1]
    model.base_model.set_adapter(BOTH)
    wanted = model(inputs)
    print(f"OFT, Linear, merge_and_unload: {distance(model.merge_and_unload()(inputs), wanted)}")
PY
"$work/env/bin/python" -W always "$work/order.py" 2> "$work/errors" | tee "$work/seen"
if grep -Eqi 'order|commut' "$work/errors"; then echo 'PEFT speaks of it now'; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
