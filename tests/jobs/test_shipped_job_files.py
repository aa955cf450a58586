"""Job files for machines with GPUs, run on CPUs: as they are, but for a small model, a small dataset and few rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hypha_ray.config.schema import Model
from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.model.build import build_model
from tests.support.forked_process import ROOT
from tests.support.job_scripts import Jobs
from tests.support.prepared import CHATML, arrays_of, prepared, table

SMALL = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SOON = ("--inner_optimizer.learning_rate", "1e-2", "--inner_optimizer.warmup_steps", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for chats, with its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    config = {"model_type": "llama", **SMALL, "num_hidden_layers": 1, "pad_token_id": 0}
    build_model(Model(config=config), seed=0).save_pretrained(folder)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def chats(model: Path, folder: Path, **options: object) -> Path:
    """A prepared dataset of 200 chats of two turns."""
    roles = ("user", "assistant") * 2
    turns = ((f"{n}?", "yes", f"{n + 1}?", "no") for n in range(200))
    rows = ([{"role": role, "content": text} for role, text in zip(roles, chat, strict=True)] for chat in turns)
    source = table(folder / "chats.jsonl", *({"messages": row} for row in rows))
    prepared(source, folder / "data", chat=True, tokenizer=str(model), **options)
    return folder / "data"


def run_file(run_job: Jobs, name: str, *arguments: str | Path, rounds: int, samples: int) -> Path:
    """Run a job file with further flags; its directory."""
    size = ("--rounds.update_rounds", str(rounds), "--rounds.samples_between_updates", str(samples))
    lines = (ROOT / f"jobs/configs/{name}.toml").read_text().splitlines(keepends=True)
    file = run_job.home.parent / f"{name}.toml"
    file.write_text("".join(line for line in lines if not line.startswith("gpu_type")))  # A machine with CPUs has none.
    done = run_job("@", file, *size, *SOON, *arguments)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1].removeprefix("run: "))


def logged(run: Path) -> list[float]:
    """Losses of the evaluations."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["val_loss"] for record in records if record["kind"] == "eval"]


def plain_loss(network: torch.nn.Module, data: Path) -> float:
    """Loss of the validation samples in one batch, as transformers has it."""
    batch = {name: torch.from_numpy(array).long() for name, array in arrays_of(data, "validation").items()}
    with torch.no_grad():
        return float(network.eval()(**batch).loss)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it.
def test_chats_by_an_adapter_on_four_machines(run_job: Jobs, model: Path, tmp_path: Path) -> None:
    data = chats(model, tmp_path)
    where = ("--model.repository", model, "--dataset.path", data, "--resources.worker.gpu", "0")
    run = run_file(run_job, "chat-lora", *where, rounds=2, samples=160)
    base = AutoModelForCausalLM.from_pretrained(model)
    before = plain_loss(base, data)
    merged = plain_loss(AutoModelForCausalLM.from_pretrained(run / "model"), data)
    assert merged < before - 0.1
    adapted = PeftModel.from_pretrained(base, run / "model" / "adapter")
    assert merged == pytest.approx(plain_loss(adapted, data), rel=1e-5)


def test_packed_chats_by_all_weights_on_two_machines_of_several_processes(
    run_job: Jobs, model: Path, tmp_path: Path
) -> None:
    data = chats(model, tmp_path, pack=True, seq_len=256)
    where = ("--model.repository", model, "--dataset.path", data, "--rounds.max_batch_size", "8")
    machines = ("--resources.worker.gpu", "0", "--resources.worker.cpu", "2", "--worker.processes", "2")
    run = run_file(run_job, "chat-full", *where, *machines, rounds=4, samples=160)
    before = plain_loss(AutoModelForCausalLM.from_pretrained(model), data)
    assert plain_loss(AutoModelForCausalLM.from_pretrained(run / "model"), data) < 0.5 * before


@pytest.mark.parametrize("name", ["pretrain", "regions"])
@pytest.mark.long(keep=1)
def test_texts_from_random_weights(run_job: Jobs, name: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text(Path(__file__).read_text() * 4)
    prepared(tmp_path / "texts.txt", tmp_path / "data", seq_len=32)
    sizes = [word for key, value in SMALL.items() for word in (f"--model.config.{key}", str(value))]
    where = ("--dataset.path", tmp_path / "data", *sizes)
    machines: tuple[str, ...] = ("--resources.worker.gpu", "0", "--resources.num_workers", "3")
    if name == "regions":
        group = (("count", "1"), ("gpu", "0"))
        machines = tuple(word for n in range(3) for key, value in group for word in (f"--workers.{n}.{key}", value))
        machines += ("--sync.quorum", "3")
    few = ("--resources.min_workers", "2")
    run = run_file(run_job, name, *where, *machines, *few, rounds=8, samples=96)
    losses = logged(run)
    assert losses[-1] < losses[0]
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.hidden_size == 32
