#!/usr/bin/env bash
# torchft 0.2.0: DiLoCo with use_bucketization averages only what is in its last bucket, so replicas drift apart unsaid.
#
# Pseudo-gradients are packed into flat buffers of bucket_cap_mb (1 GiB by default), and all of these are summed over the
# replicas. Two things go wrong. The step that copies a bucket back is a closure over variables of the loop, and runs when
# the loop has ended: each copies the last bucket. And the loop counts full buckets, however much of one is left empty: a
# tensor that doesn't fit goes into none, with all that come after it. So a weight larger than a bucket, as the embedding
# of a large model is with the default, ends the averaging for the rest of the model. What isn't averaged is stepped on with
# the replica's own pseudo-gradient. Rounds commit, nothing is logged; losses fall, but each replica has a model of its own.
# One bucket for all is right, and so is the default, tensor by tensor. (meta-pytorch/torchft, pull request 278, mended
# another part of this code.)
#
# hypha_ray is another implementation, and is measured beside torchft without buckets (jobs/bench.py, peers).
#
# Seen with torchft 0.2.0, torch 2.13.0, Python 3.11 on CPU: two replicas, inner steps of 1 and 2, two rounds of two steps,
# outer SGD with a rate of 1. Right is 6 for all weights of both.
#   one by one: replicas moved by [6.0, 6.0, 6.0, 6.0] and [6.0, 6.0, 6.0, 6.0]
#   one bucket: replicas moved by [6.0, 6.0, 6.0, 6.0] and [6.0, 6.0, 6.0, 6.0]
#   buckets of 16 kB, four weights of 8 kB: replicas moved by [4.0, 4.0, 6.0, 4.0] and [8.0, 8.0, 6.0, 8.0]
#   buckets of 16 kB, weights of 4, 200, 8 kB: replicas moved by [4.0, 4.0, 4.0] and [8.0, 8.0, 8.0]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchft==0.2.0 numpy

cat > "$work/diloco.py" <<'PY'
import logging
import warnings
from datetime import timedelta

import torch
import torch.multiprocessing as processes
from torch import nn

ROUNDS, INNER_STEPS = 2, 2
BUCKETS = {"use_bucketization": True, "bucket_cap_mb": 16 / 1024}
CASES = {
    "one by one": ([2000] * 4, {}),
    "one bucket": ([2000] * 4, {"use_bucketization": True}),
    "buckets of 16 kB, four weights of 8 kB": ([2000] * 4, BUCKETS),
    "buckets of 16 kB, weights of 4, 200, 8 kB": ([1000, 50_000, 2000], BUCKETS),
}


class Model(nn.Module):
    """Weights of 4 bytes a number, one tensor for each size."""

    def __init__(self, sizes):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(size) for size in sizes)


def trained(rank, address, sizes, options):
    """Train as one of two replicas, and return how far each weight has moved."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    model = Model(sizes)
    start = [weight.detach().clone() for weight in model.weights]
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=120)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), min_replica_size=2, use_async_quorum=False, init_sync=False, timeout=limit,
        quorum_timeout=limit, connect_timeout=limit, load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        replica_id=f"replica-{rank}", rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        lighthouse_addr=address, hostname="localhost",
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=INNER_STEPS, **options):
        for _ in range(ROUNDS * INNER_STEPS):
            for weight in model.weights:
                weight.grad = torch.full_like(weight, rank + 1.0)  # Steps of 1 and of 2.
            inner.step()
    assert manager.current_step() == ROUNDS
    manager.shutdown(wait=False)
    return [round((before - weight.detach()).mean().item(), 3) for before, weight in zip(start, model.weights)]


def replica(rank, addresses, results):
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for (name, case), address in zip(CASES.items(), addresses):
        results[name, rank] = trained(rank, address, *case)


if __name__ == "__main__":
    from torchft.coordination import LighthouseServer

    lighthouses = [LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100) for _ in CASES]
    addresses = [lighthouse.address() for lighthouse in lighthouses]
    with processes.get_context("spawn").Manager() as shared:
        results = shared.dict()
        processes.spawn(replica, (addresses, results), nprocs=2)
        for name in CASES:
            print(f"{name}: replicas moved by {results[name, 0]} and {results[name, 1]}", flush=True)
    for lighthouse in lighthouses:
        lighthouse.shutdown()
PY
"$work/env/bin/python" "$work/diloco.py" 2> "$work/errors" | grep replicas | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
