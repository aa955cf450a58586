"""New weights that go down coded: what the server keeps of them, and that it is a function of its arguments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hypha_ray.codec import difference_codec, payload_bytes
from hypha_ray.server.payloads import add_left_out, encode_result, split_state
from hypha_ray.types import Contribution, Flat, Verdict

GROUP = "parameters/float32"
CODEC = difference_codec("e3m0")
TAKEN = Verdict(3, (Contribution(0, 1, 8, 1.0),), (), 1.0)


def flat(seed: int) -> Flat:
    array = np.random.default_rng(seed).standard_normal(3000).astype(np.float32)
    array.flags.writeable = False
    return {GROUP: array}


def once(theta: Flat, momentum: Flat, new: Flat) -> tuple[Flat, Flat, Flat, Verdict]:
    assert CODEC is not None
    own, residual = split_state(momentum)
    return encode_result(CODEC, 1.0, theta, residual, ({GROUP: new[GROUP].copy()}, own, TAKEN))


def test_whole_weights_have_the_bfloat16_form_of_those_that_workers_have() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3000, generator=generator) * 0.02
    left_out = torch.randn(3000, generator=generator) * 1e-4
    whole = weights.clone()
    add_left_out(whole, left_out)
    shown = weights.bfloat16().view(torch.int16)
    assert torch.equal(whole.bfloat16().view(torch.int16), shown)
    stays = (weights + left_out).bfloat16().view(torch.int16) == shown
    assert 0.2 < stays.float().mean() < 0.9
    assert torch.equal(whole, torch.where(stays, weights + left_out, weights))


def test_what_is_residual_is_part_of_the_state_and_comes_back() -> None:
    theta, first, second = flat(0), flat(1), flat(2)
    new, state, payload, verdict = once(theta, first, second)
    assert state.keys() == {GROUP, f"left-out/{GROUP}"} and state[GROUP] is first[GROUP]
    assert verdict == replace(TAKEN, coded_bytes=payload_bytes(payload)) and verdict.coded_bytes > 0
    assert np.abs(new[GROUP] + state[f"left-out/{GROUP}"] - second[GROUP]).max() < 1e-6
    own, residual = split_state(state)
    assert own.keys() == residual.keys() == {GROUP}
    assert payload.keys() == {f"{GROUP}/codes", f"{GROUP}/scales"}


def test_same_arguments_give_the_same_bits() -> None:
    state = {GROUP: flat(1)[GROUP], f"left-out/{GROUP}": flat(5)[GROUP]}
    one, other = (once(flat(0), state, flat(2)) for _ in range(2))
    for a, b in zip(one[:3], other[:3], strict=True):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_round_of_which_nothing_was_taken_changes_nothing() -> None:
    assert CODEC is not None
    theta, residual, nothing = flat(0), flat(5), Verdict(3, (), (), 0.0)
    new, state, payload, _ = encode_result(CODEC, 1.0, theta, residual, (theta, {}, nothing))
    assert new is theta and state[f"left-out/{GROUP}"] is residual[GROUP] and payload == {}
