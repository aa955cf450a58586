"""The page of the Python interface, made from its docstrings: `python -m tests.support.api_page` writes it anew."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypha_ray

PAGE = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "docs" / "api.md"
_BEGIN = "<!-- interface: made by tests.support.api_page -->"
_END = "<!-- end of interface -->"
_ORDER = ("train", "Callback", "StopTraining", "Training", "TrainingProgress", "Run", "runs", "Runs")
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")
_TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields"}


def renewed(document: str) -> str:
    """The page with what lies between the two comments made anew."""
    assert set(_ORDER) == set(hypha_ray.__all__) - {"__version__"}
    parts = [part for name in _ORDER for part in described(name, getattr(hypha_ray, name))]
    block = "\n".join([_BEGIN, "", *parts, _END])
    pattern = f"{re.escape(_BEGIN)}.*{re.escape(_END)}"
    return re.sub(pattern, lambda _: block, document, flags=re.DOTALL)


def described(name: str, member: Any) -> Iterator[str]:
    """Lines about a function or a class with its public members."""
    yield f"## {name}\n"
    if not inspect.isclass(member):
        yield from _signature(f"hypha_ray.{name}", member)
        yield from _text(member)
        return
    if name == "Run":
        yield from _signature(f"hypha_ray.{name}", member.__init__)
    yield from _text(member)
    for field in getattr(member, "__dataclass_fields__", {}).values():
        yield f"- `{field.name}`: `{field.type}`"
    if hasattr(member, "__dataclass_fields__"):
        yield ""
    for part, value in vars(member).items():
        if part.startswith("_") or part in getattr(member, "__dataclass_fields__", {}):
            continue
        yield f"### {name}.{part}\n"
        if inspect.isfunction(value):
            yield from _signature(part, value)
            yield from _text(value)
        else:
            function = value.func if hasattr(value, "func") else value.fget
            yield f"```python\n{part}: {function.__annotations__['return']}\n```\n"
            yield from _text(function)


def _signature(name: str, function: Any) -> Iterator[str]:
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    result = (
        "" if signature.return_annotation in ("None", inspect.Signature.empty) else f" -> {signature.return_annotation}"
    )
    plain = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)).replace("'", "")
    if len(name) + len(plain) + len(result) > 100:
        lines = [f"    {str(parameter).replace(chr(39), '')}," for parameter in parameters]
        star = next((i for i, parameter in enumerate(parameters) if parameter.kind is parameter.KEYWORD_ONLY), None)
        if star is not None:
            lines.insert(star, "    *,")
        plain = "\n".join(["(", *lines, ")"])
    yield f"```python\n{name}{plain}{result}\n```\n"


def _text(member: Any) -> Iterator[str]:
    """A docstring as markdown: sections are lists."""
    in_section = False
    entry = ""
    for line in [*inspect.cleandoc(member.__doc__).splitlines(), ""]:
        section = _SECTION.match(line)
        is_new_entry = in_section and line.startswith("    ") and not line.startswith("     ")
        if entry and (section or not line.strip() or is_new_entry):
            yield entry
            entry = ""
        if section:
            in_section = True
            yield f"**{_TITLES[section[1]]}**\n"
        elif is_new_entry:
            entry = f"- {_entry(line.strip())}"
        elif in_section and line.strip():
            entry += f" {line.strip()}"
        else:
            yield line.replace("``", "`")
    yield ""


def _entry(text: str) -> str:
    name, colon, rest = text.partition(": ")
    if colon and re.fullmatch(r"\w+", name):
        return f"`{name}`: {rest}".replace("``", "`")
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
