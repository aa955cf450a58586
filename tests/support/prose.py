"""Mechanical rules of the project's prose; as a script it lists the offenders: `python prose.py [PATH …]`."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
CODE = sorted(
    path for room in ("hypha_ray", "jobs", "tools") for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name
)
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

LONGEST_SENTENCE = 25
QUESTION = re.compile(r"(What|Who|Whom|Whose|Whoever|Whatever|Where|Wherever|When|Why|How|Whether)\b")
PERSON = re.compile(r"\b(who|whom|whoever|somebody|someone|nobody|anybody|anyone|everybody|everyone)\b", re.IGNORECASE)
CODE_SPAN = re.compile(r"``.+?``|`[^`]+`|\$[^$]+\$", re.DOTALL)
CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"\*\w+\*")
END_OF_SENTENCE = re.compile(r"(?<=[.!?:])[)\"']*\s+(?=\S)")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|No|Fig|Eq|resp|approx)\.")
LIST_ITEM = re.compile(r"^\s*(?:[-*•]|\d+\.|[\w.*`\[\], ]+:)\s+", re.MULTILINE)
NOT_TEXT = re.compile(r"[│├└┌┐┘─►◄▲▼]|^ *\||^ *python |\S {3,}\S", re.MULTILINE)
ERROR_CODE = re.compile(r"[,;] (?=[A-Z]{3,4}\d{3}\b)")
WORD = re.compile(r"[^\W\d_][\w'’\-/]*")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.Module) -> Iterator[tuple[int, Documented, str]]:
    """Yield line, node and text of every docstring of a module, class or function."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), node, text


def attribute_docs(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string that documents the attribute or constant above it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for above, below in pairwise(body if isinstance(body, list) else []):
            match above, below:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                    yield below.lineno, text


def answers_yes_or_no(node: Documented) -> bool:
    """Whether a function returns a bool, so that "Whether" says what it returns."""
    returns = getattr(node, "returns", None)
    return returns is not None and ast.unparse(returns) in {"bool", "bool | None", "Iterator[bool]"}


def paragraphs(text: str) -> Iterator[str]:
    """Yield the running text of a docstring, without pictures, tables, commands and indented blocks after a colon."""
    in_block = False
    for part in re.split(r"\n\s*\n", CODE_SPAN.sub("code", text)):
        indented = all(line.startswith("    ") for line in part.splitlines())
        in_block = indented and in_block
        if not in_block and not NOT_TEXT.search(part):
            yield part
        in_block = in_block or part.rstrip().endswith(":")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring; an item of a list begins one, and a colon ends one."""
    for part in paragraphs(text):
        items = LIST_ITEM.sub(lambda found: "\0" + found.group(), part).split("\0")
        for item in items:
            plain = ERROR_CODE.sub(". ", ABBREVIATION.sub(r"\1", " ".join(item.split())))
            yield from END_OF_SENTENCE.split(plain)


def offences(path: Path) -> list[str]:
    """Return one line for each broken rule in a file's docstrings and comments: line number, rule, text."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for line, node, text in docstrings(tree):
        question = QUESTION.match(text)
        if question and not (question.group() == "Whether" and answers_yes_or_no(node)):
            found.append(f"{line}: begins with {question.group()!r}: {text.splitlines()[0]}")
        found += [f"{line}: {word!r} of a process: {around}" for word, around in persons(text)]
        for sentence in sentences(text):
            words = len(WORD.findall(sentence))
            if words > LONGEST_SENTENCE:
                found.append(f"{line}: {words} words in a sentence: {sentence}")
    for line, text in attribute_docs(tree):
        beginning = QUESTION.match(text) or re.match(r"(Of|Those|These)\b", text)
        if beginning and beginning.group() != "Whether":
            found.append(f"{line}: begins with {beginning.group()!r}: {text}")
        found += [f"{line}: {word!r} of a process: {around}" for word, around in persons(text)]
    found += [f"{line}: {word!r} of a process: {text}" for line, text in comments(path) for word, _ in persons(text)]
    return found


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment in a Python file."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def persons(text: str) -> Iterator[tuple[str, str]]:
    """Yield each word for a person in a text, with the words around it; code and quoted words don't count."""
    plain = QUOTED.sub("code", CODE_SPAN.sub("code", CODE_BLOCK.sub("", text)))
    for found in PERSON.finditer(plain):
        start, end = max(0, found.start() - 30), found.end() + 30
        yield found.group(), " ".join(plain[start:end].split())


def page_offences(path: Path) -> list[str]:
    """Return one line for each word for a person in a page of the documentation."""
    return [f"{word!r} of a process: {around}" for word, around in persons(path.read_text(encoding="utf-8"))]


def main(arguments: list[str]) -> int:
    """Print the offenders below the given paths, or of the whole project, file by file."""
    chosen = [Path(argument).resolve() for argument in arguments]
    count = 0
    for path in CODE + PAGES:
        if chosen and not any(path == root or root in path.parents for root in chosen):
            continue
        lines = offences(path) if path.suffix == ".py" else page_offences(path)
        count += len(lines)
        for line in lines:
            print(f"{path.relative_to(ROOT)}:{line}")
    print(f"{count} offences")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
