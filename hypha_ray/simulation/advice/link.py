"""Rates and latencies of links, as a command line has them: ``100mbit``, ``50mbit/5mbit``, ``20ms``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from hypha_ray.config.keys import shown
from hypha_ray.errors import ConfigError

MBPS: Final = {"k": 1e-3, "m": 1.0, "g": 1e3, "t": 1e6}
"""Megabits per second of a unit, by its first letter."""
SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
"""Seconds of a unit of time."""
_NUMBER: Final = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?"
_RATE: Final = rf"({_NUMBER})\s*([kmgt])(?:bit(?:/s|ps)?|bps)"
_RATES: Final = re.compile(rf"{_RATE}(?:\s*/\s*{_RATE})?", re.IGNORECASE)
_SHORT_RATES: Final = re.compile(rf"({_NUMBER})\s*/\s*{_RATE}", re.IGNORECASE)
"""Two rates with the unit behind the second one."""
_BYTE_RATE: Final = re.compile(rf"({_NUMBER})\s*((?i:[kmgt]))(?:B(?:/s|ps)?|(?i:byte.*))")
_TIME: Final = re.compile(rf"({_NUMBER})\s*({'|'.join(SECONDS)})")
RATE_EXAMPLES: Final = "a rate such as 100mbit, 1gbit or 50mbit/5mbit (down/up)"
TIME_EXAMPLES: Final = "a time such as 20ms, 0.1ms or 1s"


@dataclass(frozen=True, slots=True)
class Link:
    """Link of a machine. Rates in megabits per second, each way."""

    down_mbps: float
    up_mbps: float
    latency_s: float = 0.0
    """Seconds that a message takes one way."""

    def scaled(self, factor: float) -> Link:
        """Return a link of other rates with the same latency."""
        return Link(self.down_mbps * factor, self.up_mbps * factor, self.latency_s)

    def __str__(self) -> str:
        if self.down_mbps == self.up_mbps:
            return rate_text(self.down_mbps)
        return f"{rate_text(self.down_mbps)} down and {rate_text(self.up_mbps)} up"


def parse_link(text: str, flag: str, latency_s: float = 0.0) -> Link:
    """Read a rate, or two of them: down, as a worker sees it, and up.

    Args:
        text: value of an option.
        flag: option's name, for errors.
        latency_s: seconds that a message takes one way.

    Raises:
        ConfigError: CFG003, the rate is 0; CFG015, the text is none.

    """
    match = _RATES.fullmatch(_with_both_units(text.strip()))
    if match is None:
        raise ConfigError("CFG015", f"{flag} can't be understood", shown(text), RATE_EXAMPLES, _rate_remedy(text))
    down_number, down_unit, up_number, up_unit = match.groups()
    down_mbps = _mbps(down_number, down_unit)
    up_mbps = down_mbps if up_number is None else _mbps(up_number, up_unit)
    for rate in (down_mbps, up_mbps):
        if not 0 < rate < math.inf:
            raise ConfigError(
                "CFG003", f"{flag} is out of range", shown(text), "a rate above 0", "give what a link has"
            )
    return Link(down_mbps, up_mbps, latency_s)


def parse_latency(text: str, flag: str) -> float:
    """Read a time; returns seconds.

    Raises:
        ConfigError: CFG015, the text is no time; CFG003, it is longer than a minute.

    """
    match = _TIME.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError("CFG015", f"{flag} can't be understood", shown(text), TIME_EXAMPLES, "give number and unit")
    number, unit = match.groups()
    seconds = float(number) * SECONDS[unit]
    if seconds > 60:
        raise ConfigError("CFG003", f"{flag} is out of range", shown(text), "up to 60s", "give the time of a message")
    return seconds


def rate_text(mbps: float) -> str:
    """Write a rate: ``20 Mbit/s``, ``1.5 Gbit/s``."""
    if mbps >= 1000:
        return f"{mbps / 1000:.3g} Gbit/s"
    return f"{mbps:.3g} Mbit/s"


def _with_both_units(text: str) -> str:
    """Turn ``50/5mbit`` into ``50mbit/5mbit``; other texts stay."""
    match = _SHORT_RATES.fullmatch(text)
    if match is None:
        return text
    down, up, unit = match.groups()
    return f"{down}{unit}bit/{up}{unit}bit"


def _mbps(number: str, unit: str) -> float:
    return float(number) * MBPS[unit.lower()]


def _rate_remedy(text: str) -> str:
    """Remedy for a text that is no rate; bytes are turned into bits."""
    match = _BYTE_RATE.fullmatch(text.strip())
    if match is None:
        return "give number and unit"
    number, unit = match.groups()
    return f"count bits, not bytes: {8 * float(number):g}{unit.lower()}bit"
