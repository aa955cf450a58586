#!/usr/bin/env bash
# numcodecs 0.16.6: BitRound, the codec that rounds mantissas, makes -0.0 of the NaN that CUDA's arithmetic gives.
#
# BitRound keeps the first bits of the mantissa and rounds by adding half of the last kept place to the bits as a whole
# number. NumPy's NaN is 0x7fc00000 and stays NaN. CUDA's canonical NaN is 0x7fffffff (by the manual of PTX, for float32,
# and 0x7fff for float16 and bfloat16): the sum runs over into the sign, and what is left is -0.0. With the sign set it
# is 0.0. A NaN of float16 or bfloat16 that was widened to float32 goes as well, if fewer bits are kept than it had.
# So a snapshot of weights or activations from a GPU that diverged is finite when it is read from the archive, sums, means
# and norms of it are numbers, and no warning is printed. The documentation has no word of NaN; keeping all bits is
# documented as no change, and is right. (zarr-developers/numcodecs 793 is about counts of bits as int32.)
#
# hypha_ray isn't touched: its codecs are its own.
#
# Seen with numcodecs 0.16.6, zarr 3.1.6, numpy 2.4.6, Python 3.11 (NumPy's NaN, and that with all bits set, rounded):
#   float16: 1 bits nan and -0.0, 5 bits nan and -0.0, 9 bits nan and -0.0, 10 bits nan and nan
#   float32: 1 bits nan and -0.0, 11 bits nan and -0.0, 22 bits nan and -0.0, 23 bits nan and nan
#   float64: 1 bits nan and -0.0, 26 bits nan and -0.0, 51 bits nan and -0.0, 52 bits nan and nan
#   float32 out of bfloat16: 5 bits -0.0, 7 bits nan, 12 bits nan
#   float32 out of float16: 5 bits -0.0, 7 bits -0.0, 12 bits nan
#   zarr, weights [0.25, nan, 0.75, 1.0], sum nan: read as [0.25, -0.0, 0.75, 1.0], sum 2.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 zarr==3.1.6 numcodecs==0.16.6

cat > "$work/round.py" <<'PY'
import sys

import numpy as np
import zarr
from numcodecs import BitRound
from zarr.codecs import numcodecs as zarr_codecs

INTEGERS = {"float16": np.uint16, "float32": np.uint32, "float64": np.uint64}


def with_bits(name, pattern):
    value = np.array([pattern], INTEGERS[name]).view(name)
    assert np.isnan(value).all()
    return value


def rounded(values, bits):
    codec = BitRound(keepbits=bits)
    return codec.decode(codec.encode(values.copy())).view(values.dtype)


for name, integer in INTEGERS.items():
    mantissa = np.finfo(name).nmant
    all_set = with_bits(name, np.iinfo(integer).max >> 1)
    numpys = np.array([np.nan], name)
    seen = [
        f"{bits} bits {rounded(numpys, bits)[0]} and {rounded(all_set, bits)[0]}"
        for bits in (1, mantissa // 2, mantissa - 1, mantissa)
    ]
    print(f"{name}: {', '.join(seen)}")
for name, pattern in {"bfloat16": 0x7FFF0000, "float16": 0x7FFFE000}.items():
    widened = with_bits("float32", pattern)
    print(f"float32 out of {name}: " + ", ".join(f"{bits} bits {rounded(widened, bits)[0]}" for bits in (5, 7, 12)))

weights = np.array([0.25, 0.5, 0.75, 1.0], np.float32)
weights[1:2] = with_bits("float32", 0x7FFFFFFF)
zarr.create_array(store=sys.argv[1], data=weights, filters=[zarr_codecs.BitRound(keepbits=10)])
read = zarr.open_array(sys.argv[1], mode="r")[:]
print(f"zarr, weights {weights.tolist()}, sum {weights.sum()}: read as {read.tolist()}, sum {read.sum()}")
PY
"$work/env/bin/python" "$work/round.py" "$work/array" 2> "$work/errors" | tee "$work/seen"
if grep -i 'nan\|invalid\|overflow' "$work/errors"; then exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
