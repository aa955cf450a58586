"""File systems that fsspec knows, opened for a URL."""

from __future__ import annotations

from typing import Any

import fsspec


class TooLargeError(Exception):
    """A file that is larger than allowed."""


def open_url(url: str, reads_credentials: bool = False) -> tuple[Any, str]:
    """File system of a URL, and the path there.

    Args:
        url: URL, or a path of this machine.
        reads_credentials: whether to make a new file system, which reads credentials again.

    """
    options: dict[str, Any] = {}
    if reads_credentials:
        options["skip_instance_cache"] = True
    if url.startswith(("http://", "https://")) and "::" not in url:
        from hypha_ray.store.http_client import client

        options["get_client"] = client
    fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path


def is_http(fs: Any) -> bool:
    """Whether a file system is one of HTTP."""
    return "http" in _protocols(fs)


def is_s3(fs: Any) -> bool:
    """Whether a file system is an object store of S3's kind."""
    return "s3" in _protocols(fs)


def _protocols(fs: Any) -> tuple[str, ...]:
    protocol = getattr(fs, "protocol", ())
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
