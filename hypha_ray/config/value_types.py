"""Kinds of values in a job file."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hypha_ray.errors import ConfigError
from hypha_ray.plugins import Plugin, is_known
from hypha_ray.texts import redacted

CLUSTER = "hypha_ray"
"""Ray namespace of actors that belong to no run, such as data nodes."""
_LONGEST_TAG = 64
"""Longest tag in characters; trackers take no longer ones."""
Encoding: TypeAlias = Annotated[str, Plugin("codecs")]
"""Names of codecs."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")
_SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
MACHINES_AT_MOST = 100_000
"""Largest number of machines of a fleet: ten times as many as can be simulated in five minutes."""
FleetSize = Annotated[int, Field(ge=1, le=MACHINES_AT_MOST)]


def run_name(text: str) -> str:
    """Check the name of a run, which is also its namespace in Ray."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", text):
        raise ValueError("up to 100 letters, digits, dots, underscores or hyphens, with a letter or digit first")
    if text == CLUSTER:
        raise ValueError(f"a name other than {CLUSTER}, which is the namespace of data nodes")
    return text


def tag(text: str) -> str:
    """Check a word by which runs are found."""
    if not 0 < len(text) <= _LONGEST_TAG or text != text.strip() or "," in text or not text.isprintable():
        raise ValueError(f"1 to {_LONGEST_TAG} characters without a comma, and no space at either end")
    return text


def without_repetition(tags: list[str]) -> list[str]:
    """Leave out tags that are there already."""
    return list(dict.fromkeys(tags))


def distinct_figures(names: list[str]) -> list[str]:
    """Check that metrics have figures of different names."""
    if len({name.rpartition(":")[2] for name in names}) < len(names):
        raise ValueError("metrics of different names")
    return names


def is_malformed(text: str) -> bool:
    """Whether a text that looks like a URL is none."""
    if "://" not in text:
        return False
    try:
        parts = urlsplit(text)
        return parts.port == 0 or (parts.scheme in ("http", "https") and not parts.hostname)
    except ValueError:
        return True


def malformed(url: str) -> ConfigError:
    """Error of a text that looks like a URL and is none."""
    fix = "check its host and port, and write special letters of user and password as %40 and so on"
    return ConfigError("CFG003", "this isn't a URL", redacted(url), fix=fix)


def identifier(text: str) -> str:
    """Check the name of an optimizer."""
    if not re.fullmatch(r"[A-Za-z]\w{0,49}", text) and not is_known("inner_optimizers", text):
        raise ValueError("the name of an optimizer, such as adamw, or module:object")
    return text


def variable(name: str) -> str:
    """Check the name of an environment variable."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("the name of an environment variable")
    return name


def hub_id(text: str) -> str:
    """Check the name of a repository of a hub, with its owner."""
    if not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", text):
        raise ValueError("owner/name of a repository")
    return text


def address(text: str) -> str:
    """Check an address."""
    if not re.fullmatch(r"[^\s:/@]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}", text):
        raise ValueError("host:port")
    return text


def target(text: str) -> str:
    """Check an address to connect to: it has a port, and no name or password before the host."""
    if "@" in address(text) or not 1 <= int(text.rpartition(":")[2]) <= 65535:
        raise ValueError("host:port, with a port from 1 to 65535")
    return text


def path_or_url(text: str) -> str:
    """Check a path or a URL; a text without :// is a path."""
    if is_malformed(text):
        raise ValueError("a folder, or a URL such as https://host/folder")
    return text


Place = Annotated[str, AfterValidator(path_or_url)]
"""Path of a folder, or its URL."""


def seconds_of(duration: str) -> float | None:
    """Seconds of a time such as ``6h``, ``90min``, ``2d`` or ``45`` (seconds); None if it isn't one, or is 0."""
    match = _DURATION.fullmatch(duration.strip())
    if match is None:
        return None
    return float(match[1]) * _SECONDS[match[2] or "s"] or None


def duration(text: str) -> str:
    """Check a time, and give it a unit: a number alone is seconds."""
    if seconds_of(text) is None:
        raise ValueError("a time above 0 in s, min, h or d, such as 6h")
    stripped = text.strip()
    return stripped if stripped[-1].isalpha() else f"{stripped}s"


class Table(BaseModel):
    """A table of the job file: immutable, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    required: ClassVar[tuple[str, ...]] = ()
    """Keys that the table can't do without, although the schema has no value for them; a later check asks for them."""


def table_of(table: type[Table], name: str) -> type[Table] | None:
    """Kind of the table, or of those in the list, that a key holds; None if the key holds a value."""
    annotation = table.model_fields[name].annotation
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
    return None
