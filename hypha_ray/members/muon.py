"""Muon that orthogonalizes matrices of one shape together, and the weights of a model that it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from hypha_ray.config.training import InnerOptimizer
from hypha_ray.optim.optimizers import Assembly, Shares, adamw
from hypha_ray.optim.torch_extras import GroupOptimizer

TOGETHER = 1 << 24
"""Largest number of elements that are orthogonalized at once: more take memory, and aren't faster."""
_A = 3.4445
_B = -4.7750
_C = 2.0315
"""Coefficients of Jordan's quintic, the steepest at zero that keeps singular values between about 0.7 and 1.2."""
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_RMS = 0.2
"""Root mean square of AdamW's steps, as measured for arXiv 2502.16982."""
LengthRule: TypeAlias = Literal["original", "match_rms_adamw"]
MATRICES = "matrices"
"""Kind of the parameters that Muon takes."""
_TRANSPOSED = {"Llama4TextExperts"}
"""Classes whose experts have inputs for rows, without an attribute that tells."""


class Undivided:
    """Tensors of a single process."""

    def shape_of(self, piece: torch.Tensor) -> torch.Size:
        """Return the shape of the parameter."""
        return piece.shape

    def whole(self, part: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return part

    def part(self, tensor: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class Muon(GroupOptimizer):
    """`torch.optim.Muon` (Jordan 2024) with one call for all matrices of a shape.

    Calls dominate the time for small matrices, so a step is several times as fast. On CPUs it computes in float32,
    since most have no units for bfloat16. A tensor of three dimensions is a list of matrices, such as experts.

    Matrices that are divided among processes are gathered, and orthogonalized in all of them.

    Args:
        params: matrices, or groups of them. If a group's `sideways` is true, rows of its matrices are inputs, as in
            GPT-2.
        lr: learning rate.
        momentum: decay of the average of gradients, with Nesterov's look-ahead.
        weight_decay: decoupled weight decay.
        length: rule of a step's length, as torch's `adjust_lr_fn`: √max(1, outputs/inputs), or
            0.2 √max(outputs, inputs), for which learning rates of AdamW fit (arXiv 2502.16982).
        assembly: parts of the matrices that this process has; None: it has them whole.

    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        length: LengthRule = "original",
        assembly: Assembly | None = None,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "sideways": False}
        super().__init__(params, options)
        self._length = length
        self._assembly = assembly or Undivided()

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        averages = [self._average(parameter) for parameter in parameters]
        skipped: torch.Tensor | None = getattr(self, "found_inf", None)
        decay_factor = 1 - group["lr"] * group["weight_decay"]
        if skipped is None:
            torch._foreach_mul_(parameters, decay_factor)
        else:  # Averaged with itself, an average stays the same to the bit.
            skips = skipped.bool()
            gradients = [
                torch.where(skips, average, gradient) for average, gradient in zip(averages, gradients, strict=True)
            ]
            torch._foreach_mul_(parameters, torch.where(skips, 1.0, decay_factor))
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        nesterov_averages = torch._foreach_lerp(gradients, averages, group["momentum"])
        shapes = [self._assembly.shape_of(parameter) for parameter in parameters]
        for members in _batches_of_shapes(shapes):
            pieces = [parameters[member] for member in members]
            steps = self._orthogonal([nesterov_averages[member] for member in members], pieces)
            if skipped is not None:
                factor = (1 - skipped).to(steps[0].dtype)
                torch._foreach_mul_(steps, factor)
            length = self._length_of(shapes[members[0]], group["sideways"])
            torch._foreach_add_(pieces, steps, alpha=-group["lr"] * length)

    def _orthogonal(self, parts: list[torch.Tensor], pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Orthogonalize matrices of one shape, of which this process has parts."""
        pairs = zip(parts, pieces, strict=True)
        matrices = torch.stack([self._assembly.whole(part, piece) for part, piece in pairs])
        rows, columns = matrices.shape[-2:]
        most_matrices = max(1, TOGETHER // max(1, rows * columns))
        batches = matrices.view(-1, rows, columns).split(most_matrices)
        if len(batches) == 1:
            orthogonalized = orthogonal(batches[0])
        else:
            orthogonalized = torch.cat([orthogonal(batch) for batch in batches])
        steps = orthogonalized.to(pieces[0].dtype).view(matrices.shape)
        return [self._assembly.part(step, piece) for step, piece in zip(steps.unbind(), pieces, strict=True)]

    def _length_of(self, shape: Sequence[int], sideways: bool) -> float:
        """Return the length of a matrix's step, as a multiple of the learning rate."""
        rows, columns = shape[-2:]
        if self._length == "match_rms_adamw":
            return _RMS * math.sqrt(max(rows, columns))
        outputs, inputs = (columns, rows) if sideways else (rows, columns)
        return math.sqrt(max(1.0, outputs / inputs))

    def _average(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Orthogonalize matrices of shape (count, rows, columns): singular values become about 1, their vectors stay.

    Five Newton-Schulz iterations, in bfloat16 on GPUs and in float32 elsewhere.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    norms = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / norms.clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return x.mT if is_tall else x


def _batches_of_shapes(shapes: Iterable[torch.Size]) -> Iterator[list[int]]:
    """Return indices of matrices that are orthogonalized together: of one shape, at most `TOGETHER` elements."""
    batches_by_shape: dict[torch.Size, list[list[int]]] = {}
    for index, shape in enumerate(shapes):
        batches = batches_by_shape.setdefault(shape, [[]])
        batch_length = len(batches[-1]) + 1
        if batch_length > 1 and batch_length * shape.numel() > TOGETHER:
            batches.append([])
        batches[-1].append(index)
    for batches in batches_by_shape.values():
        yield from batches


def muon_weights(model: nn.Module) -> dict[int, bool]:
    """Find the weights that Muon takes, as its author advises (Jordan 2024).

    They are the matrices of a model's body that are neither embeddings nor its head. A tensor of three dimensions has
    one for each expert. AdamW takes all other parameters.

    Returns:
        Whether rows of a parameter's matrices are inputs, by the id of the parameter.

    """
    from transformers.pytorch_utils import Conv1D

    body: Any = getattr(model, "base_model", model)
    tables = _tables(model, body)
    sideways_by_id: dict[int, bool] = {}
    for module in body.modules():
        experts = list(_experts(module))
        if experts:  # The module's other parameters are biases, of two dimensions.
            is_transposed = type(module).__name__ in _TRANSPOSED
            sideways = bool(getattr(module, "is_transposed", is_transposed))
            for parameter in experts:
                sideways_by_id[id(parameter)] = sideways
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 and id(parameter) not in tables:
                sideways_by_id[id(parameter)] = isinstance(module, Conv1D)
    return sideways_by_id


def _tables(model: Any, body: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings and head."""
    ids: set[int] = set()
    for module in body.modules():
        if isinstance(module, nn.Embedding):
            ids.update(map(id, module.parameters()))
    if hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
        if head is not None:
            ids.update(map(id, head.parameters()))
    return ids


def _experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of a module that have a matrix for each of its experts.

    Modules without a number of them, such as experts that are shared, are known by the names of their classes.
    """
    count = getattr(module, "num_experts", None)
    is_named = count is None and type(module).__name__.endswith("Experts")
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 3 and (is_named or parameter.shape[0] == count):
            yield parameter


def build(
    model: nn.Module,
    pieces: dict[nn.Parameter, Any],
    config: InnerOptimizer,
    workers: int,
    shards: Shares | None,
) -> list[torch.optim.Optimizer]:
    """Build AdamW and Muon for a model's parameters, which step on a tensor (piece) of each."""
    sideways_by_id = muon_weights(model)
    adamw_pieces: list[Any] = []
    matrices: dict[bool, list[Any]] = {}
    for parameter, piece in pieces.items():
        if id(parameter) in sideways_by_id:
            sideways = sideways_by_id[id(parameter)]
            matrices.setdefault(sideways, []).append(piece)
        else:
            adamw_pieces.append(piece)
    optimizers: list[torch.optim.Optimizer] = []
    if adamw_pieces:
        optimizers.append(adamw(adamw_pieces, config, workers))
    if matrices:
        groups = [{"params": members, "sideways": sideways} for sideways, members in matrices.items()]
        rate = config.muon_learning_rate
        decay = config.weight_decay
        length = config.muon_step_length
        optimizers.append(Muon(groups, rate, weight_decay=decay, length=length, assembly=shards))
    return optimizers


def shares(model: nn.Module) -> dict[str, int]:
    """Count the trained parameters of a model by kind; Muon takes the matrices, and AdamW the others.

    Whatever a model has beside its body is its head, such as that of a classifier.
    """
    body: Any = getattr(model, "base_model", model)
    matrices = muon_weights(model)
    tables = _tables(model, body)
    in_body = set(map(id, body.parameters()))
    counts = dict.fromkeys((MATRICES, "embeddings and head", "vectors", "other tensors"), 0)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in matrices:
            group_name = MATRICES
        elif id(parameter) in tables or id(parameter) not in in_body:
            group_name = "embeddings and head"
        elif parameter.ndim < 2:
            group_name = "vectors"
        else:
            group_name = "other tensors"
        counts[group_name] += parameter.numel()
    return {group_name: count for group_name, count in counts.items() if count}
