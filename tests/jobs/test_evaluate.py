import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from hypha_ray.config.schema import Model
from hypha_ray.data.catalogue import load
from hypha_ray.data.manifest import Manifest, PreprocessorInfo
from hypha_ray.data.slices import Arrays, describe, write_slice
from hypha_ray.model.build import build_model
from tests.support.job_scripts import Done, Jobs
from tests.support.prepared import table
from tests.support.small_models import VIT

ROOT = Path(__file__).parents[2]
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 384}
Run = Callable[..., Done]


@pytest.fixture
def evaluate(run_job: Jobs) -> Run:
    return partial(run_job, script="evaluate")


def dataset(folder: Path, modality: str, *parts: tuple[str, Arrays]) -> Path:
    folder.mkdir()
    slices = tuple(write_slice(folder, index, split, arrays) for index, (split, arrays) in enumerate(parts))
    tensors = describe(parts[0][1], "slice")[1]
    Manifest(name=folder.name, modality=modality, slices=slices, tensors=tensors).save(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draws = np.random.default_rng(0)

    def part(samples: int) -> Arrays:
        ids = draws.integers(0, 300, size=(samples, 12))
        ids[0, :2] = 0, 299
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    folder = tmp_path_factory.mktemp("data") / "words"
    return dataset(folder, "language", ("train", part(4)), ("validation", part(7)), ("validation", part(6)))


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    build_model(Model(config=GPT2), seed=0).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return folder


def test_evaluate_language_model_prints_loss_perplexity_and_tokens(
    evaluate: Run, language_model: Path, text: Path
) -> None:
    done = evaluate("--model", language_model, "--dataset", text, "--batch-size", "4")
    assert done.returncode == 0, done.stderr
    *_, head, last = done.stdout.splitlines()
    assert head.startswith("GPT2LMHeadModel  causal-lm  words/validation")
    names, values = last.split()[::2], [float(value) for value in last.split()[1::2]]
    assert names == ["val_loss", "perplexity", "tokens"]
    assert values[2] == 13 * 11
    assert values[0] == pytest.approx(math.log(384), rel=0.05)
    assert values[1] == pytest.approx(math.exp(values[0]), rel=1e-4)


def test_evaluate_vision_model_as_json_has_accuracy(evaluate: Run, tmp_path: Path) -> None:
    network = build_model(Model(config=VIT, type="image-classification"), seed=0).eval()
    network.save_pretrained(tmp_path / "model")
    images = np.random.default_rng(0).random((20, 1, 8, 8), dtype=np.float32)
    with torch.no_grad():
        best = network(pixel_values=torch.tensor(images)).logits.argmax(-1).numpy()
    labels = np.where(np.arange(20) < 13, best, 9 - best)
    folder = dataset(tmp_path / "pictures", "vision", ("train", {"images": images, "labels": labels}))
    done = evaluate("--model", tmp_path / "model", "--dataset", folder, "--split", "train", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["accuracy"], result["samples"]) == (13 / 20, 20)
    assert result["val_loss"] == pytest.approx(math.log(10), rel=0.3)


def test_evaluate_split_that_is_not_there_is_one_line_and_an_exit_code(
    evaluate: Run, language_model: Path, text: Path
) -> None:
    done = evaluate("--model", language_model, "--dataset", text, "--split", "test")
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error[DATA051]: dataset 'words' has no such split — got test, allowed train, validation")


def test_evaluate_split_with_nothing_to_score_is_an_error(evaluate: Run, language_model: Path, tmp_path: Path) -> None:
    ids = np.ones((3, 8), np.int64)
    folder = dataset(tmp_path / "prompts", "language", ("validation", {"input_ids": ids, "labels": 0 * ids - 100}))
    done = evaluate("--model", language_model, "--dataset", folder, "--json")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error[DATA052]: nothing in prompts/validation can be scored")


def test_evaluate_prompts_that_are_no_labels_are_not_scored(
    evaluate: Run, language_model: Path, tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(0, 300, (5, 12))
    answers = {"input_ids": ids, "labels": np.where(np.arange(12) < 7, -100, ids)}
    folder = dataset(tmp_path / "answers", "language", ("validation", answers))
    done = evaluate("--model", language_model, "--dataset", folder, "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    network = build_model(Model(config=GPT2), seed=0).eval()
    with torch.no_grad():
        expected = network(input_ids=torch.tensor(ids), labels=torch.tensor(answers["labels"])).loss.item()
    assert result["tokens"] == 25
    assert result["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluate_refuses_sequences_beyond_the_models_positions(
    evaluate: Run, language_model: Path, tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(0, 300, size=(4, 17))
    folder = dataset(tmp_path / "long", "language", ("validation", {"input_ids": ids}))
    done = evaluate("--model", language_model, "--dataset", folder)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error[DATA024]: the sequences of dataset 'long' are too long for the model")
    assert "got 17 tokens, allowed up to 16" in done.stderr


@pytest.mark.parametrize(("scale", "names"), [(1e6, {"val_loss", "tokens"}), (math.nan, set())])
def test_evaluate_json_is_json_whatever_the_loss(
    evaluate: Run, scale: float, names: set[str], language_model: Path, text: Path, tmp_path: Path
) -> None:
    network = build_model(Model(config=GPT2), seed=0)
    with torch.no_grad():
        network.transformer.ln_f.weight.mul_(scale)
    network.save_pretrained(tmp_path)
    done = evaluate("--model", tmp_path, "--dataset", text, "--json")
    if names:
        assert set(json.loads(done.stdout.splitlines()[-1], parse_constant=pytest.fail)) == names
    else:
        assert done.returncode == 5
        assert done.stderr.startswith("error[MODEL018]: the model's loss isn't a finite number")


def test_evaluate_regression_has_no_accuracy(evaluate: Run, tmp_path: Path) -> None:
    config = {name: value for name, value in VIT.items() if name != "num_labels"} | {"num_labels": 1}
    network = build_model(Model(config=config, type="image-classification"), seed=0).eval()
    network.save_pretrained(tmp_path / "model")
    draws = np.random.default_rng(0)
    arrays = {"images": draws.random((9, 1, 8, 8), dtype=np.float32), "labels": draws.random(9, dtype=np.float32)}
    folder = dataset(tmp_path / "ages", "vision", ("validation", arrays))
    done = evaluate("--model", tmp_path / "model", "--dataset", folder, "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    with torch.no_grad():
        scores = network(pixel_values=torch.tensor(arrays["images"])).logits[:, 0].numpy()
    assert set(result) == {"val_loss", "samples"}
    assert result["val_loss"] == pytest.approx(float(((scores - arrays["labels"]) ** 2).mean()), rel=1e-5)


def test_evaluate_tokens_beyond_the_vocabulary_raise(evaluate: Run, text: Path, tmp_path: Path) -> None:
    build_model(Model(config=GPT2 | {"vocab_size": 256}), seed=0).save_pretrained(tmp_path)
    done = evaluate("--model", tmp_path, "--dataset", text)
    assert done.returncode == 3
    assert "vocabulary is too small" in done.stderr


def test_evaluate_refuses_a_dataset_whose_numbers_are_other_tokens(evaluate: Run, text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "swapped")
    for folder, words in (("model", {"a": 0, "b": 1}), ("swapped/tokenizer", {"b": 0, "a": 1})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": words}}))
    (tmp_path / "model" / "config.json").write_text("{}")
    made_by = PreprocessorInfo("words", folder="tokenizer", vocab_size=2)
    load(text).model_copy(update={"preprocessor": made_by}).save(tmp_path / "swapped")

    done = evaluate("--model", tmp_path / "model", "--dataset", tmp_path / "swapped")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error[DATA023]: the numbers in dataset 'words' are other tokens than the model's")


RECALL = """task: recall
dataset_path: json
dataset_kwargs: {data_files: {test: data/capitals.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{' ' + choices[answer]}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
"""


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is an extra")
def test_evaluate_on_tasks_of_lm_eval_gives_the_figures_of_plain_transformers(
    evaluate: Run, language_model: Path, tmp_path: Path
) -> None:
    """One of the tasks is that of a page, which is told to keep its cache here."""
    draws, rows = np.random.default_rng(2), []
    for size in draws.integers(1, 5, 24):
        words = ["".join(draws.choice(list("abcdefgh"), 3 + size)) for _ in range(2)]
        rows.append({"question": "xyz"[:size], "choices": words, "answer": int(draws.integers(2))})
    table(tmp_path / "capitals.jsonl", *rows)
    page = (ROOT / "docs/quickstart.md").read_text()
    for task in (re.findall(r"(?s)```yaml\n(task: .*?)```", page)[0], RECALL):
        kept = task.replace("dataset_kwargs: {", f"dataset_kwargs: {{cache_dir: {tmp_path}, ")
        text = kept.replace("data/capitals.jsonl", str(tmp_path / "capitals.jsonl"))
        (tmp_path / f"{task.split()[1]}.yaml").write_text(text)
    given = ("--lm-eval", "capitals", "recall", "--include-path", tmp_path)
    done = evaluate("--model", language_model, *given, "--batch-size", "5", "--json")
    assert done.returncode == 0, done.stderr
    network, tokenizer = AutoModelForCausalLM.from_pretrained(language_model).eval(), ByT5Tokenizer()

    def likelihood(row: dict[str, str], word: str) -> float:
        first = len(row["question"])
        ids = torch.tensor([tokenizer.encode(f"{row['question']} {word}", add_special_tokens=False)])
        with torch.no_grad():
            logs = network(ids).logits.log_softmax(-1)
        return sum(logs[0, place - 1, ids[0, place]].item() for place in range(first, ids.shape[1]))

    scores = [[likelihood(row, word) for word in row["choices"]] for row in rows]
    right = [one.index(max(one)) == row["answer"] for one, row in zip(scores, rows, strict=True)]
    assert 0 < sum(right) < 24
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["capitals/acc"] == pytest.approx(sum(right) / 24)
    mean = sum(one[row["answer"]] for one, row in zip(scores, rows, strict=True)) / 24
    assert math.log(result["recall/perplexity"]) == pytest.approx(-mean, rel=1e-5)
