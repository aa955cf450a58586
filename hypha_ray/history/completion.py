"""Completion scripts of the command `hypha-ray` for bash, zsh and fish.

The scripts hold no lists of their own: they ask the command itself, ``hypha-ray --complete WORD …``, which prints the
candidates for the last word, one a line. So runs and job files are those that there are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from hypha_ray.errors import ConfigError

_BASH = """\
_hypha_ray() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <("${COMP_WORDS[0]}" --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _hypha_ray hypha-ray
"""
_ZSH = """\
#compdef hypha-ray
_hypha_ray() {
    local -a candidates
    candidates=("${(@f)$("${words[1]}" --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${candidates[1]}" ]]; then
        compadd -- "${candidates[@]}"
    else
        _files
    fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _hypha_ray hypha-ray
"""
_FISH = """\
function __hypha_ray
    set -l words (commandline -opc) (commandline -ct)
    set -l candidates ($words[1] --complete $words[2..-1] 2>/dev/null)
    if set -q candidates[1]
        printf '%s\\n' $candidates
    else
        __fish_complete_path $words[-1]
    end
end
complete -c hypha-ray -f -a '(__hypha_ray)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Scripts by the names of the shells."""
_PARENT = Path(__file__).parents[2]
"""Folder that has the package."""
_SWITCHES = ("--dry-run", "--help", "--resume")
_RUN_OPTIONS = frozenset({"--resume", "--run"})
"""Options whose value may be the name of a run."""
_TAKE_KEYS = frozenset({"rerun"})
"""Jobs with options of their own that take a job file's keys, too."""
_TAKE_RUNS = frozenset({"compare", "evaluate", "export", "generate", "plot", "rerun", "report", "show"})
"""Jobs that take runs by position."""

_NO_CHOICES = ("integer", "number ", "module:object")
"""Beginnings of kinds of values that are no choice."""


def completion_script(shell: str) -> str:
    """Return the script of a shell.

    Raises:
        ConfigError: CFG003, there is none for it.

    """
    if shell in SCRIPTS:
        return SCRIPTS[shell]
    allowed = ", ".join(SCRIPTS)
    raise ConfigError("CFG003", "--completion is out of range", repr(shell), allowed, "name one of them")


def candidates(words: Sequence[str], scripts: dict[str, Path]) -> list[str]:
    """Candidates for the last word of a command line, sorted; files are left to the shell.

    Args:
        words: the words after ``hypha-ray`` up to the cursor; the last one may be empty.
        scripts: job scripts by the names of the jobs.

    """
    # A shell may take = for a word of its own.
    *earlier_words, word = [word for word in words if word != "="] or [""]
    if words and words[-1] == "=":
        earlier_words, word = [*earlier_words, word], ""
    names: Iterable[str] = ()
    if not earlier_words:
        names = [*scripts, "--help", "--version", "--completion"]
    elif earlier_words[0] == "--completion":
        names = SCRIPTS
    elif earlier_words[0] in scripts:
        names = _names_for_job(earlier_words, word, scripts)
    if earlier_words[:1] == ["explain"]:
        word = word.upper()
    return _matching(word, names)


def _names_for_job(earlier_words: Sequence[str], word: str, scripts: dict[str, Path]) -> Iterable[str]:
    """Names that may stand at a word behind a job."""
    job, *arguments = earlier_words
    previous = (arguments or [""])[-1]
    names: Iterable[str] = ()
    choices = _choices_at(previous, word, scripts[job])
    if choices:
        names = choices
    elif word.startswith("--"):
        names = _options(scripts[job])
    elif previous == "@" or word.startswith("@") or job == "configs":
        names = _job_files(word)
    elif job == "explain":
        names = _codes()
    elif previous in _RUN_OPTIONS or (job in _TAKE_RUNS and not previous.startswith("-")):
        names = _runs()
    return names


def _matching(word: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(word))


def _options(script: Path) -> list[str]:
    """Flags of a job, read without running it: the fields of its own options, otherwise the keys of the job file."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    name = _options_class(tree)
    if name is None:
        return [*_SWITCHES, *_key_flags()]
    flags = ["--help", *_flags_of(name, tree)]
    if script.stem in _TAKE_KEYS:
        flags += _key_flags()
    return flags


def _choices_at(previous: str, word: str, script: Path) -> list[str]:
    """Choices for a word that is a flag's value, behind ``=`` or the elements of a list that it begins with."""
    flag, equals_sign, value = word.partition("=")
    if not word.startswith("--"):
        flag = previous
        value = word
    elif not equals_sign:
        return []
    if not flag.startswith("--"):
        return []
    elements, comma, _ = value.rpartition(",")
    start = word.removesuffix(value) if value else word
    return [f"{start}{elements}{comma}{choice}" for choice in _choices(flag, script)]


def _choices(flag: str, script: Path) -> list[str]:
    """Choices of an option of a job, or of a key of the job file; none for any other value."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    name = _options_class(tree)
    if name is not None:
        field = flag.removeprefix("--").replace("-", "_")
        for node in ast.walk(tree):
            match node:
                case ast.AnnAssign(target=ast.Name(id=target), annotation=annotation) if target == field:
                    return _literals(annotation)
    if name is not None and script.stem not in _TAKE_KEYS:
        return []
    from hypha_ray.config.keys import keys

    key = keys().get(tuple(flag.removeprefix("--").split(".")))
    if key is None or " | " not in key.kind:
        return []
    words = key.kind.removeprefix("list of ").split(" | ")
    return [word for word in words if not word.startswith(_NO_CHOICES)]


def _literals(annotation: ast.expr) -> list[str]:
    """Texts of the ``Literal[…]`` of an annotation."""
    texts: list[str] = []
    for node in ast.walk(annotation):
        match node:
            case ast.Subscript(value=ast.Name(id="Literal"), slice=allowed):
                texts += [str(part.value) for part in ast.walk(allowed) if isinstance(part, ast.Constant)]
    return texts


def _key_flags() -> list[str]:
    """Flags of the keys of the job file, without those of tables in arrays."""
    from hypha_ray.config.keys import EACH, keys

    return [f"--{key.name}" for path, key in keys().items() if EACH not in path]


def _options_class(tree: ast.Module) -> str | None:
    """Name of the class of a job's own options; None if it takes a job file."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="parse_options"), args=[ast.Name(id=name), *_]):
                return name
    return None


def _flags_of(name: str, tree: ast.Module) -> list[str]:
    """Flags for the fields of a class, which may be imported from another module of the package."""
    flags: list[str] = []
    for node in tree.body:
        match node:
            case ast.ClassDef(name=class_name) if class_name == name:
                flags += _fields(node)
            case ast.ImportFrom(module=str(module)) if name in [alias.name for alias in node.names]:
                file = _PARENT.joinpath(*module.split(".")).with_suffix(".py")
                if file.is_file():
                    flags += _flags_of(name, ast.parse(file.read_text(encoding="utf-8")))
    return flags


def _fields(options: ast.ClassDef) -> list[str]:
    flags: list[str] = []
    for statement in options.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=field)):
                flag = field.rstrip("_").replace("_", "-")
                flags.append(f"--{flag}")
    return flags


def _job_files(word: str) -> list[str]:
    """Job files that come with the package, behind the @ if the word has it."""
    from hypha_ray.files import shipped_configs

    if word.startswith("@"):
        return [f"@{name}" for name in shipped_configs()]
    return list(shipped_configs())


def _codes() -> Iterable[str]:
    from hypha_ray.config.entry_point import explanations

    return explanations()


def _runs() -> list[str]:
    from hypha_ray.config.load import CONFIG
    from hypha_ray.store.directory import home

    return [path.parent.name for path in home().glob(f"*/{CONFIG}")]
