"""Files of Python modules, and a hash of their contents."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def with_imports(script: Path) -> set[Path]:
    """A file, and the modules beside it that it imports, directly or by way of others of them."""
    files = {script}
    waiting = [script]
    while waiting:
        for name in _imported_names(waiting.pop()):
            module = script.with_name(f"{name}.py")
            if module not in files and module.is_file():
                files.add(module)
                waiting.append(module)
    return files


def files_hash(files: Iterable[Path]) -> str:
    """Hash of names, sizes and contents of files."""
    sha256 = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        sha256.update(repr((file.name, file.stat().st_size)).encode())
        sha256.update(file.read_bytes())
    return sha256.hexdigest()


def _imported_names(file: Path) -> set[str]:
    """Names of modules that a file may import from beside it; none if it isn't Python.

    Modules of a package are imported by dotted names, of which each part counts, and so do the names behind `import`.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    in_package = file.with_name("__init__.py").is_file()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split(".")[: None if in_package else 1])
        elif isinstance(node, ast.ImportFrom):
            if node.module is not None:
                names.update(node.module.split(".")[: None if in_package else 1])
            if node.module is None or in_package:
                names.update(alias.name for alias in node.names)
    return names
