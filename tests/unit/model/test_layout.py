"""Layouts: weights as flat arrays by groups and fragments, and tensors as arrays and back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.model import layout as lay
from hypha_ray.model.layout import array_of, empty, gather, layout_of, load, pack, scatter, tensor_of, views
from hypha_ray.types import Entry, Layout
from tests.support.small_models import RESNET

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 32}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def causal_lm(seed: int = 0, **settings: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))


def resnet(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForImageClassification.from_config(AutoConfig.for_model(**RESNET))


def frozen(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for array in flat.values():
        array.flags.writeable = False
    return flat


def names(layout: Layout) -> list[str]:
    return [entry.name for entry in layout.entries]


def copy_over(source: torch.nn.Module, target: torch.nn.Module, fragments: int = 1) -> Layout:
    layout = layout_of(source, fragments)
    for fragment in range(fragments):
        scatter(target, layout, fragment, frozen(gather(source, layout, fragment)))
    return layout


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class Mixed(torch.nn.Module):
    """Every kind of tensor that a layout tells apart."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.low = torch.nn.Parameter(torch.randn(3, 5, generator=draws).bfloat16())
        self.wide = torch.nn.Parameter(torch.randn(4, generator=draws).double())
        self.single = torch.nn.Parameter(torch.randn(2, 3, generator=draws).t())
        self.scalar = torch.nn.Parameter(torch.randn((), generator=draws))
        self.still = torch.nn.Parameter(torch.randn(7, generator=draws), requires_grad=False)
        self.register_buffer("mean", torch.randn(6, generator=draws))
        self.register_buffer("steps", torch.tensor(seed + 2**40))
        self.register_buffer("seen", torch.rand(9, generator=draws) < 0.5)
        self.register_buffer("cache", torch.randn(6, generator=draws), persistent=False)
        self.register_buffer("again", self.single)


@pytest.mark.parametrize(
    "settings", [GPT2, LLAMA | {"tie_word_embeddings": True}, LLAMA], ids=["gpt2", "tied llama", "llama"]
)
@pytest.mark.parametrize("fragments", [1, 3])
def test_round_trip_language_model_is_exact(settings: dict[str, Any], fragments: int) -> None:
    source, target = causal_lm(0, **settings), causal_lm(1, **settings)
    assert not equal(source, target)
    copy_over(source, target, fragments)
    assert equal(source, target)


@pytest.mark.parametrize("settings", [GPT2, LLAMA | {"tie_word_embeddings": True}], ids=["gpt2", "llama"])
def test_layout_tied_weights_stand_once_and_stay_tied(settings: dict[str, Any]) -> None:
    source, target = causal_lm(0, **settings), causal_lm(1, **settings)
    layout = copy_over(source, target)
    (alias, name), *rest = layout.tied
    assert not rest
    assert alias == "lm_head.weight"
    assert name in names(layout)
    assert alias not in names(layout)
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    assert sum(entry.size for entry in layout.entries) == sum(p.numel() for p in source.parameters())


def test_layout_buffers_that_are_not_saved_are_not_sent() -> None:
    source = causal_lm(**LLAMA)
    assert any("inv_freq" in name for name, _ in source.named_buffers())
    assert not any("inv_freq" in name for name in names(layout_of(source)))


def test_round_trip_batch_norm_sends_statistics_and_counters() -> None:
    source, target = resnet(0), resnet(1)
    source.train()
    source(pixel_values=torch.rand(4, 1, 32, 32))
    layout = copy_over(source, target, 2)
    assert equal(source, target)
    counters = [entry for entry in layout.entries if entry.name.endswith("num_batches_tracked")]
    assert counters
    assert {(entry.group, entry.fragment) for entry in counters} == {("buffers/int64", 0)}
    assert {e.group for e in layout.entries if e.name.endswith("running_mean")} == {"buffers/float32"}


def test_layout_mixed_model_has_each_tensor_in_its_group() -> None:
    model = Mixed()
    layout = layout_of(model)
    assert {entry.name: (entry.dtype, entry.group, entry.shape) for entry in layout.entries} == {
        "low": ("bfloat16", "parameters/float32", (3, 5)),
        "wide": ("float64", "parameters/float64", (4,)),
        "single": ("float32", "parameters/float32", (3, 2)),
        "scalar": ("float32", "parameters/float32", ()),
        "mean": ("float32", "buffers/float32", (6,)),
        "steps": ("int64", "buffers/int64", ()),
        "seen": ("bool", "buffers/uint8", (9,)),
    }
    assert layout.tied == (("again", "single"),)
    flat = gather(model, layout, 0)
    assert {group: (array.dtype.name, array.shape) for group, array in flat.items()} == {
        "parameters/float32": ("float32", (22,)),
        "parameters/float64": ("float64", (4,)),
        "buffers/float32": ("float32", (6,)),
        "buffers/int64": ("int64", (1,)),
        "buffers/uint8": ("uint8", (9,)),
    }
    assert flat["buffers/int64"][0] == 2**40
    assert all(array.flags.c_contiguous and array.flags.owndata for array in flat.values())


def test_round_trip_mixed_model_is_exact_and_leaves_frozen_and_unsaved_alone() -> None:
    source, target, before = Mixed(0), Mixed(1), Mixed(1)
    copy_over(source, target)
    for name in ("low", "wide", "single", "scalar", "mean", "steps", "seen", "again"):
        assert torch.equal(getattr(target, name), getattr(source, name))
    for name in ("still", "cache"):
        assert torch.equal(getattr(target, name), getattr(before, name))
    assert target.low.dtype == torch.bfloat16
    assert target.again.data_ptr() == target.single.data_ptr()


def test_layout_parameters_of_one_memory_are_tied() -> None:
    model = torch.nn.Module()
    model.one = torch.nn.Parameter(torch.rand(3))
    model.two = torch.nn.Parameter(model.one.detach())
    assert layout_of(model).tied == (("two", "one"),)


def test_layout_empty_tensors_are_not_taken_for_tied() -> None:
    model = torch.nn.Module()
    model.one, model.two = (torch.nn.Parameter(torch.rand(0, 3)) for _ in range(2))
    assert names(layout_of(model)) == ["one", "two"]


def test_layout_of_meta_model_is_that_of_the_real_one() -> None:
    config = AutoConfig.for_model(**GPT2)
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config)
    assert layout_of(shell, 3).sha256() == layout_of(causal_lm(**GPT2), 3).sha256()


def test_layout_same_model_same_fingerprint_other_model_another() -> None:
    assert layout_of(causal_lm(0, **GPT2)).sha256() == layout_of(causal_lm(1, **GPT2)).sha256()
    assert layout_of(causal_lm(**GPT2)).sha256() != layout_of(causal_lm(**GPT2 | {"n_embd": 12})).sha256()
    assert layout_of(causal_lm(**GPT2)).sha256() != layout_of(causal_lm(**GPT2), 2).sha256()


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data())
def test_layout_fragments_are_contiguous_non_empty_and_about_equal(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    model = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
    layout = layout_of(model, parts)
    assert [entry.fragment for entry in layout.entries] == sorted(entry.fragment for entry in layout.entries)
    bytes_of = [sum(layout.groups(fragment).values()) for fragment in range(parts)]
    assert min(bytes_of) > 0
    assert sum(bytes_of) == sum(sizes)
    assert max(bytes_of) <= sum(sizes) / parts + 2 * max(sizes)


@pytest.mark.parametrize("fragments", [0, 29, -1])
def test_layout_impossible_number_of_fragments_raises(fragments: int) -> None:
    with pytest.raises(ConfigError, match=rf"MODEL009.*sync.fragments.*got {fragments}, allowed 1 to 28"):
        layout_of(causal_lm(**GPT2), fragments)


def test_layout_as_many_fragments_as_tensors_has_one_each() -> None:
    assert [entry.fragment for entry in layout_of(causal_lm(**GPT2), 28).entries] == list(range(28))


def test_strided_layout_deals_layers_out_in_turn_and_fills_up_with_the_rest() -> None:
    layout = layout_of(causal_lm(**GPT2 | {"n_layer": 5}), 2, "strided")
    of = {entry.name: entry.fragment for entry in layout.entries}
    for layer in range(5):
        assert {fragment for name, fragment in of.items() if f".h.{layer}." in name} == {layer % 2}
    assert of["transformer.wte.weight"] == 1, "the odd layers are fewer"
    sizes = [sum(layout.groups(fragment).values()) for fragment in range(2)]
    assert sum(sizes) == sum(layout_of(causal_lm(**GPT2 | {"n_layer": 5})).groups(0).values())


def test_strided_layout_needs_as_many_layers_as_fragments() -> None:
    with pytest.raises(ConfigError, match=r"MODEL009.*sync.fragments.*got 3, allowed 1 to 2, its layers"):
        layout_of(causal_lm(**GPT2), 3, "strided")


@pytest.mark.parametrize(
    ("partition", "text"), [("contiguous", "parameters that require gradients"), ("strided", "sync.partition")]
)
def test_model_without_what_fragments_are_cut_of_is_refused_with_a_remedy(partition: Any, text: str) -> None:
    network = torch.nn.Linear(2, 2).requires_grad_(partition == "strided")
    with pytest.raises(ConfigError, match=rf"MODEL009.*can't be cut into fragments by its .* Fix: .*{text}"):
        layout_of(network, 1, partition)


def test_mixing_keeps_a_part_of_the_models_own_parameters_and_no_buffer() -> None:
    model = Mixed()
    layout = layout_of(model)
    own, new = gather(model, layout, 0), gather(model, layout, 0)
    new |= {group: array + array.dtype.type(1) for group, array in new.items() if "float" in group}
    scatter(model, layout, 0, new, 0.25)
    for group, array in gather(model, layout, 0).items():
        kept = 0.25 if group.startswith("parameters/") else 0.0
        assert np.allclose(array, new[group] + kept * (own[group] - new[group]), atol=0.01), group


def test_layout_complex_parameter_raises() -> None:
    model = torch.nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    with pytest.raises(ConfigError, match=r"MODEL009.*complex64"):
        layout_of(model)


def test_gather_is_a_snapshot_and_reuses_given_arrays() -> None:
    model = Mixed()
    layout = layout_of(model)
    flat = gather(model, layout, 0)
    before = flat["parameters/float64"].copy()
    with torch.no_grad():
        model.wide.add_(1)
    assert np.array_equal(flat["parameters/float64"], before)
    arrays = {group: id(array) for group, array in flat.items()}
    again = gather(model, layout, 0, out=flat)
    assert {group: id(array) for group, array in again.items()} == arrays
    assert np.array_equal(again["parameters/float64"], before + 1)


def test_scatter_read_only_arrays_stay_as_they_are_and_are_not_shared() -> None:
    model, layout = Mixed(0), layout_of(Mixed(0))
    flat = frozen(gather(Mixed(1), layout, 0))
    before = {group: array.copy() for group, array in flat.items()}
    scatter(model, layout, 0, flat)
    with torch.no_grad():
        model.single.mul_(2)
        model.mean.mul_(2)
    assert all(np.array_equal(flat[group], before[group]) for group in flat)
    assert not any(array.flags.writeable for array in flat.values())


def test_scatter_in_place_keeps_parameters_and_optimizer_state() -> None:
    model = causal_lm(**GPT2)
    identities = [id(parameter) for parameter in model.parameters()]
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    copy_over(causal_lm(1, **GPT2), model)
    assert identities == [id(parameter) for parameter in model.parameters()]
    assert memory == [parameter.data_ptr() for parameter in model.parameters()]
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


@pytest.mark.parametrize("spoil", ["missing", "foreign", "short", "dtype"])
def test_scatter_arrays_of_another_layout_raise_and_change_nothing(spoil: str) -> None:
    model, layout = Mixed(0), layout_of(Mixed(0))
    flat = gather(Mixed(1), layout, 0)
    match spoil:
        case "missing":
            del flat["buffers/float32"]
        case "foreign":
            flat["parameters/float16"] = np.zeros(3, np.float16)
        case "short":
            flat["buffers/float32"] = flat["buffers/float32"][:-1]
        case "dtype":
            flat["parameters/float32"] = flat["parameters/float32"].astype(np.float64)
    with pytest.raises(CheckpointError, match="MODEL010"):
        scatter(model, layout, 0, flat)
    assert equal(model, Mixed(0))


def test_views_are_named_tensors_in_shape_without_copies() -> None:
    source = causal_lm(**GPT2)
    layout = layout_of(source, 3)
    flats = [gather(source, layout, fragment) for fragment in range(3)]
    named = views(layout, flats)
    assert list(named) == names(layout)
    assert "lm_head.weight" not in named
    for name, array in named.items():
        assert np.array_equal(array, source.get_parameter(name).detach().numpy())
        assert any(np.shares_memory(array, flat["parameters/float32"]) for flat in flats)


def test_views_without_a_fragment_raise() -> None:
    layout = layout_of(causal_lm(**GPT2), 2)
    with pytest.raises(CheckpointError, match="MODEL010"):
        views(layout, [empty(layout, 0), empty(layout, 0)])


def test_pack_is_the_inverse_of_views() -> None:
    source = Mixed()
    layout = layout_of(source, 2)
    flats = [gather(source, layout, fragment) for fragment in range(2)]
    for fragment, flat in enumerate(flats):
        packed = pack(layout, fragment, views(layout, flats))
        assert all(np.array_equal(packed[group], flat[group]) for group in flat)


def test_load_named_tensors_restores_the_model() -> None:
    source, target = causal_lm(0, **GPT2), causal_lm(1, **GPT2)
    layout = layout_of(source)
    load(target, layout, views(layout, [frozen(gather(source, layout, 0))]))
    assert equal(source, target)


@pytest.mark.parametrize(
    ("spoil", "text"), [("missing", "1 missing"), ("foreign", "1 unknown"), ("shape", "1 of another shape")]
)
def test_load_other_names_or_shapes_raise_and_change_nothing(spoil: str, text: str) -> None:
    model, layout = causal_lm(0, **GPT2), layout_of(causal_lm(0, **GPT2))
    tensors = views(layout, [gather(causal_lm(1, **GPT2), layout, 0)])
    name = "transformer.h.0.ln_1.weight"
    match spoil:
        case "missing":
            del tensors[name]
        case "foreign":
            tensors["other"] = tensors[name]
        case "shape":
            tensors[name] = tensors[name][:-1]
    with pytest.raises(CheckpointError, match=rf"MODEL010.*{text} \({'other' if spoil == 'foreign' else name}\)"):
        load(model, layout, tensors)
    assert equal(model, causal_lm(0, **GPT2))


def test_views_need_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, hypha_ray.model.flat; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_layout_offsets_follow_each_other_within_a_group() -> None:
    layout = layout_of(Mixed(), 2)
    for fragment in range(2):
        for group, size in layout.groups(fragment).items():
            entries: list[Entry] = [e for e in layout.entries if (e.fragment, e.group) == (fragment, group)]
            assert [entry.offset for entry in entries] == [
                sum(e.size for e in entries[:i]) for i in range(len(entries))
            ]
            assert sum(entry.size for entry in entries) == size
            assert lay.empty(layout, fragment)[group].shape == (size,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_values_of_every_dtype_come_back_from_memory_that_may_only_be_read(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    sent = np.frombuffer(array_of(tensor).tobytes(), array_of(tensor).dtype).reshape(shape)
    assert not sent.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tensor_of(sent)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_an_array_of_a_tensor_on_the_cpu_is_no_copy() -> None:
    tensor = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    array = array_of(tensor)
    with torch.no_grad():
        tensor.fill_(1)
    assert torch.equal(tensor_of(array), torch.ones(4, dtype=torch.bfloat16))
