"""Training loss and reported loss of a model's output.

A language model's loss is the cross entropy of each token given the tokens before it. It is computed here from the
logits, because not every causal class of transformers shifts its labels. The auxiliary loss of an expert router is
part of the training loss, but not of the reported one.

Fused with the head, the cross entropy is computed in chunks, so that the logits of a whole batch never exist at once:

    hidden states ──► chunk ──► logits ──► loss, gradient of the logits ──► gradients of hidden states and head
                      chunk ──► …

Gradients are computed in the forward pass, while a chunk's logits are there. So the head's matrix is multiplied as
often as without chunks, as in Liger Kernel (arXiv 2410.10989).

A loss that a job brings, `model.loss`, is a function of a model's output and inputs that returns a loss of each sample.
The training loss is their mean. A sample counts 1, whatever its length, so the division into batches changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad

from hypha_ray.config.automatic import CHUNK
from hypha_ray.config.schema import Model, StrategyTraits
from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.model.task import IGNORE_INDEX, Batch, Task, batch_size
from hypha_ray.plugins import create

TokenLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of logits [..., vocabulary] and labels [...] that returns a mean loss."""
Refusal: TypeAlias = Callable[[str, str], ConfigError]
"""Function of what a loss of users did, and of what is allowed, that makes the error."""
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class Losses(NamedTuple):
    """Means over the scores that the task counts."""

    reported: torch.Tensor
    """Loss of the task alone, on which perplexity is based."""
    trained: torch.Tensor
    """Loss to differentiate: the reported one and the routers' auxiliary loss."""
    output: Any
    """Output object of the model, with hidden states in the place of logits if the loss is fused; None in training."""
    figures: torch.Tensor | None = None
    """Sums and weights of further figures, [figures, 2]; None if there are none."""


def compute_losses(
    task: Task,
    model: torch.nn.Module,
    inputs: Batch,
    head: torch.nn.Linear | None = None,
    token_loss: TokenLoss | None = None,
    scale: torch.Tensor | None = None,
) -> Losses:
    """Run a model on a task's keyword arguments and return its losses.

    Args:
        task: task from `resolve_task`.
        model: model to run, in the mode and precision that are set.
        inputs: keyword arguments with labels, on the model's device.
        head: layer from `checks.fused_check.head_of` that the loss is fused with; None: it isn't fused.
        token_loss: a compiled `token_cross_entropy`; None: the function as it is.
        scale: number that the loss will be multiplied by, for a fused loss in float16; None: none.

    Raises:
        ConfigError: the model returns no loss, or no logits for each token.

    """
    if task.objective is not None:
        losses: Losses = task.objective(task, model, inputs)
        return losses
    if task.own_loss is not None:
        return _own_losses(task, model, inputs)
    if task.labels == "shifted" and "labels" in inputs:
        with nullcontext() if head is None else bypassed_head(head):
            output = forward(task, model, _without_labels(inputs))
        reported_loss = shifted_cross_entropy(_logits(output), inputs["labels"], head, token_loss, scale)
        return Losses(reported_loss, reported_loss + router_loss(model, output), output)
    output = forward(task, model, inputs)
    divisor = task.count(inputs) if task.summed else 1
    trained_loss = loss_of(output) / divisor
    return Losses(_plain(output, inputs, trained_loss), trained_loss, output)


def training_losses(task: Task, model: torch.nn.Module, inputs: Batch, **options: Any) -> Losses:
    """Return losses as `compute_losses`, without the output: compiled code would make a gradient of zeros for it."""
    losses = compute_losses(task, model, inputs, **options)
    return Losses(losses.reported, losses.trained, None, losses.figures)


def _without_labels(inputs: Batch) -> Batch:
    return {name: tensor for name, tensor in inputs.items() if name != "labels"}


def _own_losses(task: Task, model: torch.nn.Module, inputs: Batch) -> Losses:
    """Return the mean of the losses of samples that a job brings."""
    model_inputs = inputs
    if task.labels == "shifted":  # A decoder's output doesn't depend on labels.
        model_inputs = _without_labels(inputs)
    output = forward(task, model, model_inputs)
    losses = sample_losses(task, output, inputs).float()
    loss = losses.mean()
    return Losses(loss, loss, output)


def require_mean(task: Task, traits: StrategyTraits) -> None:
    """Refuse a loss that is a sum in synchronous training, whose steps take means.

    Raises:
        ConfigError: the loss is a sum, and the strategy sends gradients.

    """
    if task.summed and traits.sends_gradients:
        raise ConfigError(
            "CFG011",
            'ctc_loss_reduction = "sum" and sync.strategy = "sync" exclude each other: a synchronous step takes a mean',
            fix='set ctc_loss_reduction = "mean", or another sync.strategy',
        )


def forward(task: Task, model: torch.nn.Module, inputs: Batch) -> Any:
    """Run a model without a key/value cache: only generation reads one, and some models fail to fill it."""
    if task.caches:
        return model(**inputs, use_cache=False)
    return model(**inputs)


@contextmanager
def bypassed_head(head: torch.nn.Linear) -> Iterator[None]:
    """Context in which a model's head passes hidden states on, so that they stand in the place of logits."""
    head.forward = lambda input: input  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward


def shifted_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    head: torch.nn.Linear | None = None,
    token_loss: TokenLoss | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean cross entropy of each label given the logits one position earlier.

    Logits of a prefix that has no labels, such as an image's patches, are skipped. With a head, hidden states are in
    the place of logits. Without a head, `token_loss` may replace `token_cross_entropy`.

    Raises:
        ConfigError: there are fewer logits than labels.

    """
    if logits.ndim != 3 or logits.shape[1] < labels.shape[1]:
        raise missing_loss(f"logits {list(logits.shape)} for labels {list(labels.shape)}")
    following = pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # Cutting the logits instead would copy them.
    prefix = logits.shape[1] - labels.shape[1]
    scored = logits[:, prefix:]  # From 0 on it is no cut, whose backward pass would copy all gradients.
    if head is None:
        return (token_loss or token_cross_entropy)(scored, following)
    following = following.to(scored.device)
    return fused_cross_entropy(scored.flatten(0, 1), head, following.flatten(), scale)


def token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each label given the logits at its own position."""
    rows = logits.float().flatten(0, -2)
    classes = labels.to(logits.device).flatten()
    return cross_entropy(rows, classes, ignore_index=IGNORE_INDEX)


def fused_cross_entropy(
    hidden: torch.Tensor, head: torch.nn.Linear, labels: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean cross entropy of each label given the hidden state at its own position.

    Args:
        hidden: hidden states [N, features].
        head: layer that makes logits of them.
        labels: class of each position, int64 [N].
        scale: number that the loss will be multiplied by, a scalar; None: 1. Gradients are computed times it, since
            small ones would vanish in float16.

    """
    device = hidden.device.type
    dtype = head.weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        loss: torch.Tensor = _Fused.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, labels, dtype, torch.is_grad_enabled(), scale
        )
    return loss


class _Fused(torch.autograd.Function):
    """Head and cross entropy. Gradients are computed in the forward pass, and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Compute chunk by chunk, with matrices of the given dtype and all else in float32.

        Arguments are hidden states, weight and bias of the head, labels, the dtype, whether gradients are enabled, and
        the scale of the loss.
        """
        hidden, weight, bias, labels, dtype, learns, scale = arguments
        is_scored = labels != IGNORE_INDEX
        classes = labels.masked_fill(~is_scored, 0)[:, None]
        shares = (is_scored / is_scored.sum())[:, None]
        gradients: list[torch.Tensor | None] = [None, None, None]
        for index, needs_gradient in enumerate(ctx.needs_input_grad[:3]):
            if needs_gradient and learns:
                gradients[index] = torch.zeros_like(arguments[index], dtype=torch.float32)
        hidden_gradient, weight_gradient, bias_gradient = gradients
        matrix = weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        rows = max(1, CHUNK // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            states = hidden[part].to(dtype)
            logits = linear(states, matrix, shift).float()
            loss += _loss_and_gradient(logits, classes[part], shares[part])
            if scale is not None:
                logits *= scale
            logits_gradient = logits.to(dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = logits_gradient @ matrix
            if weight_gradient is not None and dtype == torch.float32:
                weight_gradient.addmm_(logits_gradient.T, states)
            elif weight_gradient is not None:
                weight_gradient.add_(logits_gradient.T @ states)
            if bias_gradient is not None:
                bias_gradient += logits.sum(0)
        ctx.scale = None if scale is None else scale.clone()
        ctx.gradients = []
        for gradient, argument in zip(gradients, arguments, strict=False):
            ctx.gradients.append(None if gradient is None else gradient.to(argument.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> Any:
        """Scale the gradients in place; they can't be used again."""
        gradients = ctx.gradients
        ctx.gradients = None
        factor = factors[0] if ctx.scale is None else factors[0] / ctx.scale
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(factor)
        return (*gradients, None, None, None, None)


def _loss_and_gradient(logits: torch.Tensor, classes: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the loss of logits, which are overwritten by their gradient."""
    logits -= logits.amax(-1, keepdim=True)
    class_logits = logits.gather(1, classes)
    total = logits.exp_().sum(-1, keepdim=True)
    losses = (total.log() - class_logits) * shares
    loss = losses.sum()
    logits *= shares / total
    logits.scatter_add_(1, classes, -shares)
    return loss


def router_loss(model: torch.nn.Module, output: Any) -> torch.Tensor | float:
    """Return the routers' auxiliary loss, scaled as the model scales it; 0 if the model has no routers."""
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, torch.Tensor):
        return 0.0
    config: Any = model.config
    for owner in (model, config, config.get_text_config()):
        for name in _COEFFICIENTS:
            coefficient = getattr(owner, name, None)
            if isinstance(coefficient, float | int):
                return coefficient * loss
    class_name = type(model).__name__
    raise missing_loss(f"{class_name} has an auxiliary loss, but no known coefficient for it")


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output.

    Raises:
        ConfigError: the output has none.

    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise missing_loss(type(output).__name__)
    return loss.mean()


def missing_loss(got: str) -> ConfigError:
    """Return the error for a model that computes no loss from its inputs."""
    return ConfigError(
        "MODEL012",
        "the model computes no loss from these inputs",
        got,
        fix="choose a task with labels in model.type, or name the tensors it needs in model.input_names",
    )


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise missing_loss(type(output).__name__)
    return logits


def _plain(output: Any, inputs: Batch, trained_loss: torch.Tensor) -> torch.Tensor:
    """Return the loss without auxiliary terms, which a few sequence-to-sequence models add to it."""
    names: Iterable[str] = getattr(output, "keys", dict)()
    has_auxiliary_loss = any(name.endswith(("aux_loss", "z_loss")) for name in names)
    if not has_auxiliary_loss or "labels" not in inputs:
        return trained_loss
    return token_cross_entropy(_logits(output), inputs["labels"])


def with_own_loss(task: Task, model: Model) -> Task:
    """Return a task with the loss that a job brings; the task itself if it brings none.

    Raises:
        ConfigError: the loss can't be loaded.

    """
    if model.loss is None:
        return task
    loss = create("model_losses", model.loss, model.loss_options)
    return task.scored_by(loss)


def sample_losses(task: Task, output: Any, inputs: Batch) -> torch.Tensor:
    """Return the losses of samples, checked against the contract.

    Args:
        task: task with a loss of its own.
        output: output object of the model.
        inputs: keyword arguments of the model, with labels.

    Raises:
        ConfigError: MODEL025, the loss raises or returns something else.

    """
    assert task.own_loss is not None
    call = partial(task.own_loss, output, dict(inputs))
    losses = losses_of_samples(call, inputs, batch_size(inputs), _refused)
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise _refused("losses without a gradient", "losses computed from the output")
    return losses


def check_own_gradient(task: Task, network: Any, inputs: Batch) -> None:
    """Take the gradient of a loss of users on a batch, as training does; the model is left unchanged.

    Args:
        task: task with a loss of its own.
        network: model that may be small.
        inputs: keyword arguments of the model, with labels.

    Raises:
        ConfigError: MODEL025, the loss changes its inputs, or loss or gradient aren't there or aren't finite.

    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    with torch.inference_mode(False), torch.enable_grad():
        own_inputs = {name: value.clone() for name, value in inputs.items()}
        loss = compute_losses(task, network, own_inputs).trained
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
    for values in (loss, *gradients):
        if values is not None and not values.isfinite().all():
            raise _refused("losses or gradients that aren't finite", "finite losses of a model with random weights")


def losses_of_samples(call: Callable[[], Any], tensors: Mapping[str, Any], samples: int, refused: Refusal) -> Tensor:
    """Call a loss of users, and refuse what isn't a loss of each sample.

    Args:
        call: the loss with its arguments.
        tensors: what it is given, by name.
        samples: number of samples.
        refused: makes the error.

    Raises:
        ConfigError: the loss raises, changes what it is given, or returns something else.

    """
    allowed = f"a loss of each sample, [{samples}]"
    losses = result_of(call, tensors, allowed, refused)
    if not isinstance(losses, Tensor):
        raise refused(type(losses).__name__, allowed)
    if losses.shape != (samples,):
        raise refused(str(list(losses.shape)), allowed)
    return losses


def result_of(call: Callable[[], Any], tensors: Mapping[str, Any], allowed: str, refused: Refusal) -> Any:
    """Call a loss of users, which may raise anything, and return whatever it returns.

    A loss that changes what it is given would change what later steps and figures see.

    Args:
        call: the loss with its arguments.
        tensors: what it is given, by name.
        allowed: what it is to return, in words.
        refused: makes the error.

    Raises:
        ConfigError: the loss raises, or changes what it is given.

    """
    versions = _versions_of(tensors)
    try:
        result = call()
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise refused(reason_of(error), allowed) from error
    changed_names = [name for name, version in _versions_of(tensors).items() if version != versions[name]]
    if changed_names:
        unchanged = "inputs as they were given: change a copy, such as labels.clone()"
        raise refused(f"a change in place of {', '.join(changed_names)}", unchanged)
    return result


def _versions_of(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return how often each tensor was changed in place so far; those of inference mode aren't counted."""
    versions: dict[str, int] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            versions[name] = tensor._version
    return versions


def _refused(got: str, allowed: str) -> ConfigError:
    return ConfigError(
        "MODEL025",
        "model.loss can't be trained on",
        got,
        allowed,
        "see the contract of losses in docs/plugins-training.md",
    )
