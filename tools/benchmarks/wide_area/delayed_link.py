"""A cable that takes its time: two network devices in two namespaces, and every packet spends a while between them.

For `links.py`, which runs it as a process for each link with a delay, since a kernel need not have `netem`. It carries
packets as large as the kernel makes them, up to 64 KiB, so hundreds of megabits a second take a fraction of a core.

    python tools/benchmarks/wide_area/delayed_link.py NAMESPACE DEVICE NAMESPACE DEVICE SECONDS

It prints `ready` and goes on.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

# From <linux/if_tun.h> and <sched.h>.
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TAP = 0x0002
_NO_PACKET_INFO = 0x1000
_VNET_HEADER = 0x4000
_CHECKSUM = 1
_SEGMENTS_4 = 2
_SEGMENTS_6 = 4
_CLONE_NEWNET = 0x40000000
LARGEST = (64 << 10) + 64
"""Bytes of the largest packet, with its headers."""


def tap(namespace: str, device: str) -> int:
    """Make a network device in a namespace, into which this process goes; returns its other end."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP | _NO_PACKET_INFO | _VNET_HEADER))
    fcntl.ioctl(end, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTS_4 | _SEGMENTS_6)
    return end


def carry(ends: tuple[int, int], delay_s: float) -> None:
    """Hand on what comes in at either end, at the other one and so many seconds later, for ever."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, (), (), wait_s)[0]:
            far_end = ends[1] if end == ends[0] else ends[0]
            under_way.append((time.monotonic() + delay_s, far_end, os.read(end, LARGEST)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            with suppress(OSError):  # The device isn't up yet, or its queue is full: a network loses packets.
                os.write(end, packet)


if __name__ == "__main__":
    sites = tap(sys.argv[1], sys.argv[2]), tap(sys.argv[3], sys.argv[4])
    print("ready", flush=True)
    carry(sites, float(sys.argv[5]))
