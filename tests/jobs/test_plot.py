"""`jobs/plot.py` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.forked_process import run_script
from tests.support.job_scripts import said

ROOT = Path(__file__).parents[2]


def plot(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {} if home is None else {"HYPHA_RAY_HOME": str(home)}
    done = run_script("plot.py", *arguments, **environment)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, said(done.stderr))


def test_plot_of_a_run_prints_the_files_it_drew(tmp_path: Path) -> None:
    record = {"kind": "round", "round": 0, "time_s": 1.0, "loss": 2.0, "samples_total": 10, "batches": {"0": 3}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    done = plot("--run", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert [path.name for path in paths] == ["loss.png", "batches.png", "finish.png", "bytes.png", "utilisation.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_plot_takes_a_run_by_its_name_with_or_without_the_flag(tmp_path: Path) -> None:
    record = {"kind": "round", "round": 0, "time_s": 1.0, "loss": 2.0, "samples_total": 10, "batches": {"0": 3}}
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "first" / "config.toml").write_text("")
    elsewhere = tmp_path / "elsewhere"
    for arguments, home in (
        (["first"], tmp_path),
        (["--run", "first"], tmp_path),
        (["first", "--dir", str(tmp_path)], elsewhere),
    ):
        done = plot(*arguments, home=home)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[0] == str(tmp_path / "first" / "plots" / "loss.png")
    done = plot("frist", home=tmp_path)
    assert done.returncode == 5 and "did you mean 'first'?" in done.stderr


def test_plot_of_an_empty_folder_is_one_line_and_exit_three(tmp_path: Path) -> None:
    done = plot("--run", str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error[DATA044]: {tmp_path}/metrics.jsonl does not exist")


def test_plot_help_imports_nothing_heavy() -> None:
    probe = (
        "import runpy, sys\n"
        f"sys.argv = ['plot.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'jobs' / 'plot.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    heavy = {'matplotlib', 'ray', 'torch', 'numpy', 'aim'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--run" in done.stdout
