#!/usr/bin/env bash
# ray 2.60.0: StandardScaler and MinMaxScaler don't scale columns of small numbers, as of distances of atoms in metres.
#
# A column whose standard deviation, or range, is below 1e-8 counts as constant and is divided by 1. The bound is
# absolute, where scikit-learn, which a comment names as the model, goes by the column's own size. So a column comes out
# right or as nearly nothing by its unit: distances in nanometres are scaled, and the same ones in metres stay at 1e-10
# next to features of size 1, and a network sees zeros. The docstrings have only s = 0 as a special case, and
# "Transformed values are always in the range [0, 1]", which is kept by values from 0 to 7e-10. Measurements in SI units
# are such columns (charges, capacities, masses of particles), rates, small probabilities, second moments of gradients.
# Nothing is said. MaxAbsScaler compares with 0 and is right.
#
# hypha_ray isn't touched: it doesn't use ray.data.
#
# Seen with ray 2.60.0, pandas 3.1.1, numpy 2.4.6, Python 3.11 (1000 normal distances in each unit, the standard
# deviation after StandardScaler, the largest value after MinMaxScaler and the largest size after MaxAbsScaler; 1 by
# their formulas):
#   1 nm as 1: StandardScaler 1, MinMaxScaler 1, MaxAbsScaler 1
#   1 nm as 0.001: StandardScaler 1, MinMaxScaler 1, MaxAbsScaler 1
#   1 nm as 1e-09: StandardScaler 1e-10, MinMaxScaler 7e-10, MaxAbsScaler 1
#   1 nm as 1e-12: StandardScaler 1e-13, MinMaxScaler 7e-13, MaxAbsScaler 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" 'ray[data]==2.60.0' pandas==3.1.1 numpy==2.4.6 pyarrow==26.0.1

cat > "$work/units.py" <<'PY'
import sys

import numpy as np
import pandas as pd
import ray
from ray.data.preprocessors import MaxAbsScaler, MinMaxScaler, StandardScaler

NANOMETRES = np.random.default_rng(0).normal(1.0, 0.1, size=1000)
SIZES = {StandardScaler: np.std, MinMaxScaler: np.max, MaxAbsScaler: lambda column: np.abs(column).max()}


def scaled(kind, values):
    table = ray.data.from_pandas(pd.DataFrame({"distance": values}))
    return kind(columns=["distance"]).fit_transform(table).to_pandas()["distance"].to_numpy(dtype=float)


ray.init(
    num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20, _temp_dir=sys.argv[1]
)
ray.data.DataContext.get_current().enable_progress_bars = False
for unit in (1.0, 1e-3, 1e-9, 1e-12):
    found = [f"{kind.__name__} {size(scaled(kind, unit * NANOMETRES)):.1g}" for kind, size in SIZES.items()]
    print(f"1 nm as {unit:g}: {', '.join(found)}")
PY
"$work/env/bin/python" -W ignore "$work/units.py" "$work/ray" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
