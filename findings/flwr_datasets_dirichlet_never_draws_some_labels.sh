#!/usr/bin/env bash
# flwr-datasets 0.6.1: InnerDirichletPartitioner never draws a label that isn't one of 0, 1, ..., number of labels -
# 1.
#
# It counts the values of the label column, and then looks up the rows of 0, 1 and so on instead of those values. Of
# stars from 1 to 5 it draws 1 to 4 and no row with 5, of -1 and 1 only 1, of 0, 10 and 20 only 0. What is missing is
# divided among the others, so sizes are right, and every client has the same hole. It ends well as long as the
# partitions need no more rows than the found labels have; else the probabilities are NaN and NumPy refuses them.
# DirichletPartitioner takes any values. The docstring speaks of the column's name and the number of unique classes
# only. The one warning is that the sizes don't sum to the data set, which is allowed, and comes as well if all is
# right.
#
# hypha_ray isn't touched: it doesn't use flwr-datasets.
#
# Seen with flwr-datasets 0.6.1, datasets 4.8.5, Python 3.11 (drawn rows of each label, of 1000; 10 partitions):
#   inner Dirichlet, 90 rows each: 231 of 0, 177 of 1, 146 of 2, 176 of 3, 170 of 4
#   Dirichlet, all rows: 1000 of 0, 1000 of 1, 1000 of 2, 1000 of 3, 1000 of 4
#   inner Dirichlet, 90 rows each: 255 of 1, 197 of 2, 207 of 3, 241 of 4, 0 of 5
#   Dirichlet, all rows: 1000 of 1, 1000 of 2, 1000 of 3, 1000 of 4, 1000 of 5
#   inner Dirichlet, 90 rows each: 0 of -1, 900 of 1
#   Dirichlet, all rows: 1000 of -1, 1000 of 1
#   inner Dirichlet, 90 rows each: 900 of 0, 0 of 10, 0 of 20
#   Dirichlet, all rows: 1000 of 0, 1000 of 10, 1000 of 20
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 datasets==4.8.5 flwr-datasets==0.6.1

cat > "$work/labels.py" <<'PY'
import collections
import warnings

from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, InnerDirichletPartitioner

PARTITIONS, SIZE, ROWS = 10, 90, 1000


def counted(partitioner, labels):
    partitioner.dataset = Dataset.from_dict({"label": [label for label in labels for _ in range(ROWS)]})
    counts = collections.Counter()
    for number in range(PARTITIONS):
        counts.update(partitioner.load_partition(number)["label"])
    return ", ".join(f"{counts[label]} of {label}" for label in labels)


warnings.simplefilter("ignore")
for labels in ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [-1, 1], [0, 10, 20]):
    inner = InnerDirichletPartitioner([SIZE] * PARTITIONS, "label", alpha=10.0)
    print(f"inner Dirichlet, {SIZE} rows each: {counted(inner, labels)}")
    print(f"Dirichlet, all rows: {counted(DirichletPartitioner(PARTITIONS, 'label', alpha=10.0), labels)}")
PY
"$work/env/bin/python" "$work/labels.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
