"""Every command of the README and of docs/, run as it is written, on files of the names that it has."""

from __future__ import annotations

import argparse
import csv
import inspect
import os
import random
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile
from transformers import Wav2Vec2FeatureExtractor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hypha_ray.config.schema import Model
from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.model.build import build_model
from tests.support.download_hub import serve_repositories
from tests.support.forked_process import ROOT
from tests.support.forked_workers import AT_START
from tests.support.head_node import head_node
from tests.support.job_scripts import Done, jobs_in
from tests.support.light_commands import Ended, LightCommands, light_commands
from tests.support.prepared import CHATML, table

pytestmark = pytest.mark.timeout(900)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?sm)^```(\w*)\n(.*?)^```$")
COMMAND = re.compile(r"(python|ray|make|pip|hypha-ray|source|export|docker) .*")
ELSEWHERE = {
    r"source \.venv/bin/activate|export RAY_AUTH_MODE=token": "the environment of every test",
    r"make demo.*|ray job submit .*|python -c \"from ray.job_submission.*": "tests/jobs/test_demo.py",
    r"make (setup|check|lint|test).*": "what checks each change calls",
    r"ray start .*": "tests/jobs/conftest.py, tests/cluster/test_market.py and test_nodes.py",
    r"python jobs/diloco\.py @ job\.toml( --dry-run)?": "README.md, whose file asks for GPUs; see docs/quickstart.md",
    r"python jobs/diloco\.py (\[@ FILE|@ base\.toml).*": "the grammar of a command line: tests/unit/config",
    r"python jobs/worker\.py --connect .*": "tests/jobs/test_early_refusals.py",
    r"python jobs/chaos\.py .*": "tests/jobs/test_chaos.py, with fewer rounds",
    r"python jobs/bench\.py .*": "tests/unit/jobs",
    r"python jobs/simulate\.py --scenario deadline --days .*": "tests/unit/simulation/test_goal_days.py",
    r"python tests/support/prose\.py .*": "tests/unit/house",
    r"python jobs/(grpo|ppo)\.py .*": "tests/jobs/test_grpo.py and test_ppo.py",
    r"python calls\.py|python jobs/\w+\.py .*data/calculator.*": "tests/jobs/test_tool_use.py",
    r"python jobs/(dpo|prepare)\.py .*data/preferences.*": "tests/jobs/test_dpo.py",
    r"python jobs/evaluate\.py .*--lm-eval .*": "tests/jobs/test_evaluate.py, with a task of the page",
    r"python jobs/(compare|configs|explain|report|runs|show)\.py.*": "tests/jobs/test_looking.py",
    r"python jobs/doctor\.py.*": "tests/cluster/test_nodes.py, tests/unit/driver/test_doctor.py",
    r"python jobs/rerun\.py .*": "tests/jobs/test_plugins.py, and refusals in tests/unit/driver/test_rerun.py",
    r"python jobs/simulate\.py --from .*": "tests/jobs/test_looking.py, from a recorded run",
    r"source <\(hypha-ray --completion bash\)|hypha-ray --completion .*": "tests/unit/history/test_completion.py",
    r"python -m venv ~/mlflow": "beside a checkout, by hand: MLflow's pages need packages that CI doesn't install",
    r"python jobs/prepare\.py .*--nodes 4.*": "tests/jobs/test_data.py",
    r"python jobs/\w+\.py .*(s3://|https://host).*": "tests/jobs/test_data.py and tests/unit/data/test_urls.py",
}
"""Commands that aren't run here, and where they are."""
ALWAYS_ELSEWHERE = [pattern for pattern in ELSEWHERE if "job\\.toml( " not in pattern]
FEWER = {
    "jobs/configs/chat.toml": "2",
    "jobs/configs/grpo-tiny.toml": "10",
    "job.toml --dataset.name texts": "3",
}
"""Rounds of trainings that take long, by a part of their command. Whether they learn is seen by tests of their kind."""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TOKENIZERS = (
    "gpt2",
    "google-bert/bert-base-uncased",
    "google-bert/bert-base-cased",
    "google-t5/t5-small",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
)
FROM_HUB = (*TOKENIZERS, "google/vit", "facebook/wav2vec2", "Salesforce/wikitext", "eriktks/conll2003", "chat.toml")
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()


def commands_of(page: Path) -> list[str]:
    """Commands in the fenced blocks of a page, continued lines joined."""
    blocks = [block for language, block in BLOCK.findall(page.read_text()) if not language]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if COMMAND.fullmatch(line.strip())]


def runs_here(page: Path, command: str) -> bool:
    patterns = ELSEWHERE if page.name == "README.md" else ALWAYS_ELSEWHERE
    return not any(re.fullmatch(pattern, command) for pattern in patterns)


RUN = {page: found for page in PAGES if (found := [one for one in commands_of(page) if runs_here(page, one)])}


def test_every_command_is_run_here_or_elsewhere() -> None:
    everything = [command for page in PAGES for command in commands_of(page)]
    assert all(command.startswith("python jobs/") for commands in RUN.values() for command in commands)
    assert [one for one in ELSEWHERE if not any(re.fullmatch(one, command) for command in everything)] == []
    assert len(everything) > 50


@pytest.fixture(scope="module")
def hub_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightCommands]:
    """Runs commands with a hub which has all names of the pages, as small models and datasets."""
    folder = tmp_path_factory.mktemp("hub")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    for name in TOKENIZERS:
        tokenizer.save_pretrained(folder / "models" / name)
    build_model(Model(config=LLAMA), seed=0).save_pretrained(folder / "models/HuggingFaceTB/SmolLM2-135M-Instruct")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(
        folder / "models/google/vit-base-patch16-224-in21k"
    )
    Wav2Vec2FeatureExtractor(sampling_rate=800).save_pretrained(folder / "models/facebook/wav2vec2-base")
    dataset(folder, "Salesforce/wikitext", "wikitext-103-raw-v1", {"text": [f"Article {n}. " * 9 for n in range(90)]})
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    rows = {"tokens": [["Ann", str(n)] for n in range(90)], "ner_tags": [[1, 0]] * 90}
    dataset(
        folder, "eriktks/conll2003", "default", rows, tokens=datasets.Sequence(datasets.Value("string")), ner_tags=tags
    )
    variables = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path_factory.mktemp("cache"))}
    variables["PYTHONPATH"] = os.pathsep.join([str(AT_START), str(ROOT)])
    with (
        serve_repositories(folder) as url,
        light_commands("tests.support.libraries_with_ray", HF_ENDPOINT=url, **variables) as run,
    ):
        yield run


def dataset(folder: Path, name: str, part: str, rows: dict[str, list[object]], **features: object) -> None:
    place = folder / "datasets" / name
    place.mkdir(parents=True)
    known = datasets.Features(features) if features else None
    datasets.Dataset.from_dict(rows, features=known).to_parquet(place / part / "train-00000.parquet")
    files = f"  data_files:\n  - split: train\n    path: {part}/train-*\n"
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: {part}\n{files}---\n")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    folder, draw = tmp_path_factory.mktemp("inputs"), random.Random(0)
    (folder / "jobs").symlink_to(ROOT / "jobs")
    (folder / "texts").mkdir()
    code = inspect.getsource(argparse)
    for start in range(0, len(code), 2000):
        (folder / "texts" / f"{start}.txt").write_text(code[start : start + 2000])
    job = re.search(r'(?s)```toml\n(\[model\]\ntype = "causal-lm".*?)```', QUICKSTART)
    assert job is not None
    (folder / "job.toml").write_text(job[1].replace("samples_between_updates = 1024", "samples_between_updates = 64"))
    scenario = re.search(r"(?s)```toml\n(.*?)```", (ROOT / "docs/simulation.md").read_text())
    assert scenario is not None
    (folder / "scenario.toml").write_text(scenario[1])
    byte_tokenizer().save_pretrained(folder / "my-tokenizer")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "my-vit")
    table(folder / "rows.jsonl", *({"body": f"Row {n} of many. " * 9} for n in range(90)))
    turns = (
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
        for n in range(500)
    )
    table(folder / "chats.jsonl", *turns)
    table(folder / "gsm8k.jsonl", *({"question": f"{n} + 1?", "answer": f"So #### {n + 1}"} for n in range(90)))
    sheet(folder / "reviews.csv", ("review", "sentiment"), [(f"review {n}", ["good", "bad"][n % 2]) for n in range(90)])
    sheet(folder / "translations.csv", ("en", "de"), [(f"{n} trees", f"{n} Bäume") for n in range(90)])
    for name in ("rose", "tulip"):
        (folder / "flowers" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "flowers" / name / f"{number}.png")
    photos = [(f"flowers/rose/{n}.png", ["dog", "cat"][n % 2]) for n in range(20)]
    sheet(folder / "photos.csv", ("file", "species"), photos)
    for name in ("yes", "no"):
        (folder / "commands" / name).mkdir(parents=True)
        for number in range(20):
            wave = np.array([draw.uniform(-1, 1) for _ in range(400)], np.float32)
            wavfile.write(folder / "commands" / name / f"{number}.wav", 800, wave)
    return folder


def sheet(path: Path, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
@pytest.mark.long(keep=2)
def test_commands_of_a_page_do_what_they_are_written_for(
    page: Path, inputs: Path, hub_command: LightCommands, head: str, tmp_path: Path
) -> None:
    for item in inputs.iterdir():
        (tmp_path / item.name).symlink_to(item)
    cluster = head_node() if page.name == "market.md" else nullcontext(head)  # The page changes owners' terms.
    plots = page.name == "quickstart.md"  # Pages of one kind of training have the same plots.
    with cluster as address, jobs_in(tmp_path / "hypha_ray", tmp_path, address, plots) as run_job:
        if page.name == "data.md":
            job = (inputs / "job.toml").read_text()
            (tmp_path / "texts").rename(tmp_path / "my-texts")  # The name is the dataset's on this page.
            (tmp_path / "job.toml").unlink()
            (tmp_path / "job.toml").write_text(job.replace('path = "data/texts"', ""))
            texts = ("--source", "my-texts", "--seq-len", "128", "--out", "hypha_ray/datasets/texts")
            assert run_job(*texts, script="prepare").returncode == 0
        trained = ""
        done: Done | Ended
        for command in RUN[page]:
            filled = command.replace("--source DIR", "--source my-texts").replace("DIR", trained)
            _, script, *words = shlex.split(filled.replace("~/", f"{tmp_path}/"), comments=True)
            for part, rounds in FEWER.items():
                words += ["--rounds.update_rounds", rounds] if part in command else []
            if any(name in command for name in FROM_HUB):
                done = hub_command(Path(script).stem, *words, cwd=tmp_path, **run_job.variables)
                run_job.require_none_left()
            else:
                done = run_job(*words, script=Path(script).stem)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            trained = next(reversed(re.findall(r"(?m)^run: (.*)$", done.stdout)), trained)
