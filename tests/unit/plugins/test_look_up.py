"""The look-up of members of families: built-in ones, entry points, and modules beside the job."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.families import FAMILIES
from hypha_ray.files import files_hash, with_imports
from hypha_ray.plugins import (
    attempt,
    create,
    find,
    is_known,
    look_beside_the_job,
    names,
    options_of,
    sources,
)
from tests.support.plugins import Written, install

SINK = """
from hypha_ray.plugins import Options

class Sink:
    class Options(Options):
        every: int = 1
        labels: list[str] = []

    def __init__(self, place, options):
        self.place, self.options = place, options
    def start(self, config): pass
    def record(self, record): pass
    def event(self, event): pass
    def summary(self, figures): pass
    def close(self): pass
"""


def refused(family: str, name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find(family, name)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_built_in_members_are_there_and_are_found(family: str) -> None:
    for name, place in FAMILIES[family].members.items():
        module, _, attribute = place.partition(":")
        if place:
            assert find(family, name) is getattr(import_module(module), attribute)


def test_member_beside_the_job_is_found_and_has_its_options(written: Written) -> None:
    name = f"{written(SINK)}:Sink"
    sink = create("sinks", name, {"every": 3}, "a place")
    assert (sink.place, sink.options.every, sink.options.labels) == ("a place", 3, [])
    assert create("sinks", name, None, "a place").options.every == 1


def test_driver_finds_modules_of_its_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_driver.py").write_text("def reward(response):\n    return 1.0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    look_beside_the_job()
    assert find("rewards", "beside_the_driver:reward")(None) == 1.0


def test_member_that_was_edited_is_loaded_anew_with_what_it_imports(tmp_path: Path, written: Written) -> None:
    helper = written("FACTOR = 2.0\n")
    module = written(f"from {helper} import FACTOR\ndef reward(response):\n    return FACTOR\n")
    assert find("rewards", f"{module}:reward")(None) == 2.0
    look_beside_the_job()
    unchanged = find("rewards", f"{module}:reward")
    (tmp_path / f"{helper}.py").write_text("FACTOR = 3.25\n")
    assert find("rewards", f"{module}:reward") is unchanged
    look_beside_the_job()
    assert find("rewards", f"{module}:reward")(None) == 3.25


def test_entry_point_is_known_by_its_name(tmp_path: Path, written: Written) -> None:
    module = written(SINK)
    install(tmp_path, "sinks", "lines", f"{module}:Sink")
    assert is_known("sinks", "lines") and names("sinks")[-1] == "lines"
    assert find("sinks", "lines").__module__ == module
    assert [path.name for path in sources("sinks", "lines")] == [f"{module}.py"]
    assert "did you mean 'lines'?" in refused("sinks", "line")


def test_built_in_member_is_not_replaced_by_an_entry_point(tmp_path: Path, written: Written) -> None:
    install(tmp_path, "sinks", "wandb", f"{written(SINK)}:Sink")
    assert find("sinks", "wandb").__name__ == "WeightsAndBiases"
    assert names("sinks").count("wandb") == 1


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        ("1 / 0", "Sink", "ZeroDivisionError: division by zero. Fix: put "),
        ("raise SystemExit(3)", "Sink", "SystemExit: 3"),
        ("def f(:", "Sink", "SyntaxError"),
        ("", "Sink", "got nothing of that name, allowed a class with the methods of hypha_ray.telemetry.sinks.base"),
        ("Sink = 3", "Sink", "hypha_ray.telemetry.sinks.base.Sink. Fix: name a class or a function of "),
        ("def sink(place): pass", "sink", "got no class"),
        (SINK.replace("def event", "def events"), "Sink", "got a class without the method event"),
        (SINK.replace("event(self, event)", "event(self)"), "Sink", "a method event that can't be called with 1 argum"),
        (SINK.replace("close(self)", "close(self, now)"), "Sink", "method close that can't be called with no argument"),
    ],
)
def test_member_that_cannot_be_had_is_one_clear_error(written: Written, module: str, name: str, text: str) -> None:
    name = f"{written(module)}:{name}"
    line = refused("sinks", name)
    assert line.startswith(f"error[PLG002]: telemetry sink {name} can't be ") and text in line


def test_module_that_is_not_there_is_one_clear_error() -> None:
    assert "ModuleNotFoundError" in refused("sinks", "not_here_at_all.sinks:Sink")
    assert "put not_here_at_all.py into the job's working directory" in refused("sinks", "not_here_at_all.sinks:Sink")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("steps.py:Halving", "write steps:Halving"),
        ("./steps:Halving", "write steps:Halving"),
        ("plugins/steps.py:Halving", "write plugins.steps:Halving"),
        ("/home/me/steps.py:Halving", "start the job in the folder of steps.py, and write steps:Halving"),
        ("..:Halving", "write module:object"),
    ],
)
def test_path_in_place_of_a_module_has_its_spelling_as_remedy(name: str, fix: str) -> None:
    assert f"Fix: {fix}" in refused("schedules", name)


def test_file_with_the_name_of_a_module_of_python_is_told(written: Written) -> None:
    Path(f"{written(SINK)}.py").rename("json.py")
    line = refused("sinks", "json:Sink")
    assert "got Python's own module json in place of json.py. Fix: give json.py another name" in line
    Path("json.py").unlink()
    assert "got nothing of that name" in refused("sinks", "json:Sink")


def test_function_is_held_to_its_number_of_arguments(written: Written) -> None:
    module = written("def none():\n    pass\ndef two(a, b):\n    pass\ndef some(*all):\n    return 1.0\n")
    assert "error[RWD004]: reward function" in refused("rewards", f"{module}:none")
    assert "got a function that can't be called with 1 argument" in refused("rewards", f"{module}:two")
    assert find("rewards", f"{module}:some")(None) == 1.0


def test_class_of_a_family_of_functions_is_called_once_for_all(written: Written) -> None:
    text = "class Reward:\n    def __init__(self):\n        self.n = 2.0\n    def __call__(self, response):\n"
    module = written(f"{text}        return self.n\nclass Silent:\n    pass\n")
    assert create("rewards", f"{module}:Reward")(None) == 2.0
    assert "got a class without the method __call__" in refused("rewards", f"{module}:Silent")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"evry": 2}, "error[CFG001]: telemetry.sinks_options: unknown key evry — allowed every, labels. Fix: did you"),
        ({"every": "often"}, "error[CFG002]: telemetry.sinks_options.every has the wrong type — got 'often'"),
        ({"labels": [1]}, "error[CFG002]: telemetry.sinks_options.labels.0 has the wrong type"),
    ],
)
def test_wrong_option_is_refused_with_its_key(written: Written, options: dict[str, object], text: str) -> None:
    name = f"{written(SINK)}:Sink"
    with pytest.raises(ConfigError) as caught:
        options_of("sinks", name, find("sinks", name), options)
    assert str(caught.value).startswith(text)


def test_options_for_a_member_without_any_are_refused(written: Written) -> None:
    name = f"{written('def reward(response):' + chr(10) + '    return 1.0')}:reward"
    with pytest.raises(ConfigError, match=r"CFG001.*reward function .*:reward has no options — got scale"):
        create("rewards", name, {"scale": 2})


def test_needed_option_that_is_missing_is_named(written: Written) -> None:
    name = f"{written(SINK.replace('every: int = 1', 'every: int'))}:Sink"
    with pytest.raises(ConfigError, match=r"CFG012.*telemetry.sinks_options.every is missing"):
        create("sinks", name, {})


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("self.place, self.options", "raise OSError('no disk')\n        self.place, self.options", "OSError: no disk"),
        ("def __init__(self, place, options)", "def __init__(self)", "TypeError"),
        (
            "class Sink:",
            "class Sink:\n    packages = ('not_a_package_of_this_world',)",
            "pip install not_a_package_of_th",
        ),
        ("class Sink:", "class Sink:\n    packages = 'not_a_package_of_this_world'", "pip install not_a_package_of_th"),
        ("class Sink:", "class Sink:\n    packages = ('not_here.at_all',)", "needs the package not_here.at_all"),
        ("class Sink:", "class Sink:\n    packages = 5", "TypeError: 'int' object is not iterable"),
        (
            "class Sink:",
            "class Sink:\n    @staticmethod\n    def check(job):\n        raise OSError(job)",
            "OSError: the job",
        ),
    ],
)
def test_member_that_fails_on_a_trial_is_refused(written: Written, old: str, new: str, text: str) -> None:
    name = f"{written(SINK.replace(old, new, 1))}:Sink"
    with pytest.raises(ConfigError) as caught:
        attempt("telemetry.sinks", "sinks", name, None, "the job")
    assert caught.value.code in ("PLG002", "PLG003") and text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sources_are_those_of_the_module_and_of_what_it_imports_beside_it(tmp_path: Path, written: Written) -> None:
    helper = written("VALUE = 1\n")
    module = written(f"import json\nfrom {helper} import VALUE\ndef reward(response):\n    return VALUE\n")
    assert {path.name for path in sources("rewards", f"{module}:reward")} == {f"{module}.py", f"{helper}.py"}
    assert sources("rewards", "exact") == sources("rewards", "not_here:reward") == frozenset()
    package = tmp_path / "package_of_a_test"
    package.mkdir()
    texts = {"__init__": "", "main": "from package_of_a_test.helper import f", "helper": "f = len", "other": ""}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    found = sources("rewards", "package_of_a_test.main:f")
    assert {path.name for path in found} == {"__init__.py", "main.py", "helper.py"}


NESTED = {
    "member.py": "import hypha_ray.plugins, lone\nfrom mine.deep import leaf\nfrom mine import other as o\n",
    "lone.py": "",
    "mine/__init__.py": "",
    "mine/other.py": "from . import deep\nfrom .sibling import *\n",
    "mine/sibling.py": "import mine.far\n",
    "mine/far.py": "raise RuntimeError('only read')",
    "mine/unused.py": "import member\n",
    "mine/deep/__init__.py": "",
    "mine/deep/leaf.py": "from ..other import y\nfrom ... import lone\n",
    "hypha_ray/__init__.py": "",
    "hypha_ray/plugins.py": "",
}


@pytest.mark.parametrize("is_installed", [False, True])
def test_sources_of_a_member_are_in_all_folders_of_its_packages_unless_they_are_installed(
    tmp_path: Path, is_installed: bool
) -> None:
    for place, text in NESTED.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    if is_installed:
        (tmp_path / "mine-1.0.dist-info").mkdir()
    found = {file.relative_to(tmp_path).as_posix() for file in with_imports(tmp_path / "member.py")}
    expected = {"member.py", "lone.py"}
    if not is_installed:
        expected = NESTED.keys() - {"mine/unused.py", "hypha_ray/__init__.py", "hypha_ray/plugins.py"}
    assert found == expected


def test_sources_in_an_installed_package_are_those_of_its_folder_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is installed as a link to its sources has the hash of one that is installed whole."""
    package = tmp_path / "sources" / "linked_package"
    (package / "deep").mkdir(parents=True)
    for name in ("__init__", "beside", "deep/__init__", "deep/leaf"):
        (package / f"{name}.py").touch()
    (package / "member.py").write_text("from . import beside\nfrom .deep import leaf\n")
    assert len(with_imports(package / "member.py")) == 5
    metadata = tmp_path / "installed" / "linked_package-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: linked-package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(metadata.parents[1])
    assert {file.name for file in with_imports(package / "member.py")} == {"member.py", "beside.py", "__init__.py"}


def test_hash_of_sources_knows_files_of_one_name_in_any_order(tmp_path: Path) -> None:
    files = [tmp_path / folder / "__init__.py" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"# {file.parent.name}")
    first_hash = files_hash(files)
    assert files_hash(files[::-1]) == first_hash
    files[1].write_text("# c")
    assert files_hash(files) != first_hash


def test_package_that_ends_the_process_has_no_sources_and_is_refused(tmp_path: Path, written: Written) -> None:
    written("")  # The folder is where modules are looked for.
    package = tmp_path / "package_that_exits"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(3)", encoding="utf-8")
    (package / "main.py").write_text("f = len", encoding="utf-8")
    assert sources("schedules", "package_that_exits.main:f") == frozenset()
    with pytest.raises(ConfigError, match=r"PLG002.*can't be loaded"):
        find("schedules", "package_that_exits.main:f")


@pytest.mark.slow
def test_look_up_needs_neither_torch_nor_ray() -> None:
    code = "import sys, hypha_ray.plugins as p; p.names('sinks'); print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
