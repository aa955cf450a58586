"""Density of the package's text, room by room, and the size of its kernel: `python tests/support/density.py`.

All figures but the kernel's are per 1 000 statements, so the format of a file changes nothing. A statement is one of
the syntax tree, without docstrings and imports. `--lower` writes what is measured into the table of ceilings, if it is
lower there.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tomli_w

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PACKAGE = ROOT / "hypha_ray"
CEILINGS = Path(__file__).with_name("density_ceilings.toml")
AIMS = {"tokens": 12.5, "deep": 42, "comprehensions": 35, "conditionals": 23, "tuples": 8, "empty_names": 1}
"""Figures that a room should not exceed: about those of well-kept packages of this field."""
FIGURES = tuple(AIMS)
DEEP = 6
"""Nesting of expressions from which a statement is hard to read."""
SMALL = 100
"""Statements below which a room is too small for figures of its own."""
EMPTY = frozenset(
    re.findall(
        r"\w+",
        """
    one found what place where known wanted other others held holds room rooms kept given told near left past due made
    way thing things strange quick own said asked taken
""",
    )
)
"""Names that say nothing of what they hold."""
KERNEL = ("types", "exchange_schedule.py", "scheduler", "worker", "server", "codec", "optim", "store")
"""What a newcomer reads; see docs/reading.md."""
NOT_KERNEL = (
    *("scheduler/runtime", "scheduler/goal_planner.py", "scheduler/mixture.py"),
    *("worker/group", "worker/bridged", "worker/device_encoding.py", "worker/faults.py"),
    *("store/mirror.py", "store/mirror_courier.py"),
)
"""What only a job that asks for it meets, behind one door; see docs/decisions.md."""
BLOCKS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.For, ast.AsyncFor, ast.While),
    *(ast.With, ast.AsyncWith, ast.Try, ast.Match),
)
LAYOUT = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


def modules() -> list[Path]:
    """Modules of the package, without generated ones."""
    return sorted(path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name)


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def depth(node: ast.AST) -> int:
    """Deepest nesting of expressions below a node; statements within it don't count."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            deepest = max(deepest, 1 + depth(child))
        elif not isinstance(child, ast.stmt):
            deepest = max(deepest, depth(child))
    return deepest


def counts(text: str) -> Counter[str]:
    """Statements, tokens and each figure's cases in a module's source."""
    tree = ast.parse(text)
    counted: Counter[str] = Counter()
    left_out: set[int] = set()
    for node in ast.walk(tree):
        counted.update(_cases(node))
        if isinstance(node, ast.stmt):
            if is_text(node) or isinstance(node, ast.Import | ast.ImportFrom):
                left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            else:
                counted["statements"] += 1
                counted["deep"] += not isinstance(node, BLOCKS) and depth(node) >= DEEP
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        counted["tokens"] += token.type not in LAYOUT and token.start[0] not in left_out
    return counted


def _cases(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield "comprehensions"
    if isinstance(node, ast.IfExp):
        yield "conditionals"
    if isinstance(node, ast.Assign):
        sides = (node.targets[0], node.value)
        if all(isinstance(side, ast.Tuple | ast.List) for side in sides):
            yield "tuples"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY:
        yield "empty_names"
    if isinstance(node, ast.arg) and node.arg in EMPTY:
        yield "empty_names"


@cache
def measured() -> dict[str, dict[str, float]]:
    """Figures of each room that is large enough, and of the package as `all`: tokens a statement, else a thousand's."""
    rooms: dict[str, Counter[str]] = {"all": Counter()}
    for path in modules():
        counted = counts(path.read_text(encoding="utf-8"))
        rooms.setdefault(path.relative_to(PACKAGE).parts[0], Counter()).update(counted)
        rooms["all"].update(counted)
    figures: dict[str, dict[str, float]] = {}
    for room, counted in rooms.items():
        statements = counted["statements"]
        if statements >= SMALL:
            figures[room] = {name: round(1000 * counted[name] / statements, 1) for name in FIGURES}
            figures[room]["tokens"] = round(counted["tokens"] / statements, 2)
    return figures


def kernel_lines() -> int:
    """Lines of the kernel, all of them: code, docstrings, blanks."""
    lines = 0
    for path in modules():
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(KERNEL) and not place.startswith(NOT_KERNEL):
            lines += len(path.read_text(encoding="utf-8").splitlines())
    return lines


@cache
def ceilings() -> dict[str, dict[str, float]]:
    """Figures that may not be exceeded where they aren't the aims, by room; `package` has the budgets of sizes."""
    return tomllib.loads(CEILINGS.read_text(encoding="utf-8"))


def ceiling(room: str, figure: str) -> float:
    """Figure that a room may not exceed: the aim, or what it has still above it."""
    return ceilings().get(room, {}).get(figure, AIMS[figure])


def sizes() -> dict[str, float]:
    """Number of modules and of the kernel's lines."""
    return {"modules": len(modules()), "kernel_lines": kernel_lines()}


def _lower() -> None:
    """Write what rooms have above the aims, if it is less than before."""
    before = ceilings()
    lowered = {"package": before["package"]}
    for room, figures in measured().items():
        above: dict[str, float] = {}
        for name, figure in figures.items():
            limit = before.get(room, {}).get(name, figure)
            if figure > AIMS[name]:
                above[name] = min(figure, limit)
        if above:
            lowered[room] = above
    CEILINGS.write_text(tomli_w.dumps(lowered), encoding="utf-8")


def main() -> None:
    """Print the table, or lower the ceilings to it."""
    if "--lower" in sys.argv[1:]:
        _lower()
    print(f"{'room':<20}" + "".join(f"{name:>16}" for name in FIGURES))
    for room, figures in sorted(measured().items(), key=lambda row: row[0]):
        print(f"{room:<20}" + "".join(f"{figures[name]:>16}" for name in FIGURES))
    print(", ".join(f"{name.replace('_', ' ')}: {number}" for name, number in sizes().items()))


if __name__ == "__main__":
    main()
