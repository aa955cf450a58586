"""Check of a model's loss on samples of the dataset, before the model is trained or scored.

    configuration ──► small copy ──╮
                                   ├──► equal to transformers' loss?  additive over samples?  causal?
    samples of the dataset ────────╯

Nothing is inferred from class names. Numbers reveal a language model that sees the tokens it has to predict, and a
loss that depends on how samples are batched.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.model.checks.small_copies import Build, check_on_copy, unusable
from hypha_ray.model.evaluation import MASKING_SEED, tensors_of
from hypha_ray.model.losses import Losses, compute_losses, forward, loss_of, token_cross_entropy
from hypha_ray.model.metrics.metric import Metrics, check_metrics
from hypha_ray.model.tasks.task import Task
from hypha_ray.types import Samples

SAMPLES = 3
"""Number of samples in the check."""
TOKENS = 32
"""Number of tokens to which sequences are cut."""
_CLOSE = 2e-5
"""Largest relative difference of two losses of equal logits."""
_ADDITIVE = 2e-4
"""Largest relative difference of a batch's loss and the sum over samples, whose logits differ by rounding."""
_LEAK = 1e-4
"""Largest change of logits before a changed token, relative to the change after it."""


def check_loss_on_copy(task: Task, samples: Samples, config: Any, build: Build, parameters: int) -> bool:
    """Check the loss of a model that isn't built, on a small copy with random weights.

    Args:
        task: task from `resolve_task`.
        samples: samples of the dataset.
        config: configuration of the model.
        build: function that makes a model from a configuration.
        parameters: number of the model's parameters.

    Returns:
        Whether a copy could be built and checked.

    Raises:
        ConfigError: the model can't be run on the samples, or has no loss, or not the task's.

    """
    return check_on_copy(lambda network: _check(task, network, samples), config, build, parameters)


def check_loss_of(task: Task, network: Any, samples: Samples) -> None:
    """Check the loss of a model in evaluation mode; the model is left unchanged.

    Raises:
        ConfigError: the model can't be run on the samples, or has no loss, or not the task's.

    """
    try:
        _check(task, network, samples)
    except HyphaError:
        raise
    except Exception as error:  # Models raise anything.
        raise unusable(error) from error


def check_metrics_of(metrics: Metrics, task: Task, samples: Samples, network: Any) -> None:
    """Try a job's metrics on a model's predictions for some samples.

    Raises:
        ConfigError: MODEL024, the model has no logits for each label, or a metric fails.

    """
    with _evaluating(network):
        inputs = _inputs(task, choose_samples(task, samples), network)
        check_metrics(metrics, task, compute_losses(task, network, inputs).output, inputs)


def _check(task: Task, network: Any, samples: Samples) -> None:
    with _evaluating(network):
        samples = choose_samples(task, samples)
        check_padding(task, network, samples)
        inputs = _inputs(task, samples, network)
        if not task.count(inputs):
            return
        _check_apart(task, network, samples, inputs)
        whole = compute_losses(task, network, inputs)
        _check_against_own(task, network, inputs, whole)
        _check_additive(task, network, samples, float(whole.reported) * task.count(inputs))
        if task.labels in ("shifted", "positions") and not task.classifies:
            _check_causal(task, network, inputs, whole.output)


def _check_against_own(task: Task, network: Any, inputs: dict[str, Any], ours: Losses) -> None:
    """Compare a loss computed from logits with the model's own, which may lack the shift of labels."""
    if task.own_loss is not None:
        return
    if task.labels == "shifted" and "labels" in inputs:
        plain = token_cross_entropy(ours.output.logits[:, -inputs["labels"].shape[1] :], inputs["labels"])
        found = _own_loss(task, network, inputs)
        expected = [float(ours.trained), float(ours.trained - ours.reported + plain)]
    elif task.perplexity and isinstance(getattr(ours.output, "logits", None), torch.Tensor):
        logits = ours.output.logits
        if logits.shape[:-1] != inputs["labels"].shape:
            return
        found = float(ours.reported)
        expected = [float(token_cross_entropy(logits, inputs["labels"]))]
    else:
        return
    if found is not None and not any(_close(found, one) for one in expected):
        raise _wrong_loss(network, task, f"{found:.6g} where the cross entropy of its tokens is {expected[0]:.6g}")


def _check_apart(task: Task, network: Any, samples: Samples, inputs: dict[str, Any]) -> None:
    """Compare two packed sequences with each of them by itself, if positions of the samples begin anew."""
    positions = samples.arrays.get("position_ids")
    if positions is None or "attention_mask" in samples.arrays or not (positions[:, 1:] == 0).any():
        return
    ids = inputs["input_ids"][:1]
    half = ids.shape[1] // 2
    count = torch.arange(half, device=ids.device)[None]
    found = math.inf
    if "position_ids" in inputs:
        both = {"input_ids": ids[:, : 2 * half], "position_ids": torch.cat([count, count], dim=1)}
        parts = [{"input_ids": part, "position_ids": count} for part in (ids[:, :half], ids[:, half : 2 * half])]
        alone = torch.cat([forward(task, network, part).logits for part in parts], dim=1)
        found = float((forward(task, network, both).logits - alone).abs().max() / alone.abs().max())
    if found > _LEAK:
        what = f"{type(network).__name__} doesn't keep the packed sequences of a sample apart"
        fix = "prepare the dataset without --pack, or choose another model"
        raise ConfigError("MODEL020", what, f"logits that differ by {found:.1g}", f"up to {_LEAK:g}", fix)


def _check_additive(task: Task, network: Any, samples: Samples, whole: float) -> None:
    """Compare the loss of all samples together with the losses of single samples."""
    parts = 0.0
    for index in range(len(samples)):
        inputs = _inputs(task, samples.part(slice(index, index + 1)), network)
        if count := task.count(inputs):
            parts += float(compute_losses(task, network, inputs).reported) * count
    if not _close(parts, whole, _ADDITIVE):
        raise _wrong_loss(
            network, task, f"{whole:.6g} for {len(samples)} samples together, {parts:.6g} for each by itself"
        )


def _check_causal(task: Task, network: Any, inputs: dict[str, Any], output: Any) -> None:
    """Change a token that is predicted: if logits before it change, they have seen it; those behind have to."""
    name = "input_ids" if task.labels == "shifted" else "labels"
    tokens = inputs.get(name)
    labels = inputs.get("labels")
    if tokens is None or labels is None or tokens.shape != labels.shape or tokens.ndim != 2 or tokens.shape[1] < 2:
        return
    first = getattr(output, "logits", None)
    if not isinstance(first, torch.Tensor) or first.ndim != 3:
        return
    width = tokens.shape[1]
    changed = tokens.clone()
    places = []
    for row, scored in enumerate(labels != task.ignored):
        found = [place for place in scored.nonzero().flatten().tolist() if place]
        if task.labels == "positions":  # mBART begins with the last label, which is the language.
            found = found[:-1]
        place = found[len(found) // 2] if found else 0
        places.append(place)
        if place:
            changed[row, place] = _another(tokens[row], place, first.shape[-1])
    others = compute_losses(task, network, inputs | {name: changed}).output.logits
    made_of_labels = task.perplexity and name == "labels" and "decoder_input_ids" not in inputs
    noise = 1e-6 * float(first.abs().max())
    moved = (first.float() - others.float()).abs().amax(-1)[:, -width:]
    for row, place in enumerate(places):
        before = place if task.labels == "shifted" else place + 1
        if place and float(moved[row, :before].max()) > _LEAK * float(moved[row].max()) + noise:
            raise ConfigError(
                "MODEL016",
                f"{type(network).__name__} sees the tokens that it has to predict in {task.name}",
                f"token {place} changes the predictions before it",
                "a model that sees only earlier tokens",
                "set is_decoder = true in the model's configuration if it has that key, or choose another model.type",
            )
        if place and made_of_labels and float(moved[row].max()) <= noise:
            what = f"{type(network).__name__} doesn't see the tokens before those that it has to predict in {task.name}"
            fix = "give slices decoder_input_ids, or choose another model"
            raise ConfigError("MODEL016", what, "predictions that are the same after another token", fix=fix)


def choose_samples(task: Task, samples: Samples) -> Samples:
    """Return a few samples that differ as much as possible in the size of what is scored, with sequences cut."""
    short = _cut(task, samples)
    made = [_make_inputs(task, short.part(slice(i, i + 1))) for i in range(min(len(short), 32))]
    sizes = {
        index: (count, _filled(task, inputs)) for index, inputs in enumerate(made) if (count := task.count(inputs))
    }
    order = sorted(sizes, key=lambda index: sizes[index]) or [0]
    few = sorted(list(dict.fromkeys([order[0], order[-1], order[len(order) // 2], *order]))[:SAMPLES])
    return Samples({name: array[few] for name, array in short.arrays.items()}, short.keys[few])


def _filled(task: Task, inputs: dict[str, Any]) -> int:
    """Return the number of entries of a sample's mask and labels that aren't padding."""
    mask = inputs.get("attention_mask")
    labels = inputs.get("labels")
    return sum(
        int(part.sum()) for part in (mask, None if labels is None else labels != task.ignored) if part is not None
    )


def _cut(task: Task, samples: Samples) -> Samples:
    """Cut sequences of tokens behind some scored ones, because logits of a large vocabulary take much memory."""
    ids = samples.arrays.get("input_ids")
    labels = samples.arrays.get("labels")
    if task.modality != "text" or not task.perplexity or ids is None or ids.ndim != 2:
        return samples
    length = ids.shape[1]
    scored = (labels != task.ignored).any(0).nonzero()[0] if labels is not None and labels.ndim == 2 else []
    last = max(TOKENS, int(scored[0]) + TOKENS // 2 if len(scored) else 0)
    arrays = {
        name: array[:, :last] if array.ndim >= 2 and (array.shape[1] == length or name == "labels") else array
        for name, array in samples.arrays.items()
    }
    return Samples(arrays, samples.keys)


def _make_inputs(task: Task, samples: Samples) -> dict[str, Any]:
    return task.inputs(tensors_of(samples), samples.keys, MASKING_SEED)


def _inputs(task: Task, samples: Samples, network: Any) -> dict[str, Any]:
    device = next(network.parameters()).device
    return {name: tensor.to(device) for name, tensor in _make_inputs(task, samples).items()}


def _own_loss(task: Task, network: Any, inputs: dict[str, Any]) -> float | None:
    """Return the model's own loss; None if it computes none."""
    try:
        return float(loss_of(forward(task, network, inputs)))
    except Exception:  # The model takes no labels, or not these.
        return None


def _another(row: torch.Tensor, place: int, vocabulary: int) -> int:
    """Return another token for a place, from the same sample if it has one."""
    others = [token for token in row.tolist() if token >= 0 and token != row[place]]
    return int(others[len(others) // 2]) if others else (int(row[place]) + 1) % vocabulary


def _close(one: float, other: float, tolerance: float = _CLOSE) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return True  # A sample that overflows and a diverged model tell nothing about the loss.
    return abs(one - other) <= tolerance * max(abs(one), abs(other)) + 1e-6


@contextmanager
def _evaluating(network: Any) -> Iterator[None]:
    training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        network.train(training)


def _wrong_loss(network: Any, task: Task, got: str) -> ConfigError:
    return ConfigError(
        "MODEL015",
        f"the loss of {type(network).__name__} is no mean over the scores of {task.name}",
        got,
        "one value, however samples are batched",
        "choose another model or model.type",
    )


def check_padding(task: Task, network: Any, samples: Samples) -> None:
    """Refuse samples that are padded with another token than the model's, which would classify by padding.

    Raises:
        ConfigError: MODEL018, the model has another token for padding, or none.

    """
    ids = samples.arrays.get("input_ids")
    mask = samples.arrays.get("attention_mask")
    decodes = not network.config.is_encoder_decoder and reads(network, "pad_token_id")
    if task.name != "sequence-classification" or not decodes or ids is None or mask is None or ids.shape != mask.shape:
        return
    token = network.config.get_text_config().pad_token_id
    padding = ids[mask == 0]
    if (wrong := padding[padding != token]).size:
        what = f"{type(network).__name__} classifies by the last token before padding, and takes another for padding"
        fix = f"set pad_token_id = {wrong[0]} in the model's configuration, or prepare the dataset by its tokenizer"
        raise ConfigError("MODEL018", what, f"pad_token_id {token}", f"{wrong[0]}, as in the dataset", fix)


def reads(network: Any, key: str) -> bool:
    """Return whether the model's forward reads a key of its configuration."""
    steps = [getattr(type(network), name, None) for name in ("forward", "_shift_right")]
    return any(key in inspect.getsource(inspect.unwrap(step)) for step in steps if step is not None)
