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
from hypha_ray.files import forget_edited, remember_source, with_imports
from hypha_ray.texts import counted

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
            raise ValueError(" | ".join((*names(self.family), OWN)))
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
    """Let a driver find modules of its working directory first, as Ray's actors do, which have another one.

    Modules that were edited since an earlier run of this process are loaded anew, as by the actors.
    """
    forget_edited()
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def find(family: str, name: str) -> Any:
    """The member of a name.

    Raises:
        ConfigError: PLG001 unknown name, PLG002 a module or object that can't be had, or that lacks something; a family
            may have codes of its own for both.

    """
    table = FAMILIES[family]
    if table.members.get(name):
        return _load(table.members[name])
    require_known(family, name)
    member = _load_own(table, name)
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
    members = names(family)
    fix = f"for a {table.noun} of your own write {OWN}"
    for match in get_close_matches(name, members, n=1):
        fix = f"did you mean {match!r}?"
    raise ConfigError(table.unknown, f"there is no such {table.noun}", repr(name), ", ".join(members), fix)


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
    member_options = options_of(family, name, member, options)
    if not inspect.isclass(member):
        return member
    build: Any = member
    if member_options is None:
        return build(*arguments)
    return build(*arguments, member_options)


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
    options_class = getattr(member, _OPTIONS, None)
    if options_class is None:
        if options and not table.free_options:
            problem = f"{key}: {table.noun} {name} has no options"
            option_names = ", ".join(options)
            raise ConfigError("CFG001", problem, option_names[:_LONGEST], fix="leave the table out")
        return None
    if not (inspect.isclass(options_class) and issubclass(options_class, BaseModel)):
        problem = f"{table.noun} {name} can't be used: its {_OPTIONS} are no options"
        raise ConfigError(table.unloadable, problem, fix="derive them from hypha_ray.plugins.Options")
    try:
        member_options: BaseModel = options_class.model_validate(dict(options or {}))
    except ValidationError as error:
        raise _wrong_option(key, options_class, error) from None
    except Exception as error:  # A validator of users may raise anything, and names of types may be unknown.
        problem = f"{key}: the Options of {table.noun} {name} fail"
        raise ConfigError(table.unloadable, problem, reason_of(error), fix="mend them") from error
    return member_options


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
    try:
        _require_packages(table, name, member)
        if hasattr(member, "check"):
            member.check(job)
        if table.trial is not None:
            try_member = _load(table.trial)
            try_member(name, options)
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # A member of users may raise anything.
        problem = f"{table.noun} {name} fails on a small example"
        raise ConfigError("PLG003", problem, reason_of(error), table.allowed, "mend it; see docs/plugins.md") from error


def _require_packages(table: Family, name: str, member: Any) -> None:
    """Refuse a member that needs a module that isn't there; it may name a single one as a text.

    Raises:
        ConfigError: PLG002, or the family's own code.

    """
    packages: Any = getattr(member, "packages", ())
    if isinstance(packages, str):
        packages = (packages,)
    for package in packages:
        if not _is_installed(package):
            problem = f"{table.noun} {name} needs the package {package}"
            raise ConfigError(table.unloadable, problem, "it isn't installed", fix=f"pip install {package}")


def _is_installed(module: str) -> bool:
    """Whether there is a module, which may lie in packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Its package isn't there.
        return False


def sources(family: str, name: str) -> frozenset[Path]:
    """Files of a member that a user brings, with modules beside them that they import; none of a built-in member."""
    if is_built_in(family, name):
        return frozenset()
    reference = _reference(family, name)
    if reference is None:
        return frozenset()
    module, _ = _parts(reference)
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit):  # A package of users may raise anything as it is imported.
        return frozenset()
    if spec is None or spec.origin is None:
        return frozenset()
    path = Path(spec.origin)
    if not path.is_file():
        return frozenset()
    return frozenset(with_imports(path))


def _is_own(name: str) -> bool:
    return re.fullmatch(r"[^\s:]+:[^\s:]+", name) is not None


def _installed(family: str) -> dict[str, str]:
    """Entry points of a family: ``module:object`` by name."""
    from importlib.metadata import entry_points  # Built-in members need none, and `--help` is to answer at once.

    return {point.name: point.value for point in entry_points(group=f"hypha_ray.{family}")}


def _reference(family: str, name: str) -> str | None:
    """The ``module:object`` of a member that a user brings; None if there is none of the name."""
    return name if _is_own(name) else _installed(family).get(name)


def _parts(reference: str) -> tuple[str, str]:
    module, _, name = reference.partition(":")
    return module, name


def _load(reference: str) -> Any:
    """The object of a ``module:object``; None if the module has nothing of that name."""
    module, name = _parts(reference)
    member: Any = importlib.import_module(module)
    for part in name.split("."):
        member = getattr(member, part, None)
    return member


def _load_own(table: Family, name: str) -> Any:
    """Load a member that a user brings."""
    reference = str(_reference(table.name, name))
    module, attribute = _parts(reference)
    problem = f"{table.noun} {name} can't be loaded"
    try:
        member = _load(reference)
    except (Exception, SystemExit) as error:  # A module of users may raise anything.
        fix = _fix_of_import(module, attribute)
        raise ConfigError(table.unloadable, problem, reason_of(error), fix=fix) from error
    if _is_hidden(module):
        fix = f"give {module}.py another name"
        raise ConfigError(table.unloadable, problem, f"Python's own module {module} in place of {module}.py", fix=fix)
    remember_source(module)
    if not callable(member):
        got = "nothing of that name" if member is None else type(member).__name__
        fix = f"define {attribute} in {module}" if member is None else f"name a class or a function of {module}"
        raise ConfigError(table.unloadable, problem, got, table.allowed, fix)
    return member


def _fix_of_import(module: str, attribute: str) -> str:
    """Return the remedy if a module can't be imported: another spelling if it is a path, otherwise its file's place."""
    is_path = module.endswith(".py") or not all(part.isidentifier() for part in module.split("."))
    steps = re.findall(r"[^./\\]+", module.removesuffix(".py"))
    if not steps:
        return f"write {OWN}"
    if not is_path:
        return f"put {module.partition('.')[0]}.py into the job's working directory, and try to import it"
    if Path(module).is_absolute():
        return f"start the job in the folder of {steps[-1]}.py, and write {steps[-1]}:{attribute}"
    return f"write {'.'.join(steps)}:{attribute}"


def _is_hidden(module: str) -> bool:
    """Whether a file beside the job has the name of a module of Python, which was loaded instead."""
    file = Path.cwd() / f"{module}.py"
    if module not in sys.stdlib_module_names or not file.is_file():
        return False
    loaded_file = getattr(sys.modules[module], "__file__", None)
    return loaded_file is None or not file.samefile(loaded_file)


def _require_shape(table: Family, name: str, member: Any) -> None:
    """Refuse a member that lacks a method or attribute, or takes another number of arguments.

    Raises:
        ConfigError: PLG002, or the family's own code.

    """
    flaw = next(_flaws(table, member), None)
    if flaw is not None:
        problem = f"{table.noun} {name} can't be used"
        raise ConfigError(table.unloadable, problem, flaw, table.allowed, "mend it; see docs/plugins.md")


def _flaws(table: Family, member: Any) -> Iterator[str]:
    """Descriptions of all that a member lacks."""
    methods = dict(table.methods)
    is_class = inspect.isclass(member)
    if table.arguments is not None and not _takes_any(member, table.keywords):
        if is_class:
            methods["__call__"] = table.arguments
        elif not _takes(member, table.arguments):
            yield f"a function that can't be called with {_counted(table.arguments)}"
    if is_class:
        yield from _flaws_of_class(member, methods, table.attributes)
    elif methods or table.attributes:
        yield "no class"


def _flaws_of_class(member: Any, methods: Mapping[str, int], attributes: Sequence[str]) -> Iterator[str]:
    for method, count in methods.items():
        function = _definition(member, method)
        takes_self = not isinstance(function, staticmethod | classmethod)
        arguments = count + 1 if takes_self else count
        if function is None:
            yield f"a class without the method {method}"
        elif not _takes(getattr(member, method), arguments):
            yield f"a method {method} that can't be called with {_counted(count)}"
    for attribute in attributes:
        if not hasattr(member, attribute):
            yield f"a class without {attribute}"
    abstract_methods = sorted(getattr(member, "__abstractmethods__", ()))
    if abstract_methods:
        yield f"a class without the method {abstract_methods[0]}"


def _definition(member: Any, method: str) -> Any:
    """A method as the class or one of its bases defines it; None if none does."""
    for base_class in member.__mro__:
        if method in vars(base_class):
            return vars(base_class)[method]
    return None


def _takes(function: Any, count: int) -> bool:
    """Whether a function can be called with a number of arguments; True if its signature is unknown."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # A function of C tells no signature.
        return True
    return True


def _takes_any(member: Any, names: Sequence[str]) -> bool:
    """Whether a function, or what is called of a class, has a parameter of one of these names, or takes any by name."""
    function = member
    if inspect.isclass(member):
        function = _definition(member, "__call__")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # A function of C tells no signature.
        return False
    return takes_by_name(parameters, names)


def takes_by_name(parameters: Mapping[str, inspect.Parameter], names: Sequence[str]) -> bool:
    """Whether one of the parameters has one of these names, or all are given by name and any name is taken."""
    kinds = {parameter.kind for name, parameter in parameters.items() if name != "self"}
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds and kinds <= by_name
    return bool(names) and (takes_any_name or any(name in parameters for name in names))


def _counted(arguments: int) -> str:
    return "no argument" if arguments == 0 else counted(arguments, "argument")


def _wrong_option(key: str, options_class: type[BaseModel], error: ValidationError) -> ConfigError:
    """The first error that pydantic reports, in the terms of a job file."""
    first_error = error.errors(include_url=False)[0]
    name = ".".join(map(str, first_error["loc"]))
    option = f"{key}.{name}"
    if first_error["type"] == "extra_forbidden":
        return unknown_option(f"{key}: unknown key {name}", name, list(options_class.model_fields))
    if first_error["type"] == "missing":
        return ConfigError("CFG012", f"{option} is missing", fix=f"give {option}")
    got = repr(first_error["input"])
    allowed = re.sub("^(Input should be |Value error, )", "", first_error["msg"])
    fix = "write such a value, or leave it out"
    if first_error["type"].endswith("_type"):
        return ConfigError("CFG002", f"{option} has the wrong type", got[:80], allowed, fix)
    return ConfigError("CFG003", f"{option} is out of range", got[:80], allowed, fix)


def unknown_option(problem: str, name: str, options: Sequence[str]) -> ConfigError:
    """Error of an option that there isn't, with the nearest one."""
    fix = "leave it out"
    for match in get_close_matches(name, options, n=1):
        fix = f"did you mean `{match}`?"
    return ConfigError("CFG001", problem, allowed=", ".join(options), fix=fix)
