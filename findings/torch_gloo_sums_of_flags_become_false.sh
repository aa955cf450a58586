#!/usr/bin/env bash
# torch 2.13.0: a bool that is reduced over gloo again and again turns from True to False, after eight times with 2 ranks.
#
# all_reduce sums by default, and takes tensors of bool. Gloo adds their bytes: True on one of two ranks comes back as a
# byte of 1 on both, then of 2, 4 and so on, all of them True, and of 256, which is 0. So a flag that stays set, such as
# "a rank has seen a NaN", "stop was asked for", is forgotten by all ranks at once: after 8 reductions with 2 ranks, 4 with
# 4, 2 with 16; with 256 ranks that are all True the first result is False. No error, no warning. NCCL reduces the same call
# by MAX, to avoid just that (pytorch/pytorch, pull request 41959), so code that was tried on GPUs is right there alone.
# A byte of 2 is True to torch's own operators, but its bytes are others: in a file, a hash, a view as uint8.
# any() of a DTensor is such a sum, too, and of flags in uint8 it is the number of ranks that have one, where torch has 1.
# MAX, PRODUCT and MIN keep bools of 0 and 1. Copies of a flag that are reduced once are right, below 256 ranks.
#
# hypha_ray is not touched: its processes add up losses, gradients and squares, and no bool.
#
# Seen with torch 2.13.0 on CPU, gloo, Python 3.11 (a flag that rank 0 sets, reduced ten times):
#   2 ranks, SUM: True True True True True True True True False False
#   2 ranks, SUM, bytes: 1 2 4 8 16 32 64 128 0 0
#   2 ranks, MAX: True True True True True True True True True True
#   2 ranks, MAX, bytes: 1 1 1 1 1 1 1 1 1 1
#   2 ranks, any() of uint8 flags: 1, as a DTensor 2; of bools as a DTensor True, byte 2
#   4 ranks, SUM: True True True True False False False False False False
#   4 ranks, SUM, bytes: 1 4 16 64 0 0 0 0 0 0
#   4 ranks, MAX: True True True True True True True True True True
#   4 ranks, MAX, bytes: 1 1 1 1 1 1 1 1 1 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat > "$work/flags.py" <<'PY'
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def reduced(**options):
    flag = torch.tensor([dist.get_rank() == 0])
    values, numbers = [], []
    for _ in range(10):
        dist.all_reduce(flag, **options)
        values.append(bool(flag))
        numbers.append(int(flag.view(torch.uint8)))
    return values, numbers


def any_of_parts(size):
    mesh, flags = init_device_mesh("cpu", (size,)), torch.ones(size, dtype=torch.uint8)
    parts = distribute_tensor(flags, mesh, [Shard(0)])
    as_bool = distribute_tensor(flags.bool(), mesh, [Shard(0)]).any().full_tensor()
    whole, found, byte = int(flags.any()), int(parts.any().full_tensor()), int(as_bool.view(torch.uint8))
    return f"any() of uint8 flags: {whole}, as a DTensor {found}; of bools as a DTensor {bool(as_bool)}, byte {byte}"


def rank_of(rank, size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    summed, largest = reduced(), reduced(op=dist.ReduceOp.MAX)
    by_hand = [size**step % 256 for step in range(10)]
    assert summed == ([bool(number) for number in by_hand], by_hand)
    everywhere = [None] * size
    dist.all_gather_object(everywhere, (summed, largest))
    assert all(other == everywhere[0] for other in everywhere)
    parts = any_of_parts(size) if size == 2 else None
    if rank == 0:
        for name, (values, numbers) in {"SUM": summed, "MAX": largest}.items():
            print(f"{size} ranks, {name}:", *values)
            print(f"{size} ranks, {name}, bytes:", *numbers)
        if parts is not None:
            print(f"{size} ranks, {parts}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, store = int(sys.argv[1]), sys.argv[2]
    torch.multiprocessing.spawn(rank_of, (size, store), nprocs=size)
PY
for size in 2 4; do
  "$work/env/bin/python" "$work/flags.py" "$size" "$work/store$size" 2>> "$work/errors"
done | tee "$work/seen"
if grep -q 'Warning.*[Bb]ool' "$work/errors"; then echo 'torch speaks of it now'; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
