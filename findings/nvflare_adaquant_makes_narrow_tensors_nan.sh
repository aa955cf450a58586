#!/usr/bin/env bash
# NVFlare 2.9.0: ADAQUANT turns a tensor whose values lie close together into NaN.
#
# ModelQuantizer with quantization_type="adaquant" sends each tensor as whole numbers of a few bits, as many as its range
# (largest value less smallest) is worth by the formula of the paper. For a range of 2.25e-4 or less in float32 the formula
# gives one level, which takes 0 bits; the code then divides by 2**0 - 1 levels. All values become NaN in ModelDequantizer,
# nothing is said on either side, and the server adds them to its average. Such ranges are common: changes of weights after
# a short local training (WEIGHT_DIFF), biases, the norms' weights near 1. Somewhat wider ranges have two levels, so each
# value becomes the smallest or the largest. Constant tensors are right.
#
# hypha_ray isn't touched: it has codecs of its own, whose scales are of each block.
#
# Seen with nvflare 2.9.0, bitsandbytes 0.50.2, torch 2.13.0, Python 3.11 (1000 evenly spread values in float32):
#   range 0.1: 0 of 1000 are NaN, 32 different values
#   range 0.01: 0 of 1000 are NaN, 8 different values
#   range 0.001: 0 of 1000 are NaN, 4 different values
#   range 0.0003: 0 of 1000 are NaN, 2 different values
#   range 0.00023: 0 of 1000 are NaN, 2 different values
#   range 0.00022: 1000 of 1000 are NaN, 0 different values
#   range 1e-05: 1000 of 1000 are NaN, 0 different values
#   range 0: 0 of 1000 are NaN, 1 different values
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy bitsandbytes==0.50.2 nvflare==2.9.0

cat > "$work/filters.py" <<'PY'
import logging

import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer

logging.disable(logging.CRITICAL)


def through_the_filters(change):
    context, message = FLContext(), Shareable()
    data = DXO(DataKind.WEIGHT_DIFF, data={"change": change.clone()})
    quantized = ModelQuantizer("adaquant").process_dxo(data, message, context)
    return ModelDequantizer().process_dxo(quantized, message, context).data["change"]


uniform = torch.rand(1000, generator=torch.Generator().manual_seed(0))
uniform = (uniform - uniform.min()) / (uniform.max() - uniform.min())
for width in (1e-1, 1e-2, 1e-3, 3e-4, 2.3e-4, 2.2e-4, 1e-5, 0.0):
    change = 0.5 + width * uniform
    received = through_the_filters(change)
    values = len(received[~received.isnan()].unique())
    print(f"range {width:g}: {int(received.isnan().sum())} of {len(change)} are NaN, {values} different values")
PY
"$work/env/bin/python" "$work/filters.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
