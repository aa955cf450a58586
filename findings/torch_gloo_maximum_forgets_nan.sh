#!/usr/bin/env bash
# torch 2.13.0: all_reduce with MAX or MIN on gloo keeps a NaN or forgets it, by the rank that has it and by its position.
#
# torch.maximum, amax and a SUM of all_reduce are NaN if one of the numbers is. Gloo takes the larger of two by one
# comparison, which is false for NaN, so the number that comes first stays. The order is that of a ring, another one in
# each part of the tensor. So of a tensor that is NaN on one rank a part comes back NaN, the rest without a trace of it.
# All ranks get the same. torch's page on torch.distributed says nothing of NaN. (MLX had a like report in August 2026,
# ml-explore/mlx 4072.)
# Two of torch's own functions build on it. amax() of a DTensor that is split over ranks differs from amax() of the whole.
# clip_grad_norm_ of FSDP2 with the largest gradient as its norm (norm_type=inf) gives a finite norm, passes
# error_if_nonfinite, and leaves the NaN in one rank's part of the gradients. With the L2 norm, which is summed, it raises.
# Sums are safe, and so is the MAX of a number that is 1 for a NaN; the MAX of losses or of norms is not.
#
# hypha_ray isn't touched: its processes add up losses, gradients and squares, and reduce no maximum.
#
# Seen with torch 2.13.0 on CPU, gloo, Python 3.11 (1 000 values, all of them NaN on one rank: how many are NaN after it):
#   2 ranks, SUM: 1000 if NaN is on rank 0, 1000 on rank 1
#   2 ranks, MAX: 500 if NaN is on rank 0, 500 on rank 1
#   2 ranks, MIN: 500 if NaN is on rank 0, 500 on rank 1
#   2 ranks, MAX of one value: 1 if NaN is on rank 0, 0 on rank 1
#   amax of a DTensor with a NaN: nan if it is on rank 0, 1.0 on rank 1; of the whole tensor nan and nan
#   FSDP2, norm_type 2: refused if NaN is on rank 0, refused on rank 1
#   FSDP2, norm_type inf: refused if NaN is on rank 0, norm 4.0 on rank 1, which keeps its NaN
#   3 ranks, SUM: 1000 if NaN is on rank 0, 1000 on rank 1, 1000 on rank 2
#   3 ranks, MAX: 334 if NaN is on rank 0, 334 on rank 1, 332 on rank 2
#   3 ranks, MIN: 334 if NaN is on rank 0, 334 on rank 1, 332 on rank 2
#   3 ranks, MAX of one value: 1 if NaN is on rank 0, 0 on rank 1, 0 on rank 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/ranks.py" <<'PY'
import math
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

NAN = float("nan")


def reduced(op, count, where):
    values = torch.full((count,), NAN if dist.get_rank() == where else float(dist.get_rank() + 1))
    dist.all_reduce(values, op=op)
    everywhere = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, values)
    assert all(torch.equal(other.nan_to_num(-1), values.nan_to_num(-1)) for other in everywhere)
    return int(values.isnan().sum())


def largest(mesh, where):
    whole = torch.arange(4.0)
    whole[2 * where] = NAN
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    return float(parts.amax().full_tensor()), float(whole.amax())


def clipped(mesh, norm_type, where):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(4, 8)).sum().backward()
    if dist.get_rank() == where:
        layer.weight.grad.to_local()[0, 0] = NAN
    try:
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, norm_type=norm_type, error_if_nonfinite=True)
    except RuntimeError as error:
        assert "non-finite" in str(error)
        return "refused"
    left = torch.zeros(dist.get_world_size())
    left[dist.get_rank()] = layer.weight.grad.to_local().isnan().sum()
    dist.all_reduce(left)
    assert left.tolist() == [float(rank == where) for rank in range(dist.get_world_size())]
    return f"norm {float(norm.full_tensor())}"


def line(name, found):
    first, *others = found
    rest = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(others, 1))
    return f"{name}: {first} if {'it' if 'DTensor' in name else 'NaN'} is on rank 0, {rest}"


def rank_of(rank, size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    lines, ranks = [], range(size)
    for op in ("SUM", "MAX", "MIN"):
        lines.append(line(f"{size} ranks, {op}", [reduced(getattr(dist.ReduceOp, op), 1000, where) for where in ranks]))
    lines.append(line(f"{size} ranks, MAX of one value", [reduced(dist.ReduceOp.MAX, 1, where) for where in ranks]))
    if size == 2:
        mesh = init_device_mesh("cpu", (size,))
        found = [largest(mesh, where) for where in ranks]
        lines.append(line("amax of a DTensor with a NaN", [part for part, _ in found]))
        lines[-1] += f"; of the whole tensor {found[0][1]} and {found[1][1]}"
        lines.append(line("FSDP2, norm_type 2", [clipped(mesh, 2.0, where) for where in ranks]))
        lines.append(line("FSDP2, norm_type inf", [clipped(mesh, math.inf, where) for where in ranks]))
        lines[-1] += ", which keeps its NaN"
    if rank == 0:
        print("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, store = int(sys.argv[1]), sys.argv[2]
    torch.multiprocessing.spawn(rank_of, (size, store), nprocs=size)
PY
for size in 2 3; do
  "$work/env/bin/python" "$work/ranks.py" "$size" "$work/store$size" 2>> "$work/errors"
done | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
