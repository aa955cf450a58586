"""Run a job: hypha-ray JOB …, which is python jobs/JOB.py … of a checkout.

hypha-ray prepare --source stdlib --out data/stdlib
hypha-ray diloco @ tiny.toml --dataset.path data/stdlib
hypha-ray JOB --help
hypha-ray --completion bash|zsh|fish      # a script that lets the shell complete jobs, options, files and runs
"""

from __future__ import annotations

import ast
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

from hypha_ray import __version__
from hypha_ray.config.entry_point import run
from hypha_ray.errors import ConfigError
from hypha_ray.files import jobs_folder


def main() -> None:
    """Run the job that the command line names, under the error boundary of the job scripts."""
    run(_main)


def _main() -> None:
    jobs = {file.stem: file for file in sorted(jobs_folder().glob("*.py"))}
    match sys.argv[1:]:
        case [] | ["-h" | "--help"]:
            print(_help(jobs))
        case ["--version"]:
            print(__version__)
        case ["--completion", *shells]:
            from hypha_ray.history.completion import completion_script

            print(completion_script(" ".join(shells)), end="")
        case ["--complete", *words]:
            from hypha_ray.history.completion import candidates

            print("".join(f"{candidate}\n" for candidate in candidates(words, jobs)), end="")
        case [name, *arguments] if name in jobs:
            _run(jobs[name], arguments)
        case [name, *_]:
            matches = get_close_matches(name, jobs, n=1)
            fix = f"did you mean {matches[0]!r}?" if matches else "hypha-ray --help lists all jobs"
            raise ConfigError("CFG001", "there is no such job", repr(name), ", ".join(jobs), fix)


def _run(script: Path, arguments: list[str]) -> None:
    """Run a script as `python SCRIPT …` does: its neighbours can be imported, by Ray's workers too."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _help(jobs: dict[str, Path]) -> str:
    """Return the usage, and for each job the first line of its description."""
    usage = __doc__ or ""
    lines = [f"  {name:<10} {_summary(script)}" for name, script in jobs.items()]
    return "\n".join([usage.strip(), "", "jobs:", *lines])


def _summary(script: Path) -> str:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    doc = ast.get_docstring(tree) or ""
    summary, _, _ = doc.splitlines()[0].partition(": python jobs/")
    return summary


if __name__ == "__main__":
    main()
