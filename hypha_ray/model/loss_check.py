"""Check of a model's loss on samples of the dataset, before it is trained or scored, and whether the loss may be fused.

    configuration ──► small copy ──╮
                                   ├──► equal to transformers' loss?  additive over samples?  causal?
    samples of the dataset ────────╯

Nothing is inferred from class names. Numbers reveal a language model that sees the tokens it has to predict, and a
loss that depends on how samples are batched.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

import torch

from hypha_ray.errors import ConfigError, HyphaError, reason_of
from hypha_ray.model.checks import Build, check_on_copy, evaluating, unusable_error
from hypha_ray.model.losses import (
    Losses,
    bypassed_head,
    check_own_gradient,
    compute_losses,
    forward,
    loss_of,
    token_cross_entropy,
)
from hypha_ray.model.metrics import MASKING_SEED, Metrics, check_metrics, tensors_of
from hypha_ray.model.task import IGNORE_INDEX, Task
from hypha_ray.texts import counted
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
_SAME_LOGITS: Final = 1e-5
"""Largest difference of two logits, relative to the largest logit."""


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
    return check_on_copy(lambda network: _check(task, network, samples, trains=True), config, build, parameters)


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
        raise unusable_error(error) from error


def check_metrics_of(metrics: Metrics, task: Task, samples: Samples, network: Any) -> None:
    """Try a job's metrics on a model's predictions for some samples.

    Raises:
        ConfigError: MODEL024, the model has no logits for each label, or a metric fails.

    """
    with evaluating(network):
        inputs = _inputs(task, choose_samples(task, samples), network)
        check_metrics(metrics, task, compute_losses(task, network, inputs).output, inputs)


def _check(task: Task, network: Any, samples: Samples, trains: bool = False) -> None:
    with evaluating(network):
        samples = choose_samples(task, samples)
        check_padding(task, network, samples)
        inputs = _inputs(task, samples, network)
        if not task.count(inputs):
            return
        _check_apart(task, network, samples, inputs)
        whole_losses = compute_losses(task, network, inputs)
        if trains and task.own_loss is not None:
            check_own_gradient(task, network, inputs)
        _check_against_own(task, network, inputs, whole_losses)
        if task.objective is None:  # Preference losses may depend on other samples of the batch.
            _check_additive(task, network, samples, float(whole_losses.reported) * task.count(inputs))
        if task.labels in ("shifted", "positions") and not task.classifies:
            _check_causal(task, network, inputs, whole_losses.output)


def _check_against_own(task: Task, network: Any, inputs: dict[str, Any], ours: Losses) -> None:
    """Compare a loss computed from logits with the model's own, which may lack the shift of labels."""
    if task.counts_samples:
        return
    logits = getattr(ours.output, "logits", None)
    if task.labels == "shifted" and "labels" in inputs:
        labels = inputs["labels"]
        unshifted = token_cross_entropy(ours.output.logits[:, -labels.shape[1] :], labels)
        loss = _own_loss(task, network, inputs)
        if loss is None:
            return
        expected_loss = float(ours.trained)
        without_shift = float(ours.trained - ours.reported + unshifted)
        is_right = _close(loss, expected_loss) or _close(loss, without_shift)
    elif task.perplexity and isinstance(logits, torch.Tensor):
        labels = inputs["labels"]
        if logits.shape[:-1] != labels.shape:
            return
        loss = float(ours.reported)
        expected_loss = float(token_cross_entropy(logits, labels))
        is_right = _close(loss, expected_loss)
    else:
        return
    if not is_right:
        raise _wrong_loss(network, task, f"{loss:.6g} where the cross entropy of its tokens is {expected_loss:.6g}")


def _check_apart(task: Task, network: Any, samples: Samples, inputs: dict[str, Any]) -> None:
    """Compare two packed sequences with each of them by itself, if the samples are packed."""
    positions = samples.arrays.get("position_ids")
    if positions is None or "attention_mask" in samples.arrays or not (positions[:, 1:] == 0).any():
        return
    difference = math.inf
    if "position_ids" in inputs:
        difference = _packing_difference(task, network, inputs["input_ids"][:1])
    if difference > _LEAK:
        problem = f"{type(network).__name__} doesn't keep the packed sequences of a sample apart"
        fix = "prepare the dataset without --pack, or choose another model"
        raise ConfigError("MODEL020", problem, f"logits that differ by {difference:.1g}", f"up to {_LEAK:g}", fix)


def _packing_difference(task: Task, network: Any, ids: torch.Tensor) -> float:
    """Return the relative difference of logits between two packed halves of tokens [1, T] and each half by itself."""
    half_length = ids.shape[1] // 2
    positions = torch.arange(half_length, device=ids.device)[None]
    separate: list[torch.Tensor] = []
    for part in ids[:, : 2 * half_length].split(half_length, dim=1):
        output = forward(task, network, {"input_ids": part, "position_ids": positions})
        separate.append(output.logits)
    separate_logits = torch.cat(separate, dim=1)
    packed_positions = torch.cat([positions, positions], dim=1)
    packed_output = forward(task, network, {"input_ids": ids[:, : 2 * half_length], "position_ids": packed_positions})
    difference = (packed_output.logits - separate_logits).abs()
    return float(difference.max() / separate_logits.abs().max())


def _check_additive(task: Task, network: Any, samples: Samples, whole_loss: float) -> None:
    """Compare the loss of all samples together with the losses of single samples."""
    parts = 0.0
    for index in range(len(samples)):
        sample = samples.part(slice(index, index + 1))
        inputs = _inputs(task, sample, network)
        count = task.count(inputs)
        if count:
            loss = compute_losses(task, network, inputs).reported
            parts += float(loss) * count
    if not _close(parts, whole_loss, _ADDITIVE):
        raise _wrong_loss(
            network,
            task,
            f"{whole_loss:.6g} for {counted(len(samples), 'sample')} together, {parts:.6g} for each by itself",
        )


def _check_causal(task: Task, network: Any, inputs: dict[str, Any], output: Any) -> None:
    """Change a token that is predicted: logits before it must not change, logits behind it must."""
    name = "input_ids" if task.labels == "shifted" else "labels"
    tokens = inputs.get(name)
    labels = inputs.get("labels")
    if tokens is None or labels is None or tokens.shape != labels.shape or tokens.ndim != 2 or tokens.shape[1] < 2:
        return
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        return
    changed_tokens = tokens.clone()
    positions: list[int] = []
    for row, scored in enumerate(labels != task.ignored):
        position = _middle_position(task, scored)
        positions.append(position)
        if position:
            changed_tokens[row, position] = _another_token(tokens[row], position, logits.shape[-1])
    new_logits = compute_losses(task, network, inputs | {name: changed_tokens}).output.logits
    differences = (logits.float() - new_logits.float()).abs()
    changes = differences.amax(-1)[:, -tokens.shape[1] :]
    noise = 1e-6 * float(logits.abs().max())
    reads_labels = task.perplexity and name == "labels" and "decoder_input_ids" not in inputs
    for row, position in enumerate(positions):
        if not position:
            continue
        end = position if task.labels == "shifted" else position + 1
        change_before = float(changes[row, :end].max())
        largest_change = float(changes[row].max())
        if change_before > _LEAK * largest_change + noise:
            raise _sees_labels(network, task, position)
        if reads_labels and largest_change <= noise:
            raise _sees_no_tokens(network, task)


def _middle_position(task: Task, scored: torch.Tensor) -> int:
    """Return the middle one of the scored positions of a sample, [T], except for the first; 0 without any."""
    positions = [position for position in scored.nonzero().flatten().tolist() if position]
    if task.labels == "positions":  # mBART begins with the last label, which is the language.
        positions = positions[:-1]
    if not positions:
        return 0
    return int(positions[len(positions) // 2])


def _sees_labels(network: Any, task: Task, position: int) -> ConfigError:
    return ConfigError(
        "MODEL016",
        f"{type(network).__name__} sees the tokens that it has to predict in {task.name}",
        f"token {position} changes the predictions before it",
        "a model that sees only earlier tokens",
        "set is_decoder = true in the model's configuration if it has that key, or choose another model.type",
    )


def _sees_no_tokens(network: Any, task: Task) -> ConfigError:
    class_name = type(network).__name__
    problem = f"{class_name} doesn't see the tokens before those that it has to predict in {task.name}"
    fix = "give slices decoder_input_ids, or choose another model"
    return ConfigError("MODEL016", problem, "predictions that are the same after another token", fix=fix)


def choose_samples(task: Task, samples: Samples) -> Samples:
    """Return a few samples whose numbers of scores differ as much as possible, with sequences cut."""
    short_samples = _cut(task, samples)
    sizes: dict[int, tuple[int, int]] = {}
    for index in range(min(len(short_samples), 32)):
        inputs = _make_inputs(task, short_samples.part(slice(index, index + 1)))
        count = task.count(inputs)
        if count:
            sizes[index] = (count, _filled(task, inputs))
    order = sorted(sizes, key=lambda index: sizes[index]) or [0]
    smallest, median, largest = order[0], order[len(order) // 2], order[-1]
    preferred = list(dict.fromkeys([smallest, largest, median, *order]))
    few_indices = sorted(preferred[:SAMPLES])
    arrays = {name: array[few_indices] for name, array in short_samples.arrays.items()}
    return Samples(arrays, short_samples.keys[few_indices])


def _filled(task: Task, inputs: dict[str, Any]) -> int:
    """Return the number of entries of a sample's mask and labels that aren't padding."""
    count = 0
    if inputs.get("attention_mask") is not None:
        count += int(inputs["attention_mask"].sum())
    if inputs.get("labels") is not None:
        is_scored = inputs["labels"] != task.ignored
        count += int(is_scored.sum())
    return count


def _cut(task: Task, samples: Samples) -> Samples:
    """Cut sequences of tokens behind some scored ones, because logits of a large vocabulary take much memory."""
    ids = samples.arrays.get("input_ids")
    labels = samples.arrays.get("labels")
    if task.objective is not None:
        return _cut_preferences(samples)
    if task.modality != "text" or not task.perplexity or ids is None or ids.ndim != 2:
        return samples
    end = TOKENS
    if labels is not None and labels.ndim == 2:
        scored = (labels != task.ignored).any(0)
        if scored.any():
            end = max(TOKENS, int(scored.argmax()) + TOKENS // 2)
    arrays = dict(samples.arrays)
    for name, array in samples.arrays.items():
        if array.ndim >= 2 and (array.shape[1] == ids.shape[1] or name == "labels"):
            arrays[name] = array[:, :end]
    return Samples(arrays, samples.keys)


def _cut_preferences(samples: Samples) -> Samples:
    """Cut sequences of tokens, [N, 2, L], behind the first tokens of each sample's answers."""
    is_scored = samples.arrays["labels"] != IGNORE_INDEX
    end = max(TOKENS, int(is_scored.argmax(-1).max()) + TOKENS // 2)
    arrays = {}
    for name, array in samples.arrays.items():
        arrays[name] = array[..., :end] if array.ndim == 3 else array
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


def _another_token(row: torch.Tensor, position: int, vocabulary: int) -> int:
    """Return another token for a position, from the same sample if it has one."""
    token_id = int(row[position])
    different = [token for token in row.tolist() if token >= 0 and token != token_id]
    if not different:
        return (token_id + 1) % vocabulary
    return int(different[len(different) // 2])


def _close(loss: float, expected_loss: float, tolerance: float = _CLOSE) -> bool:
    if not (math.isfinite(loss) and math.isfinite(expected_loss)):
        return True  # A sample that overflows and a diverged model tell nothing about the loss.
    scale = max(abs(loss), abs(expected_loss))
    return abs(loss - expected_loss) <= tolerance * scale + 1e-6


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
    wrong = padding[padding != token]
    if wrong.size:
        class_name = type(network).__name__
        problem = f"{class_name} classifies by the last token before padding, and takes another for padding"
        fix = f"set pad_token_id = {wrong[0]} in the model's configuration, or prepare the dataset by its tokenizer"
        raise ConfigError("MODEL018", problem, f"pad_token_id {token}", f"{wrong[0]}, as in the dataset", fix)


def reads(network: Any, key: str) -> bool:
    """Return whether the model's forward reads a key of its configuration."""
    for name in ("forward", "_shift_right"):
        method = getattr(type(network), name, None)
        if method is not None and key in inspect.getsource(inspect.unwrap(method)):
            return True
    return False


def head_of(task: Task, network: Any) -> torch.nn.Linear:
    """Return the head that the loss of a language model may be fused with.

    Raises:
        ConfigError: MODEL020, the model is of another task, or has no linear head, or one with an adapter.

    """
    head = network.get_output_embeddings() if task.labels == "shifted" else None
    if head is None:
        raise _refused(network, task.name)
    if type(head) is not torch.nn.Linear:
        raise _refused(network, f"{task.name} with {type(head).__name__}")
    return head


def check_fused_on_copy(task: Task, samples: Samples, config: Any, build: Build, parameters: int) -> bool:
    """Compare logits of a small copy of the model with those that its head makes of hidden states.

    Args:
        task: task from `resolve_task`.
        samples: samples of the dataset.
        config: configuration of the model.
        build: function that makes a model from a configuration.
        parameters: number of the model's parameters.

    Returns:
        Whether a copy could be built and checked.

    Raises:
        ConfigError: MODEL020, they differ.

    """
    return check_on_copy(lambda network: _check_head(task, network, samples), config, build, parameters)


def no_copy_error(network: Any) -> ConfigError:
    """Return the error for a model of which no copy could be made."""
    return _refused(network, "no small copy of it could be made to try that")


def _check_head(task: Task, network: Any, samples: Samples) -> None:
    few_samples = choose_samples(task, samples)
    head = head_of(task, network)
    inputs = task.inputs(tensors_of(few_samples), few_samples.keys, MASKING_SEED)
    inputs.pop("labels", None)
    with torch.inference_mode():
        expected_logits = forward(task, network, inputs).logits
        try:
            with bypassed_head(head):
                hidden = forward(task, network, inputs).logits
            logits = head(hidden)
        except Exception as error:  # The model computes something with logits that fails with hidden states.
            raise _refused(network, reason_of(error)) from error
    if (
        logits.shape != expected_logits.shape
        or (logits - expected_logits).abs().max() > _SAME_LOGITS * expected_logits.abs().max()
    ):
        raise _refused(network, "logits that aren't those of its head")


def _refused(network: Any, reason: str) -> ConfigError:
    problem = f"worker.fused_loss: {type(network).__name__} has no loss that can be fused with its head"
    return ConfigError("MODEL020", problem, reason, "logits of a linear layer", "leave it out")
