"""Trials of members that users bring, on small examples, before a run starts; see the contracts of families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hypha_ray.codec.base import difference_codec
from hypha_ray.codec.feedback import BLOCK, Feedback, publish, tensors
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.optim.optimizers import build_own
from hypha_ray.optim.schedules import own_factor
from hypha_ray.plugins import find
from hypha_ray.server.merge import own_merge, own_weights
from hypha_ray.server.outer import Group, own_step
from hypha_ray.types import Flat

_GROUP = "parameters/float32"
"""Group of the values of a trial."""
_FEW = 1000
"""Elements of a trial, beside a part of a chunk."""
_STEPS = 10
"""Length of a trial of a schedule, in steps."""
_TRIAL_BLOCKS = (slice(0, 3), slice(3, 8))
"""Two blocks of eight elements, as a user's rule is tried."""


def try_codec(name: str, options: Mapping[str, Any] | None) -> None:
    """Encode values twice and decode them as a server does, and encode changes of weights in both directions.

    Raises:
        ConfigError: COD002, compiled loops of the codec can't be had.
        ValueError: the payload differs from the codec's `form`, or is decoded to other values than the encoder saw.

    """
    codec = difference_codec(name, options)
    receiver = difference_codec(name, options)
    assert codec is not None and receiver is not None
    if codec.chunk < 1 or BLOCK % codec.chunk:
        raise ValueError(f"a chunk of {codec.chunk} elements, which doesn't divide {BLOCK}")
    _require_apart(codec)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_FEW + codec.chunk // 2, generator=generator)
    sender = Feedback(codec, 1.0)
    forms = codec.form({_GROUP: len(values)})
    for _ in range(2):
        target = values
        if sender.residual:
            target = values + torch.from_numpy(sender.residual[_GROUP])
        payload, _quality = sender.encode({_GROUP: values.numpy()}, None)
        for part, form in forms.items():
            array = payload.get(part)
            if array is None or array.dtype.name != form.dtype or (form.exact and array.size != form.size):
                raise ValueError(f"the payload's {part} isn't {form.size} elements of {form.dtype}")
        decoded = receiver.decode(tensors(payload), _GROUP, slice(None))[: len(values)]
        if not torch.isfinite(decoded).all():
            raise ValueError("finite values are decoded to some that aren't")
        if not torch.allclose(target - decoded, torch.from_numpy(sender.residual[_GROUP]), atol=1e-6):
            raise ValueError("a payload is decoded to other values than expand gave when it was made")
    theta: Flat = {_GROUP: values.numpy()}
    new_theta: Flat = {_GROUP: values.numpy() * np.float32(1.001)}
    Feedback(codec.upward(), 1.0).encode(new_theta, theta)
    publish(codec.downward(), 1.0, theta, new_theta, {})


def _require_apart(codec: Chunked) -> None:
    """Refuse a codec that decodes a chunk by others, or that makes one of zeros infinite.

    Raises:
        ValueError: it does.

    """
    chunks = torch.zeros(3, codec.chunk)
    chunks[0] = torch.randn(codec.chunk, generator=torch.Generator().manual_seed(1))
    chunks[1] = 1000 * chunks[0]
    parts = codec.compress(chunks)
    decoded = codec.expand(parts).view_as(chunks)
    if not torch.isfinite(decoded).all():
        raise ValueError("a chunk of zeros is decoded to values that aren't finite")
    for row in range(len(chunks)):
        own_parts = {name: array[row, None] for name, array in parts.items()}
        if not torch.allclose(codec.expand(own_parts).view(-1), decoded[row], rtol=1e-5, atol=0.0):
            raise ValueError("a chunk is decoded to other values by itself than beside others")


def try_outer(name: str, options: Mapping[str, Any] | None) -> None:
    """Take two steps on a few parameters, whole and in two blocks, which have to be equal.

    Raises:
        ValueError: a step depends on other elements, or gives values that aren't finite.

    """
    outer = OuterOptimizer(name=name, name_options=None if options is None else dict(options))
    names = find("outer_optimizers", name).slots
    if isinstance(names, str) or not all(isinstance(slot, str) for slot in names) or len(set(names)) < len(names):
        raise ValueError(f"slots are {names!r}, not different names such as ('velocity',)")
    slots = len(names)
    theta = torch.randn(8, generator=torch.Generator().manual_seed(0))
    delta = torch.randn(8, generator=torch.Generator().manual_seed(1))
    results = []
    for parts in ([slice(0, 8)], [slice(0, 3), slice(3, 8)]):
        old_theta = theta.clone()
        state = [torch.zeros(8) for _ in range(slots)]
        for round in range(2):
            new_state = [torch.empty(8) for _ in range(slots)]
            group = Group(old_theta, state, torch.empty(8), new_state, relative=True)
            step = own_step(outer, 0.5, round, group)
            for part in parts:
                change = step(delta[part], torch.empty(8)[part], part)
                if not math.isfinite(change):
                    raise ValueError("a step on finite values gives some that aren't")
            old_theta = group.new_theta
            state = new_state
        results.append([old_theta, *state])
    if not all(map(torch.equal, *results)):
        raise ValueError("a step depends on other elements of the parameters than its own")


def try_merge(name: str, options: Mapping[str, Any] | None) -> None:
    """Merge deltas of one worker and of three, whole and in two blocks, which have to be equal.

    Raises:
        ValueError: the rule depends on other elements than the merged one, or gives values that aren't finite.

    """
    all_deltas = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        all_deltas.append(torch.randn(8, generator=generator))
    for count in (1, 3):
        merge = own_merge(name, options, [1.0, 2.0, 3.0][:count])
        deltas = all_deltas[:count]
        whole_merge = merge(deltas, torch.empty(8)).clone()
        parts = []
        for part in _TRIAL_BLOCKS:
            block_deltas = [delta[part] for delta in deltas]
            block_merge = merge(block_deltas, torch.empty(8)[part])
            parts.append(block_merge.clone())
        if not torch.isfinite(whole_merge).all():
            raise ValueError("finite deltas are merged to values that aren't")
        if not torch.equal(whole_merge, torch.cat(parts)):
            raise ValueError("the rule depends on other elements of the deltas than the merged one")


def try_weighting(name: str, options: Mapping[str, Any] | None) -> None:
    """Weigh one delta, equal ones, and different ones.

    Raises:
        ValueError: they have no weights.

    """
    for samples in ([1], [4, 4], [3, 5, 2]):
        own_weights(name, options, samples)


def try_optimizer(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a user's optimizer for two steps.

    Raises:
        ValueError: the class is no optimizer of torch, or the parameter becomes infinite or NaN.

    """
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    table = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0}
    optimizer = build_own(name, options, [parameter], table)
    if not isinstance(optimizer, torch.optim.Optimizer):
        class_name = type(optimizer).__name__
        raise ValueError(f"a {class_name}, which isn't derived from torch.optim.Optimizer")
    for group in optimizer.param_groups:
        if any(trained is not parameter for trained in group["params"]):
            raise ValueError("other parameters than those of the model, which it was given")
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError('a group of parameters without "lr", which schedules set')
    for _ in range(2):
        parameter.grad = torch.full((2, 3), 0.5)
        optimizer.step()
    if not torch.isfinite(parameter).all():
        raise ValueError("steps on finite gradients give values that aren't")


def try_schedule(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a user's schedule for a few steps, and between them: a worker's position may be a fraction.

    Raises:
        ValueError: a factor is negative, or isn't finite.

    """
    factor = own_factor(name, options, _STEPS, 2)
    for half_step in range(2 * _STEPS + 1):
        factor(half_step / 2)
