#!/usr/bin/env bash
# torch 2.13.0: the average of a model that never changes is another model, if it has buffers of whole numbers.
#
# AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True), as in the example of its page, averages
# all buffers, those of int64 too: decay * n + (1 - decay) * n in float32, and what is behind the point is cut off. Where
# the sum is a hair below n, n becomes n - 1. It depends on the decay: 0.9, 0.9995 and 0.9999 do so, 0.99 and 0.999 don't.
# Positions and tables of indices are such buffers, constant, and mostly not saved: BERT's position_ids here,
# relative_position_index of Swin. The average then looks up wrong rows, with weights that are right, and without a warning.
# (Reports speak of counts that grow, such as num_batches_tracked: pytorch/ignite 2590.)
#
# hypha_ray isn't touched: it averages weights and no buffers.
#
# Seen with torch 2.13.0, transformers 5.23.0, Python 3.11 (100 updates by the same BERT, 64 positions):
#   0.9, multi_avg_fn: 21 of 64 positions moved, outputs differ by 1.8
#   0.9, avg_fn: 21 of 64 positions moved, outputs differ by 1.8
#   0.99, multi_avg_fn: 0 of 64 positions moved, outputs differ by 0.0
#   0.99, avg_fn: 0 of 64 positions moved, outputs differ by 0.0
#   0.999, multi_avg_fn: 0 of 64 positions moved, outputs differ by 0.0
#   0.999, avg_fn: 0 of 64 positions moved, outputs differ by 0.0
#   0.9999, multi_avg_fn: 9 of 64 positions moved, outputs differ by 1.5
#   0.9999, avg_fn: 9 of 64 positions moved, outputs differ by 1.5
#   by hand for 0.9, one update: 21
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0

cat > "$work/average.py" <<'PY'
import math

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from transformers import BertConfig, BertModel

torch.manual_seed(0)
sizes = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
model = BertModel(BertConfig(**sizes)).eval()
ids = torch.arange(64)[None]


def outputs(network):
    with torch.no_grad():
        return network(ids).last_hidden_state


for decay in (0.9, 0.99, 0.999, 0.9999):
    for form in (dict(multi_avg_fn=get_ema_multi_avg_fn(decay)), dict(avg_fn=get_ema_avg_fn(decay))):
        average = AveragedModel(model, use_buffers=True, **form)
        for _ in range(100):
            average.update_parameters(model)  # The model never changes.
        positions = average.module.embeddings.position_ids
        moved = int((positions != model.embeddings.position_ids).sum())
        pairs = zip(average.module.parameters(), model.parameters(), strict=True)
        weights = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
        assert weights < 1e-5, weights
        distance = (outputs(average) - outputs(model)).abs().max().item()
        print(f"{decay}, {next(iter(form))}: {moved} of 64 positions moved, outputs differ by {distance:.1f}")

by_hand = sum(math.floor(float(torch.tensor(float(n)) * 0.9 + torch.tensor(float(n)) * (1 - 0.9))) != n for n in range(64))
print(f"by hand for 0.9, one update: {by_hand}")
PY
"$work/env/bin/python" -W error::UserWarning "$work/average.py" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
