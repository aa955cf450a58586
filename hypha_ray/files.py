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
from collections.abc import Iterable, Iterator, Sequence
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
    """A file, and the modules of its folder or its package that it imports, directly or by way of others of them."""
    files = {script.absolute()}
    waiting_files = list(files)
    while waiting_files:
        new_files = _imported_files(waiting_files.pop()) - files
        files |= new_files
        waiting_files += new_files
    return files


def files_hash(files: Iterable[Path]) -> str:
    """Hash of names, sizes and contents of files."""
    sha256 = hashlib.sha256()
    for name, content in sorted((file.name, file.read_bytes()) for file in files):
        sha256.update(repr((name, len(content))).encode())
        sha256.update(content)
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


def _imported_files(file: Path) -> set[Path]:
    """Modules of a file's folder, its package, and packages beside it that it may import; none if it isn't Python.

    Of what is installed, only those of its folder: packages are large, others lie beside them, and other machines may
    have them in another place. This package isn't a user's.
    """
    package = _package_of(file)
    root = file.parents[len(package)]
    files: set[Path] = set()
    for name in _imported_names(file, package):
        first_part = name[0]
        files.update(filter(Path.is_file, [file.with_name(f"{first_part}.py")]))
        if first_part != _PACKAGE.name:
            files.update(_files_of_module(root, name))
    if any(root.glob("*.dist-info")) or (package and _is_distribution(package[0])):
        return {path for path in files if path.parent == file.parent}
    return files


def _is_distribution(name: str) -> bool:
    """Whether a package of that name is installed, if only as a link to its sources."""
    from importlib.metadata import PackageNotFoundError, distribution  # `--help` is to answer at once.

    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _package_of(file: Path) -> list[str]:
    """Names of the packages that a file lies in, the outermost first."""
    names: list[str] = []
    for folder in file.parents:
        if not (folder / "__init__.py").is_file():
            break
        names.insert(0, folder.name)
    return names


def _imported_names(file: Path, package: Sequence[str]) -> Iterator[Sequence[str]]:
    """Names of modules that a file of a package imports, each by its parts.

    What stands behind ``from a import`` may be a module, too.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            above: list[str] = []
            if node.level:
                above += package[: len(package) + 1 - node.level]
            if node.module is not None:
                above += node.module.split(".")
            for alias in node.names:
                yield [*above, alias.name]


def _files_of_module(root: Path, name: Sequence[str]) -> Iterator[Path]:
    """Files that are loaded with a module, those of its packages first; a last part that is no module has none."""
    folder = root
    for part in name:
        folder = folder / part
        yield from filter(Path.is_file, (folder / "__init__.py", folder.with_name(f"{part}.py")))


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
