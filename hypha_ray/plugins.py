"""Look-up of members of families, such as codecs and sinks: those of the package, and those that a user brings.

    built-in table ──► entry point of the group ``hypha_ray.FAMILY`` ──► ``module:object``, beside the job or installed

A member is a function or a class. A class is called once, with the member's options if it has a class `Options`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from hypha_ray.errors import ConfigError, HyphaError, reason_of
from hypha_ray.families import FAMILIES, Family
from hypha_ray.files import with_imports

OWN = "module:object"
"""Form of the name of a member that lies beside the job or is installed."""
_OPTIONS = "Options"
"""Name of the class that has the options of a member."""
_LONGEST = 300
"""Longest list of names in a message, in characters."""


class Options(BaseModel):
    """Options of a member: a table of the job file, immutable, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Plugin:
    """Annotation of a text of the job file that names a member of a family.

    Unless `checked` is off, a name of another form than the family's is out of range.
    """

    family: str
    checked: bool = True

    @property
    def kind(self) -> str:
        """Allowed names, as ``--help`` shows them."""
        return " | ".join((*FAMILIES[self.family].members, OWN))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a text that is checked."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if self.checked and not is_known(self.family, name):
            raise ValueError(self.kind)
        return name


def names(family: str) -> tuple[str, ...]:
    """Names of all built-in members and entry points."""
    built_in = FAMILIES[family].members
    return (*built_in, *sorted(_installed(family).keys() - built_in.keys()))


def is_built_in(family: str, name: str) -> bool:
    """Whether the package has the member itself."""
    return name in FAMILIES[family].members


def is_known(family: str, name: str) -> bool:
    """Whether a name is that of a built-in member or an entry point, or of the form ``module:object``."""
    return is_built_in(family, name) or _is_own(name) or name in _installed(family)


def is_own(family: str, name: str) -> bool:
    """Whether a name is that of a member that a user brings, or that an installed package has."""
    return not is_built_in(family, name) and is_known(family, name)


def look_beside_the_job() -> None:
    """Let a driver find modules of its working directory first, as Ray lets its actors, whose own is another."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def find(family: str, name: str) -> Any:
    """The member of a name.

    Raises:
        ConfigError: PLG001 unknown name, PLG002 a module or object that can't be had, or that lacks something; a family
            may have codes of its own for both.

    """
    table = FAMILIES[family]
    if table.members.get(name):
        return _attribute(*_parts(table.members[name]))
    require_known(family, name)
    member = _own(table, name)
    _require_shape(table, name, member)
    return member


def require_known(family: str, name: str) -> None:
    """Refuse a name that no member can have.

    Raises:
        ConfigError: PLG001, or the family's own code.

    """
    table = FAMILIES[family]
    if table.members.get(name) or _is_own(name) or name in _installed(family):
        return
    known = names(family)
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"for a {table.noun} of your own write {OWN}"
    raise ConfigError(table.unknown, f"there is no such {table.noun}", repr(name), ", ".join(known), fix)


def create(family: str, name: str, options: Mapping[str, Any] | None = None, *arguments: Any) -> Any:
    """The member of a name, ready for use: a function itself, or an object of a class.

    Args:
        family: name of the family.
        name: name of the member.
        options: the member's own table of the job file; None: all defaults.
        arguments: what the family gives to each class, before its options.

    Raises:
        ConfigError: as `find` and `options_of`.

    """
    member = find(family, name)
    own = options_of(family, name, member, options)
    if not inspect.isclass(member):
        return member
    build: Any = member
    return build(*arguments) if own is None else build(*arguments, own)


def options_of(
    family: str, name: str, member: Any, options: Mapping[str, Any] | None, key: str | None = None
) -> BaseModel | None:
    """The options of a member; None if it has none.

    Args:
        family: name of the family.
        name: name of the member.
        member: the member itself.
        options: its table of the job file; None: all defaults.
        key: key of the job file that names the member; None: that of the family.

    Raises:
        ConfigError: CFG001 an option that there isn't, CFG002 a wrong type, CFG003 a wrong value.

    """
    table = FAMILIES[family]
    key = f"{key or table.key}_options"
    kind = getattr(member, _OPTIONS, None)
    if kind is None:
        if options and not table.free_options:
            what = f"{key}: {table.noun} {name} has no options"
            raise ConfigError("CFG001", what, ", ".join(options)[:_LONGEST], fix="leave the table out")
        return None
    if not (inspect.isclass(kind) and issubclass(kind, BaseModel)):
        what = f"{table.noun} {name} can't be used: its {_OPTIONS} are no options"
        raise ConfigError(table.unloadable, what, fix="derive them from hypha_ray.plugins.Options")
    try:
        own: BaseModel = kind.model_validate(dict(options or {}))
    except ValidationError as error:
        raise _wrong_option(key, kind, error) from None
    return own


def attempt(key: str, family: str, name: str, options: Mapping[str, Any] | None, job: Any) -> None:
    """Load a member that a user brings, have it check the job, and try it on a small example.

    A member may name the modules that it needs, as `packages`, and may have a static method `check` of the job, which
    raises a `ConfigError`.

    Raises:
        ConfigError: as `create`; PLG003, it fails on the example.
        HyphaError: the member refuses the job.

    """
    table = FAMILIES[family]
    member = find(family, name)
    options_of(family, name, member, options, key)
    for package in getattr(member, "packages", ()):
        if importlib.util.find_spec(package) is None:
            what = f"{table.noun} {name} needs the package {package}"
            raise ConfigError(table.unloadable, what, "it isn't installed", fix=f"pip install {package}")
    try:
        if hasattr(member, "check"):
            member.check(job)
        if table.trial is not None:
            _attribute(*_parts(table.trial))(name, options)
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # A member of users may raise anything.
        what = f"{table.noun} {name} fails on a small example"
        raise ConfigError("PLG003", what, reason_of(error), table.allowed, "mend it; see docs/plugins.md") from error


def sources(family: str, name: str) -> frozenset[Path]:
    """Files of a member that a user brings, with modules beside them that they import; none of a built-in member."""
    place = None if is_built_in(family, name) else _place(family, name)
    if place is None:
        return frozenset()
    try:
        spec = importlib.util.find_spec(_parts(place)[0])
    except Exception:  # A package of users may raise anything as it is imported.
        return frozenset()
    path = None if spec is None or spec.origin is None else Path(spec.origin)
    return frozenset() if path is None or not path.is_file() else frozenset(with_imports(path))


def _is_own(name: str) -> bool:
    return re.fullmatch(r"[^\s:]+:[^\s:]+", name) is not None


def _installed(family: str) -> dict[str, str]:
    """Entry points of a family: ``module:object`` by name."""
    from importlib.metadata import entry_points  # Built-in members need none, and `--help` is to answer at once.

    return {point.name: point.value for point in entry_points(group=f"hypha_ray.{family}")}


def _place(family: str, name: str) -> str | None:
    """The ``module:object`` of a member that a user brings; None if there is none of the name."""
    return name if _is_own(name) else _installed(family).get(name)


def _parts(place: str) -> tuple[str, str]:
    module, _, name = place.partition(":")
    return module, name


def _attribute(module: str, name: str) -> Any:
    """An object of a module; None if there is nothing of that name."""
    member: Any = importlib.import_module(module)
    for part in name.split("."):
        member = getattr(member, part, None)
    return member


def _own(table: Family, name: str) -> Any:
    """Load a member that a user brings."""
    module, attribute = _parts(str(_place(table.name, name)))
    what = f"{table.noun} {name} can't be loaded"
    try:
        member = _attribute(module, attribute)
    except (Exception, SystemExit) as error:  # A module of users may raise anything.
        fix = f"put {module.partition('.')[0]}.py into the job's working directory, and try to import it"
        raise ConfigError(table.unloadable, what, reason_of(error), fix=fix) from error
    if not callable(member):
        got = "nothing of that name" if member is None else type(member).__name__
        raise ConfigError(table.unloadable, what, got, table.allowed, f"define {attribute} in {module}")
    return member


def _require_shape(table: Family, name: str, member: Any) -> None:
    """Refuse a member that lacks a method or attribute, or takes another number of arguments.

    Raises:
        ConfigError: PLG002, or the family's own code.

    """
    lacks = next(_lacking(table, member), None)
    if lacks is not None:
        what = f"{table.noun} {name} can't be used"
        raise ConfigError(table.unloadable, what, lacks, table.allowed, "mend it; see docs/plugins.md")


def _lacking(table: Family, member: Any) -> Iterator[str]:
    """Descriptions of all that a member lacks."""
    methods = dict(table.methods)
    is_class = inspect.isclass(member)
    if table.arguments is not None:
        if is_class:
            methods["__call__"] = table.arguments
        elif not _takes(member, table.arguments):
            yield f"a function that can't be called with {_counted(table.arguments)}"
    if (methods or table.attributes) and not is_class:
        yield "no class"
        return
    for method, count in methods.items():
        function = next((vars(kind)[method] for kind in member.__mro__ if method in vars(kind)), None)
        if function is None:
            yield f"a class without the method {method}"
        elif not _takes(getattr(member, method), count + (not isinstance(function, staticmethod | classmethod))):
            yield f"a method {method} that can't be called with {_counted(count)}"
    yield from (f"a class without {name}" for name in table.attributes if not hasattr(member, name))
    missing = sorted(getattr(member, "__abstractmethods__", ()))
    if missing:
        yield f"a class without the method {missing[0]}"


def _takes(function: Any, count: int) -> bool:
    """Whether a function can be called with a number of arguments; one of unknown signature may be."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # A function of C tells no signature.
        return True
    return True


def _counted(arguments: int) -> str:
    return "no argument" if not arguments else f"{arguments} argument{'s' * (arguments > 1)}"


def _wrong_option(key: str, kind: type[BaseModel], error: ValidationError) -> ConfigError:
    """The first error that pydantic reports, in the terms of a job file."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    known = list(kind.model_fields)
    if first["type"] == "extra_forbidden":
        return unknown_option(f"{key}: unknown key {name}", name, known)
    if first["type"] == "missing":
        return ConfigError("CFG012", f"{key}.{name} is missing", fix=f"give {key}.{name}")
    got = repr(first["input"])[:80]
    is_type = first["type"].endswith("_type")
    code, what = ("CFG002", "has the wrong type") if is_type else ("CFG003", "is out of range")
    return ConfigError(code, f"{key}.{name} {what}", got, first["msg"], "mend it, or leave it out")


def unknown_option(what: str, name: str, known: Sequence[str]) -> ConfigError:
    """Error of a key that there isn't, with the nearest one."""
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean `{near[0]}`?" if near else "leave it out"
    return ConfigError("CFG001", what, allowed=", ".join(known), fix=fix)
