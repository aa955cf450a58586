"""Refusals of URLs that no file system can open, however often it is tried."""

from __future__ import annotations

from hypha_ray.config.value_types import is_malformed, malformed
from hypha_ray.errors import ConfigError, line_of

KINDS = "s3, gs, http, https, hf or file"
"""Kinds of URLs that are documented; any other one that fsspec knows works, too."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extra of hypha_ray that has the package for a kind of URL."""


def refusal_of_url(error: Exception, url: str) -> ConfigError | None:
    """Return the refusal of a URL that is malformed, of an unknown kind, or of a kind that needs a missing package.

    Args:
        error: error that fsspec, or the file system, raised for the URL.
        url: the URL.

    Returns:
        The refusal; None if the error has another cause.

    """
    if is_malformed(url):
        return malformed(url)
    kind = url.partition("://")[0]
    got = line_of(error, url)
    if isinstance(error, ImportError):
        fix = f"pip install 'hypha_ray[{EXTRAS[kind]}]'" if kind in EXTRAS else "install it on all machines"
        return ConfigError("DATA064", f"{kind}:// needs a package that isn't installed here", got, fix=fix)
    if isinstance(error, ValueError):
        return ConfigError("CFG003", f"a URL of the kind {kind}:// can't be read", got, KINDS, "use another one")
    return None
