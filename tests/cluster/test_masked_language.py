"""Masked language models with a tokenizer of their own: one loss, whoever evaluates, in the run and afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import BertTokenizerFast

from hypha_ray.data.catalogue import load
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import read_slice
from hypha_ray.model.metrics import batches_of, evaluate
from hypha_ray.model.saved_model import open_saved
from tests.cluster.test_bridged import awaiting, dialled
from tests.support.jobs import Outcome, job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

WORDS = [f"word{number}" for number in range(90)]
BERT = {
    "model_type": "bert",
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
TABLES = {
    "model": {"config": BERT, "type": "masked-lm"},
    "rounds": {"update_rounds": 3, "samples_between_updates": 64, "max_batch_size": 4},
    "inner_optimizer": {"learning_rate": 3e-3},
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of made-up words with a WordPiece tokenizer beside it, the only one that knows the mask token."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "."]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(60):
        line = " ".join(WORDS[(7 * number + 3 * place * place) % 90] for place in range(40))
        (texts / f"{number}.txt").write_text(line)
    options = PrepareOptions(
        str(texts / "*.txt"),
        folder / "data",
        tokenizer=str(folder / "tokenizer"),
        seq_len=16,
        samples_per_slice=20,
        validation_samples=24,
    )
    prepare(options, lambda what, count: None)
    return folder / "data"


def scored_again(outcome: Outcome, dataset: Path) -> tuple[float, int]:
    """Loss and count of the exported model, as `jobs/evaluate.py` computes them."""
    network, task = open_saved(outcome.directory / "model")
    manifest = load(dataset)
    infos = manifest.of("validation")
    slices = [read_slice(dataset, info, manifest) for info in infos]
    sums = evaluate(network, task, batches_of(slices, 5, [info.index for info in infos]), "cpu")
    loss_sum, count = sums["val_loss"]
    return loss_sum / count, int(count)


def test_masked_language_model_has_one_loss_in_the_run_and_afterwards(words: Path, tmp_path: Path) -> None:
    outcome = run_job(job_of("bert", words, **TABLES), tmp_path, words, export=True)
    last = outcome.of_kind("eval")[-1]
    assert (last["val_loss"], last["count"]) == pytest.approx(scored_again(outcome, words), rel=1e-5)


@pytest.mark.long
def test_worker_from_elsewhere_hides_the_same_tokens(words: Path, tmp_path: Path) -> None:
    job = awaiting("bert-elsewhere", words, tmp_path, **TABLES)
    with dialled(tmp_path / "bert-elsewhere" / "bridge"):
        outcome = run_job(job, tmp_path, words, export=True)
    # Rounds of 64 samples are short: one may be planned without the worker that was slow in its first batch.
    assert {delta["worker"] for commit in outcome.commits() for delta in commit["deltas"]} == {0, 1}
    last = outcome.of_kind("eval")[-1]
    assert (last["val_loss"], last["count"]) == pytest.approx(scored_again(outcome, words), rel=1e-5)
