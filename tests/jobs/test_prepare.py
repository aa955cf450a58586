"""`jobs/prepare.py` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import read_slice
from hypha_ray.rl.rewards.response import unpack_records
from tests.support.forked_process import run_script
from tests.support.http_servers import LocalServer, QuietHandler
from tests.support.job_scripts import said

SCRIPT = Path(__file__).parents[2] / "jobs" / "prepare.py"


def run(*arguments: str, **hub: str) -> subprocess.CompletedProcess[str]:
    """Run the script; with variables of a hub in an interpreter of its own, as libraries read them when loaded."""
    if hub:
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **hub}
        )
    else:
        done = run_script("prepare.py", *arguments)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, said(done.stderr))


class Hub(QuietHandler):
    """A hub that has nothing for us."""

    def do_HEAD(self) -> None:
        for name, (status, code) in {"owner/gated": (403, "GatedRepo"), "owner/private": (401, "")}.items():
            if name in self.path:
                return self.answer(status, **{"X-Error-Code": code})
        return self.answer(404, **{"X-Error-Code": "RepoNotFound"})

    def do_GET(self) -> None:
        self.do_HEAD()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with LocalServer(Hub) as server:
        yield server.url


def test_prepare_of_the_standard_library_says_what_it_made(tmp_path: Path) -> None:
    out = tmp_path / "stdlib"
    done = run("--source", "stdlib", "--out", str(out), "--seq-len", "64", "--max-samples", "2000")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["train", "2,000", "samples", "in", "2", "slices"]
    assert lines[1].split() == ["validation", "256", "samples", "in", "1", "slices"]
    assert lines[2].split()[:2] == ["tokens", "128,000"]
    assert lines[-1] == f"dataset: {out}"
    manifest = load(out)
    assert (manifest.name, manifest.samples("train"), manifest.sample_bytes) == ("stdlib", 2000, 512)


def test_prepare_of_digits_makes_images(tmp_path: Path) -> None:
    done = run("--source", "digits", "--out", str(tmp_path / "d"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens" not in done.stdout
    assert {tensor.name: tensor.maximum for tensor in load(tmp_path / "d").tensors}["labels"] == 9


def test_prepare_of_problems_shows_counts_lengths_and_a_prompt(tmp_path: Path) -> None:
    out = tmp_path / "sort2"
    done = run("--source", "problems:sort2", "--tokenizer", "characters", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    assert lines["read"] == "8,192 prompts"
    assert lines["validation"] == "256 samples in 1 slices"
    assert lines["different"] == "95 in train, 5 in validation"
    assert lines["tokens"] == "3 to 3 a prompt, 3.0 on average"
    prompt, record = json.loads(lines["prompt"]), json.loads(lines["record"])
    assert record == {"task": "sort2", "answer": "".join(sorted(prompt[:2]))} and prompt[2:] == "="
    assert lines["dataset:"] == str(out)


def test_prepare_of_rows_in_the_form_of_gsm8k(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"Twice {n}.\n#### {2 * n:,}"} for n in range(400, 800)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out, source = tmp_path / "gsm8k", str(tmp_path / "gsm8k.jsonl")
    columns = ("--prompt-column", "question", "--answer-column", "answer", "--task", "gsm8k")
    done = run("--source", source, *columns, "--out", str(out), "--samples-per-slice", "100")
    assert (done.returncode, done.stderr) == (0, "")
    manifest = load(out)
    assert (manifest.modality, manifest.samples("train"), manifest.samples("validation")) == ("prompts", 380, 20)
    records = [
        record for info in manifest.slices for record in unpack_records(read_slice(out, info, manifest)["reward_data"])
    ]
    assert sorted(int(record["answer"]) for record in records) == [2 * n for n in range(400, 800)]


def test_prepare_of_chats_shows_lengths_and_a_sample_with_its_answers_marked(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "1"}]} for n in "2345"]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    out, source = tmp_path / "chats", str(tmp_path / "chats.jsonl")
    arguments = ("--chat", "--chat-template", str(tmp_path / "chat.jinja"), "--report", "--validation-fraction", "0")
    done = run("--source", source, *arguments, "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    length = len("user: 2?.assistant: 1.")
    assert lines["tokens"] == f"{4 * length} to train on, of which 8 are scored"
    assert lines["lengths"] == f"{length} to {length} tokens a sample, {length} in the median"
    assert lines["sample"].startswith("user: ") and lines["sample"].endswith("?</s>assistant: «1</s>»")
    assert lines["read"] == "4 chats from 1 file"


def test_prepare_into_a_dataset_wants_overwrite(tmp_path: Path) -> None:
    arguments = ("--source", "digits", "--out", str(tmp_path / "d"))
    assert run(*arguments).returncode == 0
    refused = run(*arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error[PREP004]")
    assert run(*arguments, "--overwrite").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--source", "owner/any", "--out", "d"], 75, "error[HUB003]: dataset 'owner/any'"),
        (["--source", "stdlib", "--out", "d", "--tokenizer", "owner/any"], 75, "error[HUB003]"),
        (["--source", "digits", "--out", "/dev/null/d"], 3, "error[DATA009]"),
        (["--source", "problems:sorted", "--out", "d"], 3, "copy, reverse, sort, max, sums, remainders"),
        (["--source", "problems:sort2", "--out", "d", "--chat"], 3, "error[DATA034]: tokenizer 'byte' has no chat"),
    ],
)
def test_prepare_with_an_error_prints_it_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], exit_code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.returncode == exit_code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "exit_code", "words"),
    [
        ("owner/gated", 4, "HF_TOKEN"),
        ("owner/private", 4, "HF_TOKEN"),
        ("owner/nothing", 3, "there is no dataset 'owner/nothing'"),
    ],
)
def test_prepare_from_a_hub_that_refuses_says_why(
    tmp_path: Path, endpoint: str, name: str, exit_code: int, words: str
) -> None:
    places = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}
    done = run("--source", name, "--out", str(tmp_path / "d"), **places)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
