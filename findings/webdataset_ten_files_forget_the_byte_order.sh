#!/usr/bin/env bash
# webdataset 1.0.2: arrays with the other byte order come back from .ten files as other numbers.
#
# A .ten entry is webdataset's own format for arrays. Its header has the name of the dtype, which NumPy gives as float32 for
# both byte orders, and the bytes are written as they lie in memory. They are read in the machine's order. Arrays of FITS,
# netCDF 3, GRIB or IDX (MNIST's files) are big-endian on any machine, and NumPy computes with them as with any other: 1.0
# is read as 4.6e-41, and a label of 1 as 16777216. Numbers of one byte are right. Nothing is said, in writing or in
# reading; dtypes that the format doesn't have, such as bool, are refused. .npy entries, which say the byte order, are right.
# The documentation has no word of it.
#
# hypha_ray isn't touched: it writes no such files.
#
# Seen with webdataset 1.0.2, numpy 2.4.6, Python 3.11 (0, 1, 2 in the byte order that isn't the machine's):
#   uint8 in .ten: 0, 1, 2
#   uint8 in .npy: 0, 1, 2
#   int16 in .ten: 0, 256, 512, wrong
#   int16 in .npy: 0, 1, 2
#   int32 in .ten: 0, 1.68e+07, 3.36e+07, wrong
#   int32 in .npy: 0, 1, 2
#   int64 in .ten: 0, 7.21e+16, 1.44e+17, wrong
#   int64 in .npy: 0, 1, 2
#   float16 in .ten: 0, 3.58e-06, 3.81e-06, wrong
#   float16 in .npy: 0, 1, 2
#   float32 in .ten: 0, 4.6e-41, 8.97e-44, wrong
#   float32 in .npy: 0, 1, 2
#   float64 in .ten: 0, 3.04e-319, 3.16e-322, wrong
#   float64 in .npy: 0, 1, 2
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 webdataset==1.0.2

cat > "$work/order.py" <<'PY'
import sys

import numpy as np
import webdataset as wds

FOLDER = sys.argv[1]


def back(array, extension):
    with wds.TarWriter(f"{FOLDER}/data.tar") as writer:
        writer.write({"__key__": "0", extension: array})
    read = next(iter(wds.WebDataset(f"{FOLDER}/data.tar", shardshuffle=False).decode()))[extension]
    return read[0] if isinstance(read, list) else read


def shown(array):
    return ", ".join(f"{number:.3g}" for number in array.tolist())


for name in ("uint8", "int16", "int32", "int64", "float16", "float32", "float64"):
    array = np.arange(3, dtype=np.dtype(name).newbyteorder())
    assert array.tolist() == [0, 1, 2]
    for extension in ("ten", "npy"):
        read = back(array, extension)
        print(f"{name} in .{extension}: {shown(read)}" + ("" if np.array_equal(read, array) else ", wrong"))
PY
"$work/env/bin/python" "$work/order.py" "$work" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
