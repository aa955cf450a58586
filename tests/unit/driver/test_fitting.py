"""Datasets and models that don't fit are refused before anything starts; their classes may be in any order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from hypha_ray.config import Job
from hypha_ray.config.training import InnerOptimizer
from hypha_ray.data.manifest import Manifest
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.dataset_settings import by_number, relabelled, require_fitting_labels, with_classes
from hypha_ray.driver.preflight.compatibility import CHECKS, Case
from hypha_ray.errors import DataError, HyphaError
from hypha_ray.model.build import build_model, describe, skeleton, task_of
from hypha_ray.model.checks import max_positions
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks import find_task
from tests.support.prepared import arrays_of, prepared, table
from tests.support.small_models import RESNET
from tests.support.truth_cases import ACCEPTED

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART = {"model_type": "bart", "d_model": 8, "vocab_size": 64, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, **LAYERS}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 24, "vocab_size": 64}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, **SMALL, "max_position_embeddings": 24}
BERT = {"model_type": "bert", **SMALL, "max_position_embeddings": 24}
T5 = {"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
LIMITS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "gpt2": (GPT2, "causal-lm", 24),
    "gpt_neo": (
        {
            "model_type": "gpt_neo",
            "hidden_size": 8,
            "num_layers": 1,
            "num_heads": 2,
            "vocab_size": 64,
            "attention_types": [[["global"], 1]],
            "max_position_embeddings": 24,
        },
        "causal-lm",
        24,
    ),
    "gptj": (GPT2 | {"model_type": "gptj", "rotary_dim": 4}, "causal-lm", 24),
    "opt": (
        {"model_type": "opt", **SMALL, "ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 24}
        | {"intermediate_size": None},
        "causal-lm",
        24,
    ),
    "llama": (LLAMA, "causal-lm", None),
    "bert": (BERT, "masked-lm", 24),
    "roberta": (BERT | {"model_type": "roberta"}, "masked-lm", 22),
    "mpnet": (BERT | {"model_type": "mpnet"}, "masked-lm", 22),
    "distilbert": (
        {"model_type": "distilbert", "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "vocab_size": 64}
        | {"max_position_embeddings": 24},
        "masked-lm",
        24,
    ),
    "bart": (BART | {"max_position_embeddings": 24}, "seq2seq-lm", 24),
    "t5": (T5 | {"decoder_start_token_id": 0}, "seq2seq-lm", None),
}


@pytest.mark.parametrize("family", LIMITS)
def test_limit_of_positions_is_where_the_model_itself_fails(family: str) -> None:
    settings, task, limit = LIMITS[family]
    config = {name: value for name, value in settings.items() if value is not None}
    network = build_model(Job.model_validate({"model": {"config": config, "type": task}}).model, seed=0).eval()
    assert max_positions(network, decoder=False) == limit

    def forward(length: int) -> None:
        ids = torch.full((1, length), 7)
        with torch.no_grad():
            network(input_ids=ids, **({"labels": ids[:, :4]} if task == "seq2seq-lm" else {}))

    forward(limit or 60)
    if limit is not None:
        with pytest.raises((IndexError, RuntimeError)):
            forward(limit + 1)


def case_of(folder: Path, config: dict[str, Any], task: str, /, processes: int = 1, **arrays: np.ndarray) -> Case:
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "slice.safetensors")
    job = Job.model_validate({"model": {"config": config, "type": task}, "worker": {"processes": processes}})
    network, found = skeleton(job.model), find_task(task)
    return Case(job, in_folder(folder), network, found, describe(network, found))


def refusal(case: Case) -> HyphaError | None:
    try:
        for check in CHECKS:
            check(case)
    except HyphaError as error:
        assert error.exit_code in (2, 3) and "\n" not in str(error)
        return error
    return None


def ids(length: int = 8, largest: int = 63, dtype: type = np.int64) -> np.ndarray:
    tokens = np.arange(4 * length).reshape(4, length) % 50
    tokens[0, 0] = largest
    return tokens.astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_ids_of_any_width_are_held_against_the_vocabulary(tmp_path: Path, dtype: type) -> None:
    assert refusal(case_of(tmp_path, GPT2, "causal-lm", input_ids=ids(dtype=dtype))) is None
    error = refusal(case_of(tmp_path / "more", GPT2, "causal-lm", input_ids=ids(largest=64, dtype=dtype)))
    assert error is not None and error.code == "DATA023" and "input_ids up to 64" in str(error)


@pytest.mark.parametrize(("family", "length", "fits"), [
    ("gpt2", 24, True), ("gpt2", 25, False), ("roberta", 22, True), ("roberta", 23, False), ("llama", 60, True),
    ("bart", 24, True), ("bart", 25, False), ("t5", 60, True),
])  # fmt: skip
def test_sequences_longer_than_the_positions_are_refused(tmp_path: Path, family: str, length: int, fits: bool) -> None:
    config, task, _ = LIMITS[family]
    labels = {"labels": ids(4)} if task == "seq2seq-lm" else {}
    error = refusal(case_of(tmp_path, config, task, input_ids=ids(length), **labels))
    assert (error is None) == fits
    assert error is None or error.code == "DATA024"


def test_labels_longer_than_the_decoders_positions_are_refused(tmp_path: Path) -> None:
    config = BART | {"max_position_embeddings": 24}
    error = refusal(case_of(tmp_path, config, "seq2seq-lm", input_ids=ids(), labels=ids(25)))
    assert error is not None and error.code == "DATA024" and "got 25 tokens, allowed up to 24" in str(error)


@pytest.mark.parametrize(
    ("labels", "fits"),
    [
        ([0, 1, 2, 2], True),
        ([0, 1, 2, 3], False),
        ([0, 1, 2, -1], False),
        ([0, 1, -100, 2], True),
        ([-100, -1, 0, 1], False),
        ([-101, 0, 1, 2], False),
    ],
)
@pytest.mark.parametrize("dtype", [np.int8, np.int64])
def test_labels_outside_of_the_classes_are_refused(tmp_path: Path, labels: list[int], fits: bool, dtype: type) -> None:
    config = BERT | {"num_labels": 3}
    case = case_of(tmp_path, config, "sequence-classification", input_ids=ids(), labels=np.array(labels, dtype))
    error = refusal(case)
    assert (error is None) == fits
    assert error is None or (error.code == "DATA023" and "labels" in str(error))


@pytest.mark.parametrize("number", [64, -1])
def test_labels_of_a_translation_outside_of_the_vocabulary_are_refused(tmp_path: Path, number: int) -> None:
    labels = ids(4)
    labels[2, 2] = number
    config = T5 | {"decoder_start_token_id": 0}
    error = refusal(case_of(tmp_path, config, "seq2seq-lm", input_ids=ids(), labels=labels))
    assert error is not None and error.code == "DATA023"


@pytest.mark.parametrize(("number", "fits"), [(2, True), (3, False)])
def test_label_of_a_multiple_choice_is_one_of_its_choices(tmp_path: Path, number: int, fits: bool) -> None:
    choices, labels = np.stack([ids()] * 3, axis=1), np.array([0, 1, number, 0])
    error = refusal(case_of(tmp_path, BERT, "multiple-choice", input_ids=choices, labels=labels))
    assert (error is None) == fits
    assert error is None or error.code == "DATA023"


def test_regression_takes_whole_numbers_below_zero(tmp_path: Path) -> None:
    config = BERT | {"num_labels": 1}
    labels = np.array([-7, 3, 0, 99])
    assert refusal(case_of(tmp_path, config, "sequence-classification", input_ids=ids(), labels=labels)) is None


def test_token_types_beyond_the_models_are_refused(tmp_path: Path) -> None:
    types = np.zeros((4, 8), np.int64)
    types[1] = 2
    error = refusal(case_of(tmp_path, BERT, "masked-lm", input_ids=ids(), token_type_ids=types))
    assert error is not None and error.code == "DATA023" and "token_type_ids" in str(error)


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_decoder_that_classifies_needs_to_know_what_padding_is(tmp_path: Path, config: dict[str, Any]) -> None:
    labels = np.array([0, 1, 1, 0])
    case = case_of(tmp_path, config, "sequence-classification", input_ids=ids(), labels=labels)
    error = refusal(case)
    assert error is not None and error.code == "MODEL018" and "pad_token_id" in str(error) and error.exit_code == 2
    known = config | {"pad_token_id": 0}
    assert refusal(case_of(tmp_path, known, "sequence-classification", input_ids=ids(), labels=labels)) is None


def test_translation_needs_a_token_to_start_with(tmp_path: Path) -> None:
    error = refusal(case_of(tmp_path, T5, "seq2seq-lm", input_ids=ids(), labels=ids(4)))
    assert error is not None and error.code == "MODEL018" and "decoder_start_token_id" in str(error)
    assert refusal(case_of(tmp_path, BART, "seq2seq-lm", input_ids=ids(), labels=ids(4))) is None


def test_images_with_other_channels_are_refused(tmp_path: Path) -> None:
    images, labels = np.zeros((4, 3, 8, 8), np.float32), np.array([0, 1, 2, 0])
    error = refusal(case_of(tmp_path, RESNET, "image-classification", images=images, labels=labels))
    assert error is not None and error.code == "DATA025"


VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
VIT |= {name: size for name, size in SMALL.items() if name != "vocab_size"}


@pytest.mark.parametrize(
    ("config", "side", "fits"), [(VIT, 8, True), (VIT, 9, False), (RESNET, 9, True), (RESNET, 8, True)]
)
def test_images_of_another_size_are_refused_by_models_that_want_one(
    tmp_path: Path, config: dict[str, Any], side: int, fits: bool
) -> None:
    images, labels = np.zeros((4, 1, side, side), np.float32), np.array([0, 1, 2, 0])
    error = refusal(case_of(tmp_path, config, "image-classification", images=images, labels=labels))
    assert (error is None) == fits
    assert error is None or error.code == "DATA025"


def test_statistics_of_a_batch_are_refused_in_workers_of_several_processes(tmp_path: Path) -> None:
    arrays = {"images": np.zeros((4, 1, 8, 8), np.float32), "labels": np.array([0, 1, 2, 0])}
    error = refusal(case_of(tmp_path, RESNET, "image-classification", processes=2, **arrays))
    assert error is not None and error.code == "MODEL021" and "ResNetForImageClassification normalises" in str(error)
    assert refusal(case_of(tmp_path, RESNET, "image-classification", **arrays)) is None
    assert refusal(case_of(tmp_path, VIT, "image-classification", processes=2, **arrays)) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_rounding_is_refused_for_weights_of_any_other_dtype(tmp_path: Path, dtype: str) -> None:
    case = case_of(tmp_path, GPT2 | {"dtype": dtype}, "causal-lm", input_ids=ids())
    rounds = case.job.model_copy(update={"inner_optimizer": InnerOptimizer(stochastic_rounding=True)})
    error = refusal(replace(case, job=rounds))
    assert refusal(case) is None and (error is None) == (dtype == "bfloat16")
    assert error is None or (error.code == "OPT008" and f"got {dtype}, allowed bfloat16" in str(error))


@pytest.mark.slow
def test_loss_over_objects_is_refused_in_workers_of_several_processes(tmp_path: Path) -> None:
    case = next(case for case in ACCEPTED if case.task == "instance-segmentation")
    config = {"model_type": case.model_type, **case.config}
    error = refusal(case_of(tmp_path, config, case.task, processes=2, **case.arrays))
    assert error is not None and error.code == "MODEL021" and "counts objects" in str(error)
    assert refusal(case_of(tmp_path, config, case.task, **case.arrays)) is None


@pytest.mark.parametrize(
    ("model", "task", "rl", "code"),
    [
        ("vit", "image-classification", {}, r"DATA050.*lack the tensor 'images', which image-classification"),
        ("bert", "sequence-classification", {}, r"DATA050.*has labels of tokens"),
        ("llama", "causal-lm", {"algorithm": "grpo"}, r"RL002.*has no prompts"),
    ],
)
def test_dataset_of_another_kind_is_told_as_one_and_not_by_its_numbers(
    tmp_path: Path, model: str, task: str, rl: dict[str, Any], code: str
) -> None:
    """Labels of chats are tokens, which are larger than the number of classes of any model."""
    config = {
        "vit": {"model_type": "vit", "hidden_size": 8, "num_attention_heads": 2},
        "bert": BERT,
        "llama": LLAMA | {"vocab_size": 32},
    }[model]
    tokens = ids()
    case = case_of(tmp_path, config, task, input_ids=tokens, labels=tokens)
    job = Job.model_validate(case.job.model_dump() | {"rl": rl})
    assert re.search(code, str(refusal(replace(case, job=job))))


def run(source: Path, out: Path) -> Manifest:
    return prepared(source, out, label_column="label", validation_fraction=0.0)


def test_classes_take_the_place_of_what_a_repository_was_made_for(tmp_path: Path) -> None:
    """A model of scores, and one of several classes at once, become one of a class: transformers infers nothing."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    manifest = run(table(tmp_path / "a.jsonl", *({"text": name, "label": name} for name in "abc")), tmp_path / "out")
    for number, former in enumerate(("regression", "multi_label_classification")):
        config = BertConfig(vocab_size=32, num_labels=1 + number * 2, problem_type=former, **sizes)
        BertForSequenceClassification(config).save_pretrained(tmp_path / former)
        job = Job.model_validate({"model": {"repository": str(tmp_path / former), "type": "text-classification"}})
        model = with_classes(job, manifest).model
        network = build_model(model, 0).eval().requires_grad_(False)
        ids, labels = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 0])
        task, inputs = task_of(model, network), {"input_ids": ids, "labels": labels}
        found = compute_losses(task, network, task.inputs(inputs)).reported
        assert float(found) == pytest.approx(float(cross_entropy(network(ids).logits, labels)), abs=1e-6)
        assert task.classifies


def test_labels_of_another_file_are_those_of_the_model_by_name(tmp_path: Path) -> None:
    """A file with two of a model's three classes has other numbers for them; names that a model lacks are refused."""
    trained = {0: "bad", 1: "fair", 2: "good"}
    task = replace(find_task("text-classification"), labels="samples")

    def found(*labels: Any, names: dict[int, str] = trained) -> Any:
        rows = [{"text": f"{n}", "label": label} for n, label in enumerate(labels)]
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        manifest = run(table(tmp_path / "a.jsonl", *rows), out)
        (arrays,) = relabelled([arrays_of(out)], manifest, task, names)
        texts = arrays["input_ids"][:, 0] - 3 - ord("0")
        return arrays["labels"][np.argsort(texts)].tolist()

    assert found("bad", "good", "bad") == [0, 2, 0]
    assert found(["good"], ["bad", "good"]) == [[0, 0, 1], [1, 0, 1]]
    assert found("x", "y") == [0, 1]  # No names in common: they say nothing, and a note says so.
    manifest = run(table(tmp_path / "a.jsonl", *({"text": name, "label": name} for name in "xy")), tmp_path / "xy")
    assert str(by_number(manifest, task, trained)).endswith("so classes go by number: x = bad, y = fair")
    assert by_number(manifest, task, {0: "y", 1: "z"}) is None
    assert found("good", "bad", names={0: "good", 1: "bad"}) == [0, 1]
    with pytest.raises(DataError, match="lacks classes") as caught:
        found("bad", "worse")
    assert (caught.value.code, caught.value.got) == ("DATA023", "worse")


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (("bad", "good"), {}),
        ((["bad"], ["bad", "good"]), {}),
        ((0.5, 1.5), {"regression": True}),
        ((["x", "y"], ["y", "x"]), {"text_column": "words"}),
    ],
    ids=["class", "several", "number", "tokens"],
)
def test_labels_of_another_kind_than_the_model_predicts_are_refused(
    tmp_path: Path, labels: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Transformers broadcasts numbers against classes, or takes the number of a class for a value, without an error."""
    rows = [{"text": f"{n}", "words": ["a", "b"], "label": label} for n, label in enumerate(labels)]
    source = table(tmp_path / "a.jsonl", *rows)
    manifest = prepared(source, tmp_path / "out", label_column="label", validation_fraction=0.0, **options)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    refusals = []
    for kind, classes, problem in (
        ("text-classification", 2, "single_label_classification"),
        ("text-classification", 2, "multi_label_classification"),
        ("text-classification", 1, None),
        ("token-classification", 2, None),
    ):
        config = {"model_type": "bert", "vocab_size": 400, "num_labels": classes, "problem_type": problem, **sizes}
        model = Job.model_validate({"model": {"config": config, "type": kind}}).model
        network = build_model(model, 0)
        try:
            require_fitting_labels(manifest, task_of(model, network), network.config)
        except DataError as error:
            assert error.code == "DATA023" and error.got != error.allowed
            refusals.append(error.got)
    assert len(refusals) == 3 and len(set(refusals)) == 1


def test_labels_of_tokens_are_renumbered_but_for_those_that_are_not_scored(tmp_path: Path) -> None:
    rows = [{"words": ["a", "b"], "label": ["place", "none"]}, {"words": ["c"], "label": ["none"]}]
    source = table(tmp_path / "a.jsonl", *rows)
    options: dict[str, Any] = {"text_column": "words", "label_column": "label", "validation_fraction": 0.0}
    manifest = prepared(source, tmp_path / "out", **options)
    labels = arrays_of(tmp_path / "out")["labels"]
    task = find_task("token-classification")
    (arrays,) = relabelled([{"labels": labels}], manifest, task, {0: "place", 1: "name", 2: "none"})
    assert sorted(labels[labels >= 0].tolist()) == [0, 0, 1] and labels.min() == -100
    assert arrays["labels"].tolist() == np.where(labels == 0, 2, np.where(labels == 1, 0, labels)).tolist()
