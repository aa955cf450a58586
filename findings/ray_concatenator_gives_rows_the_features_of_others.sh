#!/usr/bin/env bash
# ray 2.60.0: Concatenator and FeatureHasher give rows of a shuffled or filtered DataFrame the features of others.
#
# Both put their new column into a pandas block as a Series that has the index 0, 1, 2, and pandas assigns by index.
# With any other index the new column is permuted against the rest: the third row's features go to the row whose index
# is 2, and rows whose index is beyond the block's length get NaN. ray.data.from_pandas keeps a frame as it is, so
# that's met by whatever was shuffled, sorted, filtered or split before, as by train_test_split or sample, and has kept
# its index. The features of a training set then have nothing to do with its labels. transform_batch, as for inference,
# does the same. Blocks that are in Arrow's format, as those of files or after map_batches, have no index and are right,
# as are the other preprocessors. Nothing is said, and the documentation has no word of an index.
#
# hypha_ray isn't touched: it doesn't use ray.data.
#
# Seen with ray 2.60.0, pandas 3.1.1, numpy 2.4.6, Python 3.11 (1000 rows, y = 3 width - 2 height; the share of y's
# variance that a linear model on the column explains):
#   Concatenator, as it was: explains 1.00, 0 of 1000 rows without features
#   Concatenator, shuffled: explains 0.00, 0 of 1000 rows without features
#   Concatenator, sorted by y: explains 0.00, 0 of 1000 rows without features
#   Concatenator, a sample of 800: explains 0.01, 163 of 800 rows without features
#   Concatenator, y above 0: explains 0.01, 252 of 486 rows without features
#   Concatenator, shuffled, index reset: explains 1.00, 0 of 1000 rows without features
#   Concatenator, shuffled, transform_batch: explains 0.00, 0 of 1000 rows without features
#   FeatureHasher, as it was: explains 1.00, 0 of 1000 rows without features
#   FeatureHasher, shuffled: explains 0.00, 0 of 1000 rows without features
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" 'ray[data]==2.60.0' pandas==3.1.1 numpy==2.4.6 pyarrow==26.0.1

cat > "$work/rows.py" <<'PY'
import sys

import numpy as np
import pandas as pd
import ray
from ray.data.preprocessors import Concatenator, FeatureHasher

DRAW = np.random.default_rng(0)
TABLE = pd.DataFrame({"width": DRAW.normal(size=1000), "height": DRAW.normal(size=1000)})
TABLE["y"] = 3 * TABLE["width"] - 2 * TABLE["height"]
SHUFFLED = TABLE.sample(frac=1, random_state=0)
CONCATENATOR = Concatenator(columns=["width", "height"], output_column_name="features")
HASHER = FeatureHasher(columns=["width", "height"], num_features=8, output_column="features")


def shown(label, table):
    missing = np.array([np.ndim(features) == 0 for features in table["features"]])
    inputs = np.stack(table["features"][~missing].tolist()).astype(float)
    targets = table["y"][~missing].to_numpy(dtype=float)
    inputs = np.column_stack([inputs, np.ones(len(inputs))])
    rest = targets - inputs @ np.linalg.lstsq(inputs, targets, rcond=None)[0]
    explained = 1 - rest.var() / targets.var()
    print(f"{label}: explains {explained:.2f}, {missing.sum()} of {len(table)} rows without features")


def through_dataset(preprocessor, table):
    return preprocessor.transform(ray.data.from_pandas(table)).to_pandas()


ray.init(
    num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20, _temp_dir=sys.argv[1]
)
ray.data.DataContext.get_current().enable_progress_bars = False
shown("Concatenator, as it was", through_dataset(CONCATENATOR, TABLE))
shown("Concatenator, shuffled", through_dataset(CONCATENATOR, SHUFFLED))
shown("Concatenator, sorted by y", through_dataset(CONCATENATOR, TABLE.sort_values("y")))
shown("Concatenator, a sample of 800", through_dataset(CONCATENATOR, TABLE.sample(800, random_state=0)))
shown("Concatenator, y above 0", through_dataset(CONCATENATOR, TABLE[TABLE["y"] > 0]))
shown("Concatenator, shuffled, index reset", through_dataset(CONCATENATOR, SHUFFLED.reset_index(drop=True)))
shown("Concatenator, shuffled, transform_batch", CONCATENATOR.transform_batch(SHUFFLED.copy()))
shown("FeatureHasher, as it was", through_dataset(HASHER, TABLE))
shown("FeatureHasher, shuffled", through_dataset(HASHER, SHUFFLED))
PY
"$work/env/bin/python" -W ignore "$work/rows.py" "$work/ray" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
