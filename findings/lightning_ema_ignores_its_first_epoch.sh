#!/usr/bin/env bash
# Lightning 2.6.6: EMAWeightAveraging(update_starting_at_epoch=...) averages from the first step on.
#
# The callback keeps a moving average of the weights, and validates and saves that. update_starting_at_step leaves out
# the steps before it. update_starting_at_epoch leaves out none: an update is made if the condition on steps holds or
# the one on epochs, and without update_starting_at_step that on steps always holds. The weights of the first epochs,
# which the setting is to keep out, are in the average, and validation uses it; what the setting adds is a second update
# with the same weights at the end of each later epoch. With update_every_n_steps=0, the only way to have it obeyed,
# there is one update an epoch, by a decay that is meant for steps. The arguments aren't described in the documentation.
#
# hypha_ray isn't touched: it doesn't use Lightning.
#
# Seen with pytorch-lightning 2.6.6, torch 2.13.0, Python 3.11 (the weight is the number of steps, 5 an epoch; per
# epoch):
#   nothing set: 5 updates 1.90, 10 updates 4.49, 15 updates 8.06, 20 updates 12.22
#   from step 10: 0 updates 0.00, 0 updates 0.00, 5 updates 11.90, 10 updates 14.49
#   from epoch 2: 5 updates 1.90, 10 updates 4.49, 16 updates 8.75, 22 updates 13.36
#   from epoch 100: 5 updates 1.90, 10 updates 4.49, 15 updates 8.06, 20 updates 12.22
#   from epoch 2, by another computation: 0 updates 0.00, 0 updates 0.00, 5 updates 11.90, 10 updates 14.49
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pytorch-lightning==2.6.6

cat > "$work/epochs.py" <<'PY'
import contextlib
import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging

DECAY, STEPS, EPOCHS = 0.9, 5, 4


class Model(pl.LightningModule):
    """Its one weight is the number of steps."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, number):
        return -self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Record(pl.Callback):
    def __init__(self, averaging):
        self.averaging, self.seen = averaging, []

    def on_train_epoch_end(self, trainer, model):
        average = self.averaging._average_model
        self.seen.append((average.n_averaged.item(), average.module.weight.item()))


def trained(**options):
    averaging = EMAWeightAveraging(decay=DECAY, **options)
    record = Record(averaging)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[averaging, record], **quiet)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.zeros(STEPS, 1)))
    return record.seen


def told(name, seen):
    print(f"{name}: " + ", ".join(f"{count} updates {average:.2f}" for count, average in seen))


def from_step(first):
    count, average = 0, 0.0
    for step in range(STEPS * EPOCHS):
        if step >= first:
            average = DECAY * average + (1 - DECAY) * (step + 1) if count else step + 1.0
            count += 1
        if step % STEPS == STEPS - 1:
            yield count, average


told("nothing set", trained())
told("from step 10", trained(update_starting_at_step=10))
told("from epoch 2", trained(update_starting_at_epoch=2))
told("from epoch 100", trained(update_starting_at_epoch=100))
told("from epoch 2, by another computation", from_step(2 * STEPS))
PY
"$work/env/bin/python" -W ignore "$work/epochs.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
