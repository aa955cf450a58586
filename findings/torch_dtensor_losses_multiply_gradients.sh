#!/usr/bin/env bash
# torch 2.13.0: mse_loss of a DTensor whose batch is split over ranks has gradients as many times too large as there are
# ranks, and if the split is uneven its loss is wrong, too.
#
# By its docstring a DTensor propagates placements and communicates so that operators are numerically correct. Losses without
# a rule of their own get one by decomposition: their formula is traced with the shape of the whole tensor, to see that
# parts stay parts. What runs on each part is the operator itself, and it divides by the number of elements of its part. The
# mean over ranks makes up for that in the loss; in the backward pass nothing does. So mse_loss, smooth_l1_loss, huber_loss,
# binary_cross_entropy and soft_margin_loss give the right loss and gradients times the number of ranks: Adam hides it; SGD,
# clipping, and a sum with another loss don't. No warning. Split along features instead of rows it is the same.
# With rows that don't divide evenly, such as the last batch of an epoch, the loss is the plain mean of the ranks' means, a
# NaN if a rank has no row, and each row's gradient is times all rows by the rows of its rank. For mean() that was mended
# in 2025 (pytorch/pytorch, pull request 163241); weights of nll_loss are another case (185167, open).
# The same formulas in plain operators, l1_loss, cross_entropy, kl_div and reduction="sum" are right.
#
# hypha_ray isn't touched: with FSDP2 its parameters are DTensors, and its batches and losses plain tensors.
#
# Seen with torch 2.13.0, Python 3.11 (as a share of what the whole tensor gives; gradients in the order of the ranks):
#   2 ranks, 6 rows:
#     mse_loss: loss 1.0, gradient 2.0
#     smooth_l1_loss: loss 1.0, gradient 2.0
#     huber_loss: loss 1.0, gradient 2.0
#     binary_cross_entropy: loss 1.0, gradient 2.0
#     soft_margin_loss: loss 1.0, gradient 2.0
#     binary_cross_entropy_with_logits: loss 1.0, gradient 1.0
#     l1_loss: loss 1.0, gradient 1.0
#     kl_div: loss 1.0, gradient 1.0
#     cross_entropy: loss 1.0, gradient 1.0
#     mse_loss, summed, by count: loss 1.0, gradient 1.0
#     mean of squares: loss 1.0, gradient 1.0
#     mse_loss, split along features: loss 1.0, gradient 2.0
#     a linear layer's weight after mse_loss: gradient 2.0
#   2 ranks, 7 rows:
#     mse_loss: loss 1.097, gradient 1.75 2.333
#     binary_cross_entropy_with_logits: loss 0.995, gradient 1.0
#     mean of squares: loss 1.0, gradient 1.0
#   3 ranks, 6 rows:
#     mse_loss: loss 1.0, gradient 3.0
#     smooth_l1_loss: loss 1.0, gradient 3.0
#     huber_loss: loss 1.0, gradient 3.0
#     binary_cross_entropy: loss 1.0, gradient 3.0
#     soft_margin_loss: loss 1.0, gradient 3.0
#     binary_cross_entropy_with_logits: loss 1.0, gradient 1.0
#     l1_loss: loss 1.0, gradient 1.0
#     kl_div: loss 1.0, gradient 1.0
#     cross_entropy: loss 1.0, gradient 1.0
#     mse_loss, summed, by count: loss 1.0, gradient 1.0
#     mean of squares: loss 1.0, gradient 1.0
#     mse_loss, split along features: loss 1.0, gradient 3.0
#     a linear layer's weight after mse_loss: gradient 3.0
#   3 ranks, 7 rows:
#     mse_loss: loss 1.356, gradient 2.333 2.333 7.0
#     binary_cross_entropy_with_logits: loss 1.014, gradient 1.0
#     mean of squares: loss 1.0, gradient 1.0
#   3 ranks, 4 rows (2, 2, none): mse_loss nan
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/losses.py" <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn import functional

FEATURES = 6


def binary(loss):
    return lambda output, target: loss(output.sigmoid(), (target > 0).float())


LOSSES = {
    "mse_loss": functional.mse_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "binary_cross_entropy": binary(functional.binary_cross_entropy),
    "soft_margin_loss": lambda output, target: functional.soft_margin_loss(output, (target > 0).float() * 2 - 1),
    "binary_cross_entropy_with_logits": lambda output, target: functional.binary_cross_entropy_with_logits(
        output, (target > 0).float()
    ),
    "l1_loss": functional.l1_loss,
    "kl_div": lambda output, target: functional.kl_div(output, target.softmax(1), reduction="batchmean"),
    "cross_entropy": lambda output, target: functional.cross_entropy(output, target.softmax(1)),
    "mse_loss, summed, by count": lambda output, target: (
        functional.mse_loss(output, target, reduction="sum") / output.numel()
    ),
    "mean of squares": lambda output, target: (output - target).square().mean(),
}


def batch(rows):
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(rows, FEATURES, generator=generator)
    target = torch.randn(rows, FEATURES, generator=generator) + torch.arange(rows)[:, None]
    return output, target


def of_the_whole(loss, rows):
    output, target = batch(rows)
    output.requires_grad_()
    value = loss(output, target)
    value.backward()
    return value.detach(), output.grad


def of_parts(mesh, loss, rows, dim):
    output, target = (distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in batch(rows))
    output.requires_grad_()
    value = loss(output, target)
    value.backward()
    return value.full_tensor().detach(), output.grad.full_tensor()


def shares(gradient, whole, sizes):
    for part, expected in zip(gradient.split(sizes), whole.split(sizes), strict=True):
        if len(part):
            ratio = part[expected != 0] / expected[expected != 0]
            assert torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=1e-4)
            yield round(float(ratio.mean()), 3)


def compared(mesh, name, rows, dim=0):
    value, gradient = of_parts(mesh, LOSSES[name], rows, dim)
    whole, whole_gradient = of_the_whole(LOSSES[name], rows)
    sizes = [len(part) for part in torch.arange(rows).chunk(mesh.size())]
    found = list(shares(gradient, whole_gradient, sizes))
    share = round(float(value / whole), 3)
    return share, found, sizes, float(value)


def line(name, share, found):
    gradients = " ".join(map(str, found if len(set(found)) > 1 else found[:1]))
    return f"{name}: loss {share}, gradient {gradients}"


def layer_gradient(mesh, split):
    torch.manual_seed(1)
    layer = torch.nn.Linear(FEATURES, FEATURES)
    output, target = batch(6)
    if split:
        layer = distribute_module(layer, mesh)
        output, target = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (output, target))
    functional.mse_loss(layer(output), target).backward()
    return layer.weight.grad.full_tensor() if split else layer.weight.grad


def even(mesh):
    yield f"{mesh.size()} ranks, 6 rows:"
    for name in LOSSES:
        share, found, _, _ = compared(mesh, name, 6)
        yield "  " + line(name, share, found)
    share, found, _, _ = compared(mesh, "mse_loss", 6, dim=1)
    yield "  " + line("mse_loss, split along features", share, found)
    split, whole = layer_gradient(mesh, True), layer_gradient(mesh, False)
    ratio = float((split / whole).mean())
    assert torch.allclose(split, ratio * whole, rtol=1e-4, atol=1e-5)
    yield f"  a linear layer's weight after mse_loss: gradient {ratio:.1f}"


def uneven(mesh):
    yield f"{mesh.size()} ranks, 7 rows:"
    for name in ("mse_loss", "binary_cross_entropy_with_logits", "mean of squares"):
        share, found, sizes, value = compared(mesh, name, 7)
        if name == "mse_loss":
            assert found == [round(7 / size, 3) for size in sizes]
        if name != "mean of squares":
            output, target = (tensor.split(sizes) for tensor in batch(7))
            means = [LOSSES[name](*part) for part in zip(output, target, strict=True)]
            assert abs(float(sum(means)) / len(means) - value) < 1e-4 * value
        yield "  " + line(name, share, found)


def rank_of(rank, size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    lines = [*even(mesh), *uneven(mesh)]
    if size == 3:
        parts = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in batch(4)]
        lines.append(f"3 ranks, 4 rows (2, 2, none): mse_loss {float(functional.mse_loss(*parts).full_tensor())}")
    if rank == 0:
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, store = int(sys.argv[1]), sys.argv[2]
    torch.multiprocessing.spawn(rank_of, (size, store), nprocs=size)
PY
for size in 2 3; do
  OMP_NUM_THREADS=1 "$work/env/bin/python" "$work/losses.py" "$size" "$work/store$size" 2>> "$work/errors"
done | tee "$work/seen"
if grep -q Warning "$work/errors"; then cat "$work/errors"; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
