"""Errors in the terms of Python: names of arguments and keys in place of flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hypha_ray.errors import HyphaError

_FLAG = re.compile(r"--([a-z][\w.-]*)")
_COMMAND = re.compile(r"jobs/|hypha-ray ")
"""A command in a message, whose flags stay."""


@contextmanager
def flagless() -> Iterator[None]:
    """Raise errors of the block with names of arguments and keys in place of flags."""
    try:
        yield
    except HyphaError as error:
        texts = [in_python(text) for text in (error.what, error.got, error.allowed, error.fix)]
        if texts == [error.what, error.got, error.allowed, error.fix]:
            raise
        raise type(error)(error.code, *texts) from error


def in_python(text: str) -> str:
    """Write ``--resume`` as ``resume=True``, and other flags as the argument or key of the same name."""
    if _COMMAND.search(text):
        return text
    text = text.replace("see --help", "see docs/configuration.md").replace("--resume", "resume=True")
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)
