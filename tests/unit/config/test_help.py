"""The help text, the documentation made from the schema, and that none of it needs a heavy library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_ray.config import assignments, checks, document
from hypha_ray.config.keys import EACH, keys, nearest
from hypha_ray.config.load import parse
from hypha_ray.config.options import help_text, renewed
from hypha_ray.driver.run_folders import find_run
from hypha_ray.model.tasks import TASKS, UNTRAINABLE

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
HEAVY = {"ray", "torch", "transformers", "datasets", "numpy", "matplotlib", "rich"}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


@pytest.mark.slow
def test_import_of_the_configuration_leaves_heavy_modules_out() -> None:
    code = "import sys, hypha_ray.config, hypha_ray.config.load, hypha_ray.config.entry_point; print(*sys.modules)"
    assert HEAVY.isdisjoint(python(code).split())


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_job_script_help_exits_with_0_and_leaves_heavy_modules_out(flag: str) -> None:
    script = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print('MODULES', *sys.modules))\n"
        f"sys.argv = ['diloco.py', {flag!r}]\n"
        "runpy.run_path('jobs/diloco.py', run_name='__main__')"
    )
    text, modules = python(script).split("MODULES")
    assert "--rounds.update_rounds 100" in text
    assert "python jobs/diloco.py @" in text
    assert HEAVY.isdisjoint(modules.split())


def test_help_text_has_one_line_for_each_key_with_default_meaning_and_kind() -> None:
    text = help_text("\nWhat the job does.\n")
    assert text.startswith("What the job does.\n")
    lines = [line for line in text.splitlines() if line.startswith("  --") and "." in line.split()[0]]
    assert [line.split()[0] for line in lines if "VALUE" not in line] == [f"--{key.name}" for key in keys().values()]
    assert re.search(r"--rounds.max_batch_size 32 +samples of one inner step of one worker \(integer ≥ 1\)", text)
    assert re.search(r"^\[resources.worker\]  Resources of", text, re.MULTILINE)
    assert re.search(r"^\[\[workers\]\]  .*\n(  --workers\.N\..*\n)*  --workers\.N\.count 1 ", text, re.MULTILINE)


def test_parse_help_wins_over_everything_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--no.such.flag", "@", "/nowhere", "--help"], "Train a model.", find_run)
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("Train a model.\n")


def test_parse_without_help_loads() -> None:
    assert parse(["--run.seed", "3"], None, find_run).job.run.seed == 3


def test_every_key_has_a_meaning() -> None:
    assert [key.name for key in keys().values() if not key.meaning] == []


@pytest.mark.parametrize("key", [key.path for key in keys().values()], ids=".".join)
def test_nearest_any_key_with_a_letter_missing_is_found(key: tuple[str, ...]) -> None:
    number = [part.replace(EACH, "0") for part in key]
    shortened = (*number[:-1], key[-1][:1] + key[-1][2:])
    assert nearest(shortened) == ".".join(number)


def test_documentation_lists_the_keys_of_the_schema() -> None:
    """If this fails: `renewed` makes the text that docs/configuration.md should have."""
    assert renewed(DOCUMENT) == DOCUMENT
    assert all(f"| `{key.path[-1]}` | " in DOCUMENT for key in keys().values())


def test_documentation_lists_every_code_that_is_raised() -> None:
    sources = "".join(
        Path(str(module.__file__)).read_text(encoding="utf-8") for module in (checks, document, assignments)
    )
    raised = set(re.findall(r'"(CFG\d+)"', sources))
    assert raised
    assert raised <= set(re.findall(r"^\| (CFG\d+) \|", DOCUMENT, re.MULTILINE))


def test_documentation_lists_every_model_type() -> None:
    section = DOCUMENT.split("## Model types")[1].split("\n## ")[0].split("\n\n")
    trained, others = (set(re.findall(r"`([^`]+)`", section[place])) for place in (2, 4))
    assert others == set(UNTRAINABLE)
    assert trained == {task.name for task in TASKS.values()} - others
