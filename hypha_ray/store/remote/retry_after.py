"""Time for which a server asks to be left alone, in the header ``Retry-After`` of its answer."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime

from hypha_ray.store.remote.s3_errors import chain


def retry_after_s(error: BaseException, most_s: float) -> float:
    """Seconds for which a server asks to be left alone, `most_s` at most; 0 if it doesn't ask."""
    for link in chain(error):
        told = str(_headers(link).get("retry-after", "")).strip()
        if told:
            return min(most_s, max(0.0, _seconds(told)))
    return 0.0


def _seconds(told: str) -> float:
    """Seconds that a header means, which are a number or a date."""
    try:
        seconds = float(told)
        return seconds if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(told).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0


def _headers(error: BaseException) -> dict[str, str]:
    """Headers of an answer of HTTP, by name in small letters."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        told = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    else:
        told = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in dict(told).items()}
