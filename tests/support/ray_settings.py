"""Ray's settings, read anew: its library reads its variables once, as it is loaded, before a process is forked.

What reads them is no function of the library's interface, so it is found by its symbol. It sets every one of them.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CONSTRUCTOR = "_ZN9RayConfigC1Ev"
"""What sets the settings from variables: `RayConfig::RayConfig()`."""
SETTINGS = "_ZZN9RayConfig8instanceEvE6config"
"""The settings themselves: `config` in `RayConfig::instance()`."""
KNOWN = "PyInit__raylet"
"""A symbol whose address the loader tells."""
SYMBOL_TABLE = 2
"""Type of a section of an ELF file."""


def reader() -> Callable[[], None]:
    """What has Ray's library, which is loaded, take its settings from the variables that this process has then."""
    import ray._raylet

    path = Path(ray._raylet.__file__)
    constructor, settings, known = symbols(path, [CONSTRUCTOR, SETTINGS, KNOWN])
    found = ctypes.cast(getattr(ctypes.CDLL(str(path)), KNOWN), ctypes.c_void_p).value
    assert found is not None
    start = found - known
    return partial(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(start + constructor), start + settings)


def symbols(library: Path, names: list[str]) -> list[int]:
    """Places of symbols in a library, which may be local ones, from where it begins."""
    import numpy as np

    layout = [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        headers = _sections(content)
        table = next(header for header in headers if header[1] == SYMBOL_TABLE)
        entries = np.frombuffer(content[table[4] : table[4] + table[5]], np.dtype(layout))
        text = content[headers[table[6]][4] :][: headers[table[6]][5]]
        at = [text.index(f"\0{name}\0".encode()) + 1 for name in names]
        return [int(entries["value"][entries["name"] == place][0]) for place in at]


def _sections(content: Any) -> list[tuple[int, ...]]:
    """Headers of the sections of an ELF file of 64 bits; of each, [1] is its type, [4] its place, [5] its length."""
    (first,), (size, number) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", content, first + size * index) for index in range(number)]
