"""A step in each process of a worker whose model is sharded, on tensors without memory, as FSDP2 takes it.

    always                     a part of weights and of the optimizer's state
    forward and backward       all weights outside of blocks, gathered
    block, forward             its weights, gathered
    block, backward            its weights and the next one's, its gradients, and a copy of them that is summed up
    after a block's backward   a part of its gradients; the copy, until the next one is made

Measured on CPUs, where collectives are those of gloo.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hypha_ray.worker.group.shards import blocks_of


class SketchedShards:
    """Hooks of a model without values that take what FSDP2 takes, beside the model's own tensors.

    Args:
        network: the model.
        processes: number of processes.

    """

    def __init__(self, network: nn.Module, processes: int) -> None:
        self._pieces = {one: _piece(one, processes) for one in network.parameters()}
        self._shapes = {piece: one.shape for one, piece in self._pieces.items()}
        self.pieces = nn.ParameterList(piece for piece in self._pieces.values() if piece.requires_grad)
        """The first process's parts of trained parameters, on which its optimizer steps."""
        self.weights = bytes_of([*self._pieces.values(), *network.buffers()])
        """Bytes of all parts of weights in the first process."""
        self._held: dict[Any, Tensor] = {}
        """Memory of gathered weights by block, and that of the latest copy of gradients by None."""
        blocks = blocks_of(network)
        inside = set[nn.Parameter]()
        for block, following in zip(blocks, [None, *blocks], strict=False):
            own = list(block.parameters())
            inside.update(own)
            ahead = [] if following is None else list(following.parameters())
            block.register_forward_pre_hook(partial(self._gather, block, own))
            block.register_forward_hook(partial(self._free, block))
            block.register_full_backward_pre_hook(partial(self._gather, block, [*own, *ahead]))
            self._sum_up(block, own)
        outside = [one for one in self._pieces if one not in inside]
        network.register_forward_pre_hook(partial(self._gather, network, outside))
        self._sum_up(network, outside)

    def _gather(self, module: nn.Module, parameters: list[nn.Parameter], *_: Any) -> None:
        self._held[module] = torch.empty(bytes_of(parameters), dtype=torch.uint8)

    def _free(self, module: nn.Module, *_: Any) -> None:
        self._held.pop(module, None)

    def _sum_up(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Have gradients summed up as soon as the last one of a module is there, and its weights freed."""
        trained = [one for one in parameters if one.requires_grad]
        missing = set(trained)

        def arrived(parameter: nn.Parameter) -> None:
            missing.discard(parameter)
            if not missing:
                missing.update(trained)
                self._held[None] = torch.empty(bytes_of(trained), dtype=torch.uint8)
                for one in trained:
                    one.grad = None
                    self._pieces[one].grad = torch.empty_like(self._pieces[one])
                self._free(module)

        for one in trained:
            one.register_post_accumulate_grad_hook(arrived)

    def piece_of(self, parameter: Tensor) -> Tensor:
        """Return the first process's part of a parameter."""
        return self._pieces[cast("nn.Parameter", parameter)]

    def shape_of(self, piece: Tensor) -> torch.Size:
        """Return the shape of the parameter that a part is of."""
        return self._shapes[cast("nn.Parameter", piece)]

    def whole(self, part: Tensor, piece: Tensor) -> Tensor:
        """Return a tensor of the size that is gathered."""
        return torch.empty(self.shape_of(piece), dtype=part.dtype, device=part.device)

    def part(self, whole: Tensor, piece: Tensor) -> Tensor:
        """Return the first process's part of a whole tensor."""
        return whole[: len(piece)]

    def end_backward(self) -> None:
        """Free what the backward pass held."""
        self._held.clear()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; those that are there twice count once."""
    return sum(one.numel() * one.element_size() for one in {id(one): one for one in tensors}.values())


def _piece(parameter: nn.Parameter, processes: int) -> nn.Parameter:
    """The largest part of a parameter that is cut along its first dimension."""
    first = -(-parameter.shape[0] // processes) if parameter.ndim else 1
    empty = torch.empty((first, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, parameter.requires_grad)
