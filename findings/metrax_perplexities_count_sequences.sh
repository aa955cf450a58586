#!/usr/bin/env bash
# google-metrax 0.2.4: the perplexity of several batches weighs short and padded texts like long ones.
#
# Perplexity is documented as exp of the sum of all tokens' weighted log-probabilities by the sum of their weights.
# Within one batch it is that. But the batch's mean is then multiplied by its number of sequences, and merge adds these
# up: two batches of as many sequences count alike, whether they have 4 tokens or 400. The lengths of batches differ
# wherever texts are sorted by length, padded, or masked by sample_weights, which are the tokens' weights here. The same
# texts in one batch, or in others, give another perplexity, and short easy texts make a model look better. Nothing is
# said. (The other metrics of the package, such as Accuracy and MSE, add up numerators and weights, and are right.)
#
# hypha_ray isn't touched: an evaluation's loss is weighed by the tokens that it has counted.
#
# Seen with google-metrax 0.2.4, jax 0.10.2, Python 3.11 (2 texts whose tokens have a probability of 1/2, and 2 longer
# ones with 1/16):
#   4 and 4 tokens: two batches 5.66, one batch 5.66, by the formula 5.66
#   4 and 40 tokens: two batches 5.66, one batch 13.24, by the formula 13.24
#   4 and 400 tokens: two batches 5.66, one batch 15.67, by the formula 15.67
#   4 and 4 tokens, padded to 400: two batches 5.66, one batch 5.66, by the formula 5.66
#   4 and 40 tokens, padded to 400: two batches 5.66, one batch 13.24, by the formula 13.24
#   4 and 400 tokens, padded to 400: two batches 5.66, one batch 15.67, by the formula 15.67
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" jax==0.10.2 flax==0.12.8 numpy==2.4.6 google-metrax==0.2.4

cat > "$work/batches.py" <<'PY'
import math

import jax.numpy as jnp
import metrax
import numpy as np

CHOICES, PADDED = 17, 400


def texts(probability, tokens, width):
    rest = (1 - probability) / (CHOICES - 1)
    predictions = np.full((2, width, CHOICES), rest, np.float32)
    predictions[..., 0] = probability
    weights = np.zeros((2, width), np.float32)
    weights[:, :tokens] = 1
    return predictions, np.zeros((2, width), np.int32), weights


def metric(batch):
    predictions, labels, weights = map(jnp.asarray, batch)
    return metrax.Perplexity.from_model_output(predictions, labels, sample_weights=weights)


def joined(first, second):
    width = max(first[1].shape[1], second[1].shape[1])
    padded = [
        [np.pad(part, [(0, 0), (0, width - part.shape[1])] + [(0, 0)] * (part.ndim - 2)) for part in batch]
        for batch in (first, second)
    ]
    return [np.concatenate(parts) for parts in zip(*padded, strict=True)]


for width in (None, PADDED):
    for longer in (4, 40, 400):
        easy, hard = texts(1 / 2, 4, width or 4), texts(1 / 16, longer, width or longer)
        two = float(metric(easy).merge(metric(hard)).compute())
        one = float(metric(joined(easy, hard)).compute())
        formula = math.exp((4 * math.log(2) + longer * math.log(16)) / (4 + longer))
        label = f"4 and {longer} tokens" + (f", padded to {width}" if width else "")
        print(f"{label}: two batches {two:.2f}, one batch {one:.2f}, by the formula {formula:.2f}")
PY
"$work/env/bin/python" -W ignore "$work/batches.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
