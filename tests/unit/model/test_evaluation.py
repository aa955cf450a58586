import math
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.schema import Model
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import build_model, task_of
from hypha_ray.model.metrics import batches_of, evaluate, metrics_of
from hypha_ray.model.task import IGNORE_INDEX, Task
from hypha_ray.model.tasks import find_task
from tests.support import small_models
from tests.support.small_models import VIT

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 24, "vocab_size": 40}
BERT = small_models.BERT | {"vocab_size": 40, "max_position_embeddings": 24, "mask_token_id": 39}


def ready(config: dict[str, Any], task: str, seed: int = 0) -> tuple[torch.nn.Module, Task]:
    model = Model(config=config, type=task)
    network = build_model(model, seed)
    return network, task_of(model, network)


def text(samples: int = 13, length: int = 20) -> dict[str, np.ndarray]:
    """Token ids with padding of every length, the last sample all padding but for one token."""
    draws = np.random.default_rng(0)
    mask = (np.arange(length) < draws.integers(2, length + 1, size=(samples, 1))).astype(np.int64)
    mask[-1] = np.arange(length) == 0
    return {"input_ids": draws.integers(0, 39, size=(samples, length)), "attention_mask": mask}


def images(samples: int = 11) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    return {
        "images": draws.random((samples, 1, 8, 8), dtype=np.float32),
        "labels": draws.integers(0, 10, size=samples).astype(np.int32),
    }


@pytest.mark.parametrize(
    ("config", "name", "arrays"),
    [(GPT2, "causal-lm", text()), (BERT, "masked-lm", text()), (VIT, "image-classification", images())],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_evaluate_sums_do_not_depend_on_the_batch_size(
    config: dict[str, Any], name: str, arrays: dict[str, np.ndarray], size: int
) -> None:
    network, task = ready(config, name)
    whole = evaluate(network, task, batches_of([arrays], 100), "cpu")
    parts = evaluate(network, task, batches_of([arrays], size), "cpu")
    assert whole["val_loss"][1] == parts["val_loss"][1] > 0
    assert parts["val_loss"][0] == pytest.approx(whole["val_loss"][0], rel=1e-6)
    assert parts.get("accuracy") == whole.get("accuracy")


def test_evaluate_language_model_agrees_with_cross_entropy_by_hand() -> None:
    network, task = ready(GPT2, "causal-lm")
    arrays = text()
    sums = evaluate(network, task, batches_of([arrays], 4), "cpu")
    ids, mask = torch.tensor(arrays["input_ids"]), torch.tensor(arrays["attention_mask"])
    network.eval()
    with torch.no_grad():
        logits = network(input_ids=ids, attention_mask=mask).logits.double()
    losses = -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    scored = mask[:, 1:] == 1
    assert sums["val_loss"][1] == int(scored.sum())
    assert sums["val_loss"][0] == pytest.approx(losses[scored].sum().item(), rel=1e-6)
    assert "accuracy" not in sums


def test_evaluate_classifier_counts_hits() -> None:
    network, task = ready(VIT, "image-classification")
    arrays = images()
    network.eval()
    with torch.no_grad():
        best = network(pixel_values=torch.tensor(arrays["images"])).logits.argmax(-1)
    arrays["labels"] = np.where(np.arange(11) < 7, best, (best + 1) % 10)
    sums = evaluate(network, task, batches_of([arrays], 4), "cpu")
    assert sums["accuracy"] == (7, 11)
    assert metrics_of(task, sums)["accuracy"] == pytest.approx(7 / 11)


def test_evaluate_classifier_with_labels_in_a_column_has_the_accuracy_of_labels_in_a_row() -> None:
    network, task = ready(VIT, "image-classification")
    arrays = images()
    row = evaluate(network, task, batches_of([arrays], 4), "cpu")
    arrays["labels"] = arrays["labels"][:, None]
    assert evaluate(network, task, batches_of([arrays], 4), "cpu") == row
    assert "accuracy" in row


def test_evaluate_token_classifier_leaves_ignored_positions_out() -> None:
    network, task = ready({k: v for k, v in BERT.items() if k != "mask_token_id"}, "token-classification")
    arrays = text()
    labels = np.where(arrays["attention_mask"] == 1, 1, IGNORE_INDEX)
    sums = evaluate(network, task, batches_of([arrays | {"labels": labels}], 4), "cpu")
    assert sums["val_loss"][1] == arrays["attention_mask"].sum()
    correct, count = sums["accuracy"]
    assert 0 <= correct <= count


def test_evaluate_masked_model_repeats_exactly() -> None:
    network, task = ready(BERT, "masked-lm")
    one, other = (evaluate(network, task, batches_of([text()], 4), "cpu") for _ in range(2))
    assert one == other


def test_evaluate_dropout_is_off_and_mode_and_gradients_are_as_before() -> None:
    network, task = ready(GPT2 | {"resid_pdrop": 0.9, "embd_pdrop": 0.9}, "causal-lm")
    network.train()
    one, other = (evaluate(network, task, batches_of([text()], 4), "cpu") for _ in range(2))
    assert one == other
    assert network.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    network.eval()
    evaluate(network, task, [], "cpu")
    assert not network.training


def test_evaluate_failure_leaves_the_model_in_training_mode() -> None:
    network, task = ready(GPT2, "causal-lm")
    network.train()
    with pytest.raises(IndexError):
        evaluate(network, task, [{"input_ids": torch.full((1, 4), 10_000)}], "cpu")
    assert network.training


def test_evaluate_autocast_is_close_to_full_precision() -> None:
    network, task = ready(GPT2, "causal-lm")
    full = evaluate(network, task, batches_of([text()], 4), "cpu")
    mixed = evaluate(network, task, batches_of([text()], 4), "cpu", torch.bfloat16)
    assert mixed["val_loss"][0] != full["val_loss"][0]
    assert mixed["val_loss"][0] == pytest.approx(full["val_loss"][0], rel=0.02)


def test_evaluate_nothing_gives_zero_sums() -> None:
    network, task = ready(GPT2, "causal-lm")
    assert evaluate(network, task, [], "cpu") == {"val_loss": (0.0, 0)}
    assert metrics_of(task, {"val_loss": (0.0, 0)}) == {"val_loss": None, "perplexity": None, "tokens": 0}


def test_evaluate_all_padding_counts_nothing() -> None:
    network, task = ready(GPT2, "causal-lm")
    ids = torch.ones(2, 4, dtype=torch.int64)
    assert evaluate(network, task, [{"input_ids": ids, "attention_mask": 0 * ids}], "cpu") == {"val_loss": (0.0, 0)}


def test_evaluate_model_without_loss_raises() -> None:
    network, _ = ready(GPT2, "causal-lm")
    with pytest.raises(ConfigError, match=r"MODEL012.*no loss"):
        evaluate(network, find_task("auto", ["input_ids"]), [{"input_ids": torch.ones(1, 3, dtype=torch.int64)}], "cpu")


def test_figures_language_model_has_perplexity() -> None:
    result = metrics_of(find_task("causal-lm"), {"val_loss": (200.0, 100)})
    assert result == {"val_loss": 2.0, "perplexity": pytest.approx(math.exp(2)), "tokens": 100}
    assert metrics_of(find_task("causal-lm"), {"val_loss": (1e6, 1)})["perplexity"] is None
    assert metrics_of(find_task("causal-lm"), {"val_loss": (math.nan, 4)})["val_loss"] is None


@pytest.mark.parametrize(
    ("task", "unit"),
    [
        ("masked-lm", "tokens"),
        ("token-classification", "tokens"),
        ("question-answering", "samples"),
        ("image-classification", "samples"),
        ("semantic-segmentation", "pixels"),
        ("masked-image-modeling", "patches"),
        ("text-to-spectrogram", "frames"),
        ("time-series-prediction", "samples"),
    ],
)
def test_number_of_scores_is_called_what_it_counts(task: str, unit: str) -> None:
    assert metrics_of(find_task(task), {"val_loss": (3.0, 2)})[unit] == 2


def test_figures_of_a_task_without_classes_are_loss_and_samples() -> None:
    assert metrics_of(find_task("question-answering"), {"val_loss": (3.0, 2)}) == {"val_loss": 1.5, "samples": 2}


def test_batches_of_slices_keep_order_and_never_mix_slices() -> None:
    slices = [{"x": np.arange(5)}, {"x": np.arange(5, 7)}]
    slices[0]["x"].flags.writeable = False
    batches = list(batches_of(slices, 3, [4, 9]))
    assert [batch.arrays["x"].tolist() for batch in batches] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [batch.keys.tolist() for batch in batches] == [
        [[0, 4, 0], [0, 4, 1], [0, 4, 2]],
        [[0, 4, 3], [0, 4, 4]],
        [[0, 9, 0], [0, 9, 1]],
    ]
