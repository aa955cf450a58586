"""Files that only their owner can read, sources of Python modules and their hash, job scripts, and imports.

A run holds data, weights and settings, so its files are private whatever the umask is. Job scripts and their job files
lie beside the package in a checkout, and inside it once it is installed. Large libraries load faster with garbage
collection off.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FILE = 0o600
FOLDER = 0o700
_PACKAGE: Final = Path(__file__).parent
_INSTALLED: Final = _PACKAGE / "jobs"
_LOADED: dict[str, tuple[set[Path], str]] = {}
"""Files of loaded modules of users, and their hash as they were loaded, by the module's name."""


def opener(path: str, flags: int) -> int:
    """Open a file that only its owner can use from then on, even if it existed before; an opener for `open`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE)
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and stat.S_IMODE(facts.st_mode) != FILE:
        with suppress(PermissionError):  # The file belongs to another user, and is writable for us.
            os.fchmod(descriptor, FILE)
    return descriptor


def make_private(path: Path) -> None:
    """Let only the owner read a file or enter a folder; a link, and what it leads to, stays as it is."""
    facts = path.lstat()
    file_type = stat.S_IFMT(facts.st_mode)
    mode = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER}.get(file_type)
    if mode is not None and stat.S_IMODE(facts.st_mode) != mode:
        with suppress(PermissionError):
            path.chmod(mode)


def make_tree_private(folder: Path) -> None:
    """Make a folder and everything in it private, for files that other libraries write."""
    make_private(folder)
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # The file has gone meanwhile.
                make_private(Path(above, name))


def has_ended(process: str) -> bool:
    """Whether a text is the number of a process that this machine has no more; False for any other text."""
    if not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, ValueError):  # Another user's, or too large a number.
        return False
    return False


def with_imports(script: Path) -> set[Path]:
    """A file, and the modules beside it that it imports, directly or by way of others of them."""
    files = {script}
    waiting_files = [script]
    while waiting_files:
        for name in _imported_names(waiting_files.pop()):
            module = script.with_name(f"{name}.py")
            if module not in files and module.is_file():
                files.add(module)
                waiting_files.append(module)
    return files


def files_hash(files: Iterable[Path]) -> str:
    """Hash of names, sizes and contents of files."""
    sha256 = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        sha256.update(repr((file.name, file.stat().st_size)).encode())
        sha256.update(file.read_bytes())
    return sha256.hexdigest()


def remember_source(module: str) -> None:
    """Keep the source of a module that was just loaded, so that `forget_edited` knows a later one from it."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module not in _LOADED and file is not None and Path(file).is_file():
        files = with_imports(Path(file))
        _LOADED[module] = files, files_hash(files)


def forget_edited() -> None:
    """Let modules of users be loaded anew if they were edited since, as between two runs of a notebook."""
    for module, (files, loaded_hash) in list(_LOADED.items()):
        if all(file.is_file() for file in files) and files_hash(files) == loaded_hash:
            continue
        del _LOADED[module]
        for name, loaded_module in list(sys.modules.items()):
            file = getattr(loaded_module, "__file__", None)
            if name != "__main__" and file is not None and Path(file) in files:
                del sys.modules[name]
    importlib.invalidate_caches()


def _imported_names(file: Path) -> set[str]:
    """Names of modules that a file may import from beside it; none if it isn't Python.

    Modules of a package are imported by dotted names, of which each part counts, and so do the names behind `import`.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    in_package = file.with_name("__init__.py").is_file()
    modules: list[str] = []
    """Dotted names of imported modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.module is not None:
                modules.append(node.module)
            if node.module is None or in_package:
                names.update(alias.name for alias in node.names)
    for module in modules:
        first_part, *further_parts = module.split(".")
        names.add(first_part)
        if in_package:
            names.update(further_parts)
    return names


def jobs_folder() -> Path:
    """Return the folder of the job scripts."""
    return _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "jobs"


def use_tools() -> None:
    """Let this process import the benchmarks and the chaos lab, which only a checkout has in ``tools/``.

    So can all processes that it starts: Ray gives its workers no more than the folder of the script.
    """
    tools = str(_PACKAGE.parent / "tools")
    sys.path.insert(0, tools)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{tools}{os.pathsep}{inherited}" if inherited else tools


def shipped_configs() -> dict[str, Path]:
    """Job files that come with the package, by their names without ``.toml``."""
    files = (jobs_folder() / "configs").glob("*.toml")
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def find_file(file: str) -> Path:
    """Return the path of a job file.

    A name without a folder and without ``.toml`` may be that of a file with it. If there is no such file here, it may
    be one of those that come with the package.
    """
    path = Path(file)
    if path.name != file:
        return path
    candidates = [path, Path(f"{file}.toml")]
    for candidate in candidates:
        with suppress(OSError, ValueError):  # No file can have such a name.
            if candidate.exists() and not candidate.is_dir():
                return candidate
    return shipped_configs().get(file.removesuffix(".toml"), path)


def as_installed(text: str) -> str:
    """Return a job script's description with the commands by which it is started here."""
    if not _INSTALLED.is_dir():
        return text
    return re.sub(r"jobs/configs/([\w-]+\.toml)", r"\1", re.sub(r"python jobs/(\w+)\.py", r"hypha-ray \1", text))


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off while libraries are loaded, and exempt their objects from it afterwards.

    torch and transformers make a million objects, which stay. Repeated collections among them take an eighth of the
    time of loading, and as much at the end of the process; `gc.freeze` exempts them. Make models outside of this
    context, since their garbage would stay as well. Contexts may be nested.
    """
    was_on = gc.isenabled()
    modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if len(sys.modules) > modules:
                gc.freeze()
            gc.enable()
