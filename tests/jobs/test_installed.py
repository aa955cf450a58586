"""The wheel in an environment of its own, far from the checkout: the command `hypha-ray`, its jobs and job files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.job_scripts import left_behind

ROOT = Path(__file__).parents[2]
SMALL = ["--rounds.update_rounds", "2", "--rounds.samples_between_updates", "64", "--inner_optimizer.warmup_steps", "2"]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder to work in."""

    python: Path
    folder: Path
    ray: Path
    """Folder of Ray's files; its path is short, since Ray puts sockets there."""

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        own = {"HYPHA_RAY_HOME": str(self.folder / "home"), "RAY_TMPDIR": str(self.ray), "PYTHONSAFEPATH": "1"}
        inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
        return subprocess.run(
            [*map(str, command)],
            cwd=self.folder,
            env=inherited | own,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    def hypha_ray(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run(self.python.with_name("hypha-ray"), *arguments)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(built, check=True)
    environment = folder / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in others))
    (folder / "work").mkdir()
    with tempfile.TemporaryDirectory(prefix="ray") as ray:
        yield Installed(python, folder / "work", Path(ray))
        assert left_behind(Path(ray)) == []


def test_command_lists_its_jobs_and_names_the_nearest(installed: Installed) -> None:
    listed = installed.hypha_ray("--help")
    assert listed.returncode == 0
    in_checkout_alone = {"bench", "chaos"}
    scripts = {script.stem for script in (ROOT / "jobs").glob("*.py")} - in_checkout_alone
    listed_names = {line.split()[0] for line in listed.stdout.partition("jobs:\n")[2].splitlines() if line}
    assert listed_names == scripts
    wrong = installed.hypha_ray("dilco")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error[CFG001]") and wrong.stderr.endswith("Fix: did you mean 'diloco'?\n")


def test_help_of_a_job_names_the_command_and_needs_neither_torch_nor_ray(installed: Installed) -> None:
    told = installed.hypha_ray("diloco", "--help")
    assert "hypha-ray diloco @ tiny.toml --dataset.path data/stdlib" in told.stdout
    code = """
import sys
sys.argv = ["hypha-ray", "diloco", "--help"]
import hypha_ray.__main__
try:
    hypha_ray.__main__.main()
finally:
    print(sorted({"torch", "ray", "transformers", "numpy"} & set(sys.modules)), file=sys.stderr)
"""
    loaded = installed.run(installed.python, "-c", code)
    assert (loaded.returncode, loaded.stderr) == (0, "[]\n")


def test_shipped_job_files_are_listed_and_taken_by_their_names(installed: Installed) -> None:
    listed = installed.hypha_ray("configs")
    assert listed.returncode == 0, listed.stderr
    names = {line.split()[0] for line in listed.stdout.splitlines()}
    assert names == {file.stem for file in (ROOT / "jobs" / "configs").glob("*.toml")}
    printed = installed.hypha_ray("configs", "sums-warm")
    assert "hypha-ray diloco @ sums-warm.toml" in printed.stdout
    assert "python jobs/" not in printed.stdout
    wrong = installed.hypha_ray("diloco", "@", "tinny")
    assert wrong.returncode == 2 and wrong.stderr.endswith("Fix: did you mean 'tiny'?\n")


def test_package_in_use_is_the_installed_one(installed: Installed) -> None:
    place = installed.run(installed.python, "-c", "import hypha_ray; print(hypha_ray.__file__)").stdout
    assert Path(place).is_relative_to(installed.python.parents[1])


def test_prepare_train_and_evaluate_far_from_the_checkout(installed: Installed) -> None:
    data = installed.folder / "data"
    prepared = ["--source", "stdlib", "--out", data, "--seq-len", "32", "--max-samples", "300"]
    done = installed.hypha_ray("prepare", *prepared)
    assert done.returncode == 0, done.stderr
    done = installed.hypha_ray("diloco", "@", "tiny", "--dataset.path", data, "--run.name", "one", *SMALL)
    assert done.returncode == 0, done.stderr
    run = installed.folder / "home" / "one"
    assert done.stdout.splitlines()[-1] == f"run: {run}"
    scored = installed.run(
        installed.python, "-m", "hypha_ray", "evaluate", "--model", run / "model", "--dataset", data, "--json"
    )
    assert scored.returncode == 0, scored.stderr
    found = json.loads(scored.stdout.splitlines()[-1])["val_loss"]
    written = installed.hypha_ray("generate", "--model", "one", "--prompt", "import ", "--max-new-tokens", "8")
    assert written.returncode == 0 and written.stdout, written.stderr
    again = installed.run(installed.python, "-c", AGAIN)
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout.splitlines()[-1])
    assert told["val_loss"] == pytest.approx(found, rel=1e-5)
    assert (told["path"], told["rounds"], told["model"]) == (str(run), [0, 1], str(run / "model"))
    assert told["error"].startswith("error[CFG001]") and "update_rounds" in told["error"]


AGAIN = """
import json
from pathlib import Path
import hypha_ray
from hypha_ray.errors import ConfigError

run = hypha_ray.train(Path("home/one/config.toml"))
told = {"path": str(run.path), "model": str(run.export(round=1)), "val_loss": run.records("eval")[-1]["val_loss"]}
told["rounds"] = [record["round"] for record in hypha_ray.Run("one").records("round")]
try:
    hypha_ray.train({"rounds": {"update_ronds": 3}})
except ConfigError as error:
    told["error"] = str(error)
print(json.dumps(told))
"""
