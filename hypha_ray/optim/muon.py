"""Muon that orthogonalizes matrices of one shape together, and the weights of a model that it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import nn

from hypha_ray.optim.group_optimizers import GroupOptimizer

TOGETHER = 1 << 24
"""Most elements that are orthogonalized at once: what is more gains nothing by company, and takes memory."""
_A = 3.4445
_B = -4.7750
_C = 2.0315
"""Jordan's quintic: the steepest at zero of those that keep singular values between about 0.7 and 1.2."""
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_RMS = 0.2
"""Root mean square of AdamW's steps, as measured for arXiv 2502.16982."""
LengthRule: TypeAlias = Literal["original", "match_rms_adamw"]


class Assembly(Protocol):
    """Parts of tensors that several processes share, of which each process calls the same methods in the same order."""

    def shape_of(self, piece: torch.Tensor) -> torch.Size:
        """Return the shape of the whole tensor that a parameter is a part of."""
        ...

    def whole(self, part: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor that each process has a part of, like a parameter."""
        ...

    def part(self, whole: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a whole tensor, like a parameter."""
        ...


class Undivided:
    """Tensors that one process has whole."""

    def shape_of(self, piece: torch.Tensor) -> torch.Size:
        """Return the shape of the parameter."""
        return piece.shape

    def whole(self, part: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return part

    def part(self, whole: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return whole


class Muon(GroupOptimizer):
    """`torch.optim.Muon` (Jordan 2024) with a call for each shape instead of one for each matrix.

    Small matrices cost what the calls cost, so a step is several times as fast. On CPUs it computes in float32,
    since most have no units for bfloat16. A tensor of three dimensions is a list of matrices, such as experts.

    Each matrix of parts is gathered, and orthogonalized in all processes.

    Args:
        params: matrices, or groups of them; a group's `sideways` says that rows are inputs, as in GPT-2.
        lr: learning rate.
        momentum: decay of the average of gradients, with Nesterov's look ahead.
        weight_decay: decoupled.
        length: rule of a step's length, as torch's `adjust_lr_fn`: √max(1, outputs/inputs), or
            0.2 √max(outputs, inputs), by which rates of AdamW fit (arXiv 2502.16982).
        assembly: the parts of the matrices that this process has.

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
        shrink = 1 - group["lr"] * group["weight_decay"]
        if skipped is None:
            torch._foreach_mul_(parameters, shrink)
        else:  # The average of an average and itself is what it was, to the bit.
            stays = skipped.bool()
            gradients = [torch.where(stays, *pair) for pair in zip(averages, gradients, strict=True)]
            torch._foreach_mul_(parameters, torch.where(stays, 1.0, shrink))
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, averages, group["momentum"])
        for members in _alike([self._assembly.shape_of(parameter) for parameter in parameters]):
            pieces = [parameters[member] for member in members]
            steps = self._orthogonal([ahead[member] for member in members], pieces)
            if skipped is not None:
                torch._foreach_mul_(steps, (1 - skipped).to(steps[0].dtype))
            shape = self._assembly.shape_of(pieces[0])
            torch._foreach_add_(pieces, steps, alpha=-group["lr"] * self._length_of(shape, group["sideways"]))

    def _orthogonal(self, parts: list[torch.Tensor], pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Orthogonalize matrices of which this process has parts, all of one shape."""
        wholes = [self._assembly.whole(*pair) for pair in zip(parts, pieces, strict=True)]
        matrices = torch.stack(wholes)
        rows, columns = matrices.shape[-2:]
        each = matrices.view(-1, rows, columns).split(max(1, TOGETHER // max(1, rows * columns)))
        turned = torch.cat([orthogonal(some) for some in each]) if len(each) > 1 else orthogonal(each[0])
        steps = turned.to(pieces[0].dtype).view(matrices.shape).unbind()
        return [self._assembly.part(*pair) for pair in zip(steps, pieces, strict=True)]

    def _length_of(self, shape: Sequence[int], sideways: bool) -> float:
        """Return the length of a matrix's step, in learning rates."""
        rows, columns = shape[-2:]
        if self._length == "match_rms_adamw":
            return _RMS * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, columns / rows if sideways else rows / columns))

    def _average(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices of shape (count, rows, columns), all singular values near 1 and their vectors as they were.

    Five Newton-Schulz iterations, in bfloat16 on GPUs and in float32 elsewhere.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def _alike(shapes: Iterable[torch.Size]) -> Iterator[list[int]]:
    """Indices of matrices that are orthogonalized together: of one shape, and not too much at once."""
    found: dict[torch.Size, list[list[int]]] = {}
    for index, shape in enumerate(shapes):
        companies = found.setdefault(shape, [[]])
        if companies[-1] and (len(companies[-1]) + 1) * shape.numel() > TOGETHER:
            companies.append([])
        companies[-1].append(index)
    for companies in found.values():
        yield from companies


MATRICES = "matrices"
"""Kind of the parameters that Muon takes."""
_TRANSPOSED = {"Llama4TextExperts"}
"""Classes whose experts have inputs for rows, and don't say so."""


def muon_weights(model: nn.Module) -> dict[int, bool]:
    """Find the weights that Muon takes, as its author advises (Jordan 2024).

    They are the matrices of a model's body that are neither embeddings nor its head. A tensor of three dimensions has
    one for each expert. AdamW gets the rest.

    Returns:
        By the id of a parameter, whether rows of its matrices are inputs.

    """
    from transformers.pytorch_utils import Conv1D

    body: Any = getattr(model, "base_model", model)
    tables = _tables(model, body)
    sideways_by_id: dict[int, bool] = {}
    for module in body.modules():
        experts = list(_experts(module))
        if experts:  # What else is there are biases, of two dimensions.
            sideways = bool(getattr(module, "is_transposed", type(module).__name__ in _TRANSPOSED))
            sideways_by_id |= {id(parameter): sideways for parameter in experts}
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 and id(parameter) not in tables:
                sideways_by_id[id(parameter)] = isinstance(module, Conv1D)
    return sideways_by_id


def _tables(model: Any, body: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings and head."""
    outer = [module for module in body.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        outer.append(head)
    return {id(parameter) for module in outer for parameter in module.parameters()}


def _experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of a module that have a matrix for each of its experts."""
    count = getattr(module, "num_experts", None)
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 3 and parameter.shape[0] == count:
            yield parameter


def shares(model: nn.Module) -> dict[str, int]:
    """Count the trained parameters of a model by kind; Muon takes the matrices, and AdamW the others."""
    body: Any = getattr(model, "base_model", model)
    taken = muon_weights(model)
    tables = _tables(model, body)
    counts = dict.fromkeys((MATRICES, "embeddings and head", "vectors", "other tensors"), 0)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in taken:
            kind = MATRICES
        elif id(parameter) in tables:
            kind = "embeddings and head"
        else:
            kind = "vectors" if parameter.ndim < 2 else "other tensors"
        counts[kind] += parameter.numel()
    return {kind: count for kind, count in counts.items() if count}
