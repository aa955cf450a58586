"""Calls of other programs by HTTP, JSON in and out."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from hypha_ray.errors import line_of

_MOST_BYTES = 1 << 30
"""Most bytes of an answer."""
_LATER = frozenset({408, 425, 429})
"""Statuses below 500 of a request that may be answered if it is made again."""


class Unreachable(Exception):
    """There was no answer, or one that says that there may be one later."""


class TooLate(Exception):
    """There was no answer in time."""


class Refused(Exception):
    """The answer is that the request is wrong, or the answer isn't JSON."""

    status: int | None = None
    """Status of the answer; None if the request was answered well, but not in JSON."""


def call(
    url: str, payload: Mapping[str, Any] | None, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Any:
    """Post a payload, or get a page without one; return the answer, and None if it is empty.

    Args:
        url: address.
        payload: value to post as JSON; None: nothing is posted.
        timeout_s: longest silence of the other side.
        headers: headers beside those that JSON needs.

    Raises:
        Unreachable: no answer, or a status that tells of trouble on the other side.
        TooLate: no answer in time.
        Refused: a status that tells of a wrong request, or an answer that isn't JSON.

    """
    body = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read(_MOST_BYTES)
            # The end of a connection is no error in a body that is read by a limit, nor among headers.
            cut_off = answer.length and len(text) < _MOST_BYTES
            if cut_off or (payload is not None and answer.length is None and not text):
                raise http.client.IncompleteRead(text, answer.length)
        return json.loads(text) if text.strip() else None
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(2000).decode(errors="replace").split())[:300]
        if error.code >= 500 or error.code in _LATER:
            raise Unreachable(f"status {error.code}: {said}") from None
        refused = Refused(f"status {error.code}: {said}")
        refused.status = error.code
        raise refused from None
    except ValueError:
        raise Refused("an answer that isn't JSON") from None
    except TimeoutError:
        raise TooLate(f"no answer in {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise TooLate(f"no answer in {timeout_s:g} s") from None
        raise Unreachable(line_of(error, url)) from None
