#!/usr/bin/env bash
# compressed-tensors 0.20.1: with the strategy "token" all tokens of a two-dimensional input share one scale.
#
# W8A8 models have dynamic activations with a scale for each token, so that one with large numbers doesn't coarsen the
# rest. The scales are computed by reducing all dimensions but the first two, batch and token. Of an input of (tokens,
# width) nothing is left to reduce, and that is taken for "all of it": one scale for the tensor, as with the strategy
# "tensor". With four dimensions the third shares a scale. A mixture's experts get such inputs, the rows that were
# routed to them. One row of a hundred times the length then makes the others wrong by 68 % and not by 0.6 %, and a
# token's output depends on which others came along. vLLM, which serves such models, computes a scale a row, so the
# quality that is measured before is not that of the served model. Nothing is said. "group" counts from the end and is
# right in each shape.
#
# hypha_ray isn't touched: it doesn't use the package.
#
# Seen with compressed-tensors 0.20.1, torch 2.13.0, Python 3.11 (16 tokens, the first 100 times as long, errors of the
# rest):
#   token, inputs of shape (1, 16, 64): 0.6 % off
#   token, inputs of shape (4, 4, 64): 0.6 % off
#   token, inputs of shape (2, 2, 4, 64): 28.7 % off
#   token, inputs of shape (16, 64): 68.0 % off
#   tensor, inputs of shape (1, 16, 64): 68.0 % off
#   tensor, inputs of shape (4, 4, 64): 68.0 % off
#   tensor, inputs of shape (2, 2, 4, 64): 68.0 % off
#   tensor, inputs of shape (16, 64): 68.0 % off
#   group, inputs of shape (1, 16, 64): 0.6 % off
#   group, inputs of shape (4, 4, 64): 0.6 % off
#   group, inputs of shape (2, 2, 4, 64): 0.6 % off
#   group, inputs of shape (16, 64): 0.6 % off
#   a scale a token, by another computation: 0.6 % off
#   one token beside the long one, not alone: 59.0 % off
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0 \
    compressed-tensors==0.20.1

cat > "$work/tokens.py" <<'PY'
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)

TOKENS, WIDTH = 16, 64


def layer(strategy, **options):
    """A linear layer whose inputs are rounded to 8 bits; its weights stay as they are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32, bias=False))
    activations = QuantizationArgs(num_bits=8, symmetric=True, dynamic=True, strategy=strategy, **options)
    scheme = QuantizationScheme(targets=["Linear"], input_activations=activations)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}))
    return model


def by_hand(inputs):
    scales = inputs.abs().amax(-1, keepdim=True) / 127.5
    return (inputs / scales).round().clamp(-128, 127) * scales


torch.manual_seed(1)
inputs = torch.randn(TOKENS, WIDTH)
inputs[0] *= 100
for name, options in (("token", {}), ("tensor", {}), ("group", {"group_size": 32})):
    model = layer(name, **options)
    weight = model[0].weight.detach()
    exact = inputs @ weight.T
    for shape in ((1, TOKENS, WIDTH), (4, 4, WIDTH), (2, 2, 4, WIDTH), (TOKENS, WIDTH)):
        with torch.no_grad():
            outputs = model(inputs.view(shape)).view(TOKENS, -1)
        error = (outputs - exact)[1:].norm() / exact[1:].norm()
        print(f"{name}, inputs of shape {shape}: {100 * error:.1f} % off")
error = ((by_hand(inputs) - inputs) @ weight.T)[1:].norm() / exact[1:].norm()
print(f"a scale a token, by another computation: {100 * error:.1f} % off")
model = layer("token")
with torch.no_grad():
    alone, together = model(inputs[1:2]), model(inputs[:2])[1:]
print(f"one token beside the long one, not alone: {100 * (together - alone).norm() / alone.norm():.1f} % off")
PY
"$work/env/bin/python" -W ignore "$work/tokens.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
