"""Defects, planted one at a time: an operator changes one place of a function's syntax tree.

A mutant names the module, the function and the operator; `nth` counts the places of the function that fit it.
So a mutant outlasts new formatting, new names of locals, and a function that moves within its module.
A template of new code has `{}` for the old code, `{0}`, `{1}` … for its parts, `{0.1}` for parts of parts, and `{of}`
for the owner of a method that is called. Other names in it are the function's parameters, or those of the module.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

SYMBOLS = {
    ast.And: "and",
    ast.Or: "or",
    ast.Not: "not",
    ast.USub: "-",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.Mod: "%",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
"""How an operator is written, by its class in the syntax tree."""

PLACEHOLDER = re.compile(r"\{(of|[0-9.]*)\}")
"""Stands in a template for the old code, or for one of its parts."""


@dataclass(frozen=True)
class Operator:
    """A change of the places that have a label."""

    label: str
    """Label of the places that the operator fits; see `_labels`."""
    template: str
    """New code of the place: an expression, or a statement if the place is one."""
    nth: int | None = None
    """Number of the place among those of the function that fit, from 1; None if only one does."""


@dataclass(frozen=True)
class Defect:
    """A place and what is changed there."""

    module: str
    """End of the module's dotted name."""
    function: str
    """Qualified name of the function, such as `Roster.sweep`; empty for the whole module."""
    operator: Operator


def drop(name: str, nth: int | None = None) -> Operator:
    """Leave out the statement that calls a function of that name, or that assigns to an attribute or item of it.

    Assignments to local variables have the name `=`, because such a variable may be renamed.
    """
    return Operator(f"statement {name}", "pass", nth)


def statement(name: str, template: str, nth: int | None = None) -> Operator:
    """Replace the statement that calls or assigns that name, or that is a keyword such as `break`."""
    return Operator(f"statement {name}", template, nth)


def condition(template: str, nth: int | None = None) -> Operator:
    """Replace the condition of an `if`, a `while`, a conditional expression or a comprehension."""
    return Operator("condition", template, nth)


def operation(symbol: str, template: str, nth: int | None = None) -> Operator:
    """Replace an arithmetic, logical or comparing operation; the template's parts are its operands."""
    return Operator(f"operation {symbol}", template, nth)


def call(name: str, template: str, nth: int | None = None) -> Operator:
    """Replace a call of that name; the template's parts are its arguments."""
    return Operator(f"call {name}", template, nth)


def value(name: str, template: str, nth: int | None = None) -> Operator:
    """Replace the value that an attribute or a keyword argument of that name is given."""
    return Operator(f"value {name}", template, nth)


def attribute(name: str, template: str, nth: int | None = None) -> Operator:
    """Replace a read of an attribute, of which the template's part 0 is the owner."""
    return Operator(f"attribute {name}", template, nth)


def returned(template: str, nth: int | None = None) -> Operator:
    """Replace the value that is returned."""
    return Operator("return", template, nth)


def iterated(template: str, nth: int | None = None) -> Operator:
    """Replace what a loop or a comprehension goes through."""
    return Operator("iterable", template, nth)


def caught(template: str, nth: int | None = None) -> Operator:
    """Replace the exception that is caught."""
    return Operator("except", template, nth)


def constant(old: object, template: str, nth: int | None = None) -> Operator:
    """Replace a constant."""
    return Operator(f"constant {old!r}", template, nth)


def expression(kind: type[ast.expr], template: str, nth: int | None = None) -> Operator:
    """Replace an expression of that kind, such as a tuple or a lambda."""
    return Operator(f"expression {kind.__name__}", template, nth)


def plant(name: str, defect: Defect, module: ModuleType) -> str:
    """Source of the module with the defect of that name."""
    tree, operator = ast.parse(source_of(module)), defect.operator
    where = f"{name}: {module.__name__}, {defect.function or 'top level'}"
    scope = _scope(tree, defect.function)
    assert scope is not None, f"{where}: there is no such function"
    places = [node for node, labels in _labelled(scope) if operator.label in labels]
    assert places, f"{where}: nothing fits {operator.label!r}"
    assert operator.nth or len(places) == 1, f"{where}: {len(places)} places fit {operator.label!r}, so say which"
    assert (operator.nth or 1) <= len(places), f"{where}: only {len(places)} places fit {operator.label!r}"
    place = places[(operator.nth or 1) - 1]
    new = _filled(place, operator.template)
    unknown = _names(new, ast.Load) - _names(new, ast.Store) - _names(tree) - {*dir(builtins)}
    assert not unknown, f"{where}: the template's names {sorted(unknown)} are gone"
    return ast.unparse(_Change(place, new).visit(tree))


def load(name: str, source: str, renamed: Mapping[str, str] | None = None) -> ModuleType:
    """Run a module's source under that name, with imports of its family taken from elsewhere."""
    for real, copy in (renamed or {}).items():
        source = source.replace(f"from {real} import", f"from {copy} import")
    module = sys.modules[name] = ModuleType(name)  # Dataclasses look their module up.
    exec(_compiled(source, name), module.__dict__)
    return module


@cache
def _compiled(source: str, name: str) -> CodeType:
    """Code of a module; most of a family have no defect, so they come again."""
    return compile(source, name, "exec")


def mutated(modules: Sequence[ModuleType], name: str, defects: Mapping[str, Defect]) -> list[ModuleType]:
    """Copies of the modules, one of them with the defect of that name; each after those that it imports."""
    defect = defects[name]
    package = f"mutant_{len(sys.modules)}"
    renamed = {module.__name__: f"{package}.{module.__name__}" for module in modules}
    assert sum(fits(module, defect) for module in modules) == 1, f"{name}: there is no module {defect.module}"
    return [
        load(copy, plant(name, defect, module) if fits(module, defect) else source_of(module), renamed)
        for module, copy in zip(modules, renamed.values(), strict=True)
    ]


def fits(module: ModuleType, defect: Defect) -> bool:
    """Whether the defect is one of this module."""
    return f".{module.__name__}".endswith(f".{defect.module}")


def source_of(module: ModuleType) -> str:
    """Source of a module as it is."""
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def _scope(tree: ast.AST, function: str) -> ast.AST | None:
    scope: ast.AST | None = tree
    for part in function.split(".") if function else ():
        named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inner = ast.walk(scope) if scope is not None else ()
        scope = next((node for node in inner if isinstance(node, named) and node.name == part), None)
    return scope


def _labelled(scope: ast.AST) -> Iterator[tuple[ast.AST, set[str]]]:
    """All nodes below, in the order of the source, with the labels that operators know them by."""
    for owner in ast.iter_child_nodes(scope):
        yield owner, _labels(owner) | _labels_of_role(owner, scope)
        yield from _labelled(owner)


def _labels(node: ast.AST) -> set[str]:
    """Labels that a node has for itself."""
    label = ""
    match node:
        case ast.stmt():
            return {f"statement {name}" for name in _names_of_statement(node)}
        case ast.Call(function):
            label = f"call {_name(function)}"
        case ast.BoolOp(operator) | ast.BinOp(op=operator) | ast.UnaryOp(operator) | ast.Compare(ops=[operator]):
            label = f"operation {SYMBOLS.get(type(operator), type(operator).__name__)}"
        case ast.Constant(constant):
            label = f"constant {constant!r}"
        case ast.Attribute(attr=attribute, ctx=ast.Load()):
            label = f"attribute {attribute}"
        case ast.expr():
            label = f"expression {type(node).__name__}"
    return {label}


def _names_of_statement(node: ast.stmt) -> list[str]:
    match node:
        case ast.Expr(ast.Call(function)):
            return [_name(function)]
        case ast.Assign(targets=targets):
            return [_name(target) for group in targets for target in _each(group)]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [_name(target)]
    return [type(node).__name__.lower()]


def _labels_of_role(node: ast.AST, owner: ast.AST) -> set[str]:
    """Labels that a node has as a part of another one."""
    label = ""
    match owner:
        case ast.If(test=role) | ast.While(test=role) | ast.IfExp(test=role) if role is node:
            label = "condition"
        case ast.comprehension(ifs=tests) if node in tests:
            label = "condition"
        case ast.For(iter=role) | ast.comprehension(iter=role) if role is node:
            label = "iterable"
        case ast.ExceptHandler(type=role) if role is node:
            label = "except"
        case ast.Return(role) if role is node:
            label = "return"
        case ast.keyword(arg=name, value=role) if role is node:
            label = f"value {name}"
        case ast.Assign(targets=[target], value=role) | ast.AnnAssign(target=target, value=role) if role is node:
            label = f"value {_name(target)}"
    return {label}


def _each(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _name(node: ast.AST) -> str:
    """Name of a function, attribute, item or constant; "=" for a local variable."""
    match node:
        case ast.Attribute(attr=name):
            return name
        case ast.Subscript(inner) | ast.Call(inner):
            return _name(inner)
        case ast.Name(name, context) if name.isupper() or isinstance(context, ast.Load):
            return name
    return "="


def _names(tree: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """Names that are read or bound; parameters are bound too."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    return names if context is ast.Load else names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _parts(node: ast.AST) -> list[ast.expr]:
    """Expressions that an expression consists of, in the order of the syntax tree; of a call its arguments alone."""
    within = [*node.args, *node.keywords] if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
    parts: list[ast.expr] = []
    for part in within:
        parts += [part] if isinstance(part, ast.expr) else _parts(part)
    return parts


def _part(node: ast.AST, path: str) -> ast.AST:
    if path == "of":
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute), "only methods have an owner"
        return node.func.value
    for step in path.split(".") if path else ():
        node = _parts(node)[int(step)]
    return node


def _filled(place: ast.AST, template: str) -> ast.expr | ast.Module:
    """Syntax tree of a template, filled in with what stands at the place."""

    def text(found: re.Match[str]) -> str:
        part = _part(place, found[1])
        return ast.unparse(part) if isinstance(part, ast.stmt | ast.Starred) else f"({ast.unparse(part)})"

    source = PLACEHOLDER.sub(text, template)
    return ast.parse(source) if isinstance(place, ast.stmt) else ast.parse(source, mode="eval").body


class _Change(ast.NodeTransformer):
    """Puts something new in the place of one node."""

    def __init__(self, place: ast.AST, new: ast.expr | ast.Module) -> None:
        self._place, self._new = place, new

    def visit(self, node: ast.AST) -> Any:
        """Change the node, if it is the one, or else what is below it."""
        if node is not self._place:
            return self.generic_visit(node)
        return self._new.body if isinstance(self._new, ast.Module) else self._new
