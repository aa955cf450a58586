#!/usr/bin/env bash
# In a compiled function numba frees an array after the last use of its name, not at the end of its scope: an address
# taken from it by `array.ctypes.data` outlives the memory, in a function where the same lines are right in Python.
#
# Numba counts references to arrays in compiled code, and drops a variable's where nothing later names it. An address
# is a number and holds nothing. So a kernel that takes the address of its own scratch array once, and works with it in
# a loop, works on memory that other threads may own by then. `array.ctypes` is documented as supported, and NumPy's own
# caveat about `ctypes.data` is about temporary arrays; here the array has a name.
# The script only counts: numba's own statistics of allocations, read between the last use of the name and the end of
# the function. Nothing is read from or written to the address.
#
# Seen with numba 0.68.1, llvmlite 0.50.0 and numpy 2.4.6, Python 3.11, glibc 2.36:
#   in Python, the name's array is alive while the address is in use: True
#   compiled, arrays alive while the address is in use: 0
#   compiled, with the name used again at the end: 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check numba==0.68.1 numpy==2.4.6

cat > "$work/count.py" <<'PY'
import weakref

import numba
import numpy as np
from numba import njit, objmode, types
from numba.core.runtime import rtsys

lines = []


def alive():
    statistics = rtsys.get_allocation_stats()
    return statistics.alloc - statistics.free


@njit
def address_only(size):
    scratch = np.empty(size, np.float32)
    address = np.uint64(scratch.ctypes.data)
    with objmode(arrays=types.int64):
        arrays = alive()
    return arrays, address


@njit
def named_again(size):
    scratch = np.empty(size, np.float32)
    address = np.uint64(scratch.ctypes.data)
    with objmode(arrays=types.int64):
        arrays = alive()
    return arrays, address, len(scratch)


def in_python(size):
    scratch = np.empty(size, np.float32)
    reference = weakref.ref(scratch)
    address = scratch.ctypes.data
    return reference() is not None and address != 0


address_only(16), named_again(16)
before = alive()
print("in Python, the name's array is alive while the address is in use:", in_python(16))
print("compiled, arrays alive while the address is in use:", address_only(16)[0] - before)
print("compiled, with the name used again at the end:", named_again(16)[0] - before)
PY
NUMBA_NRT_STATS=1 "$work/env/bin/python" "$work/count.py" | tee "$work/seen"
grep -qx "in Python, the name's array is alive while the address is in use: True" "$work/seen"
grep -qx 'compiled, arrays alive while the address is in use: 0' "$work/seen"
grep -qx 'compiled, with the name used again at the end: 1' "$work/seen"
echo 'as described'
