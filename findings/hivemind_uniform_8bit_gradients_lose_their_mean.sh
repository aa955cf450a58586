#!/usr/bin/env bash
# hivemind 1.1.12: a remote expert's gradients that are compressed as UNIFORM_8BIT arrive without their mean.
#
# UNIFORM_8BIT subtracts a tensor's mean, sorts the numbers into 256 buckets, and sends with them the average of each
# bucket. If it may write into the tensor (allow_inplace=True), the mean is subtracted in place, and the averages are
# taken of what is left: the mean is sent nowhere. The server of experts (hivemind.moe) sends all its tensors so. By the
# docstring its compression is for "all inputs, outputs and gradients"; in fact it is for inputs and their gradients. (A
# whole server and its client were seen to do the same; here is the line that packs a reply.) So each gradient that goes
# back through a remote layer has a mean of 0, whatever it was, and what lies before the layer is trained by another
# loss. It isn't an error of rounding: the four others below keep the mean, in place or not, and so does this one
# without it. By the docstring allow_inplace lets the compression modify the tensor "for efficiency".
#
# hypha_ray isn't touched: it doesn't use hivemind. (numpy 2.4 refuses a line of hivemind's, so numpy is 2.2.)
#
# Seen with hivemind 1.1.12, torch 2.13.0, numpy 2.2.6, Python 3.11:
#   NONE sent: mean 3.0 of 3.0, average error 0.0
#   NONE sent with allow_inplace: mean 3.0 of 3.0, average error 0.0
#   NONE sent by a server of experts: mean 3.0 of 3.0, average error 0.0
#   FLOAT16 sent: mean 3.0 of 3.0, average error 0.0
#   FLOAT16 sent with allow_inplace: mean 3.0 of 3.0, average error 0.0
#   FLOAT16 sent by a server of experts: mean 3.0 of 3.0, average error 0.0
#   MEANSTD_16BIT sent: mean 3.0 of 3.0, average error 0.0
#   MEANSTD_16BIT sent with allow_inplace: mean 3.0 of 3.0, average error 0.0
#   MEANSTD_16BIT sent by a server of experts: mean 3.0 of 3.0, average error 0.0
#   QUANTILE_8BIT sent: mean 3.0 of 3.0, average error 0.0
#   QUANTILE_8BIT sent with allow_inplace: mean 3.0 of 3.0, average error 0.0
#   QUANTILE_8BIT sent by a server of experts: mean 3.0 of 3.0, average error 0.0
#   UNIFORM_8BIT sent: mean 3.0 of 3.0, average error 0.0
#   UNIFORM_8BIT sent with allow_inplace: mean 0.0 of 3.0, average error 3.0
#   UNIFORM_8BIT sent by a server of experts: mean 0.0 of 3.0, average error 3.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.2.6 scipy==1.17.1 \
    hivemind==1.1.12

cat > "$work/mean.py" <<'PY'
import asyncio

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.moe.server.connection_handler import ConnectionHandler
from hivemind.proto.runtime_pb2 import CompressionType
from hivemind.utils.tensor_descr import BatchTensorDescriptor


class Expert:
    """In the place of a server's pool: the gradients come out as they went in."""

    async def submit_task(self, *gradients):
        return gradients


def sent(tensor, kind, **options):
    return deserialize_torch_tensor(serialize_torch_tensor(tensor.clone(), kind, **options))


def sent_by_server(tensor, kind):
    """How rpc_backward packs the gradients for the client."""
    schema = BatchTensorDescriptor.from_tensor(tensor, kind)
    [packed] = asyncio.run(ConnectionHandler._process_inputs(None, [tensor.clone()], Expert(), schema))
    return deserialize_torch_tensor(packed)


torch.manual_seed(0)
for name in ("NONE", "FLOAT16", "MEANSTD_16BIT", "QUANTILE_8BIT", "UNIFORM_8BIT"):
    kind, tensor = CompressionType.Value(name), torch.randn(32, 64) + 3
    for way, received in (
        ("sent", sent(tensor, kind)),
        ("sent with allow_inplace", sent(tensor, kind, allow_inplace=True)),
        ("sent by a server of experts", sent_by_server(tensor, kind)),
    ):
        mean, error = abs(received.mean()), (received - tensor).abs().mean()
        print(f"{name} {way}: mean {mean:.1f} of {tensor.mean():.1f}, average error {error:.1f}")
PY
"$work/env/bin/python" -W ignore "$work/mean.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
