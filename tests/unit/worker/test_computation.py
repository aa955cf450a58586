"""Settings of a worker's model are those chosen for it; what fails is left off, and usual batches are compiled."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hypha_ray.config.automatic import OFF, DeviceFacts, chosen_job, settings_of
from hypha_ray.config.schema import Job
from hypha_ray.config.training import InnerOptimizer
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import skeleton, task_of
from hypha_ray.model.execution import (
    ADMITTED_AFTER,
    CompiledByShape,
    compile_layers,
    missing_to_compile,
    model_facts,
    peak_operations,
    resolved_job,
    token_operations,
)
from hypha_ray.model.layout import blocks_of
from hypha_ray.model.losses import Losses
from hypha_ray.types import Samples
from hypha_ray.worker.batches import Computation
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.jobs import MODEL
from tests.support.slow_device import use_slow_device

GPU = DeviceFacts("cuda", "NVIDIA H200", (9, 0), compiles=True)
LLAMA = {**MODEL, "vocab_size": 40_000}
"""A vocabulary whose logits of 32 × 32 tokens are more than a chunk."""
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 8}
T5 = {"model_type": "t5", "vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
RESNET = {"model_type": "resnet", "depths": [1], "hidden_sizes": [4]}
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_head": 4, "n_positions": 64} | dict.fromkeys(
    ("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0
)
GEMMA_3 = {**MODEL, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16}
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2}
ATTENTION = {"kv_n_heads": 2, "rope_theta": 10_000.0}
EXPERTS = {"ffn_hidden_size": 32, "moe_num_experts": 4, "hidden_size": 32}
DBRX = {"model_type": "dbrx", "vocab_size": 384, "d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64,
        "attn_config": ATTENTION, "ffn_config": EXPERTS}  # fmt: skip


def job_of(config: dict[str, Any], task: str = "causal-lm", **worker: Any) -> Job:
    tables = {"model": {"config": config, "type": task}, "worker": {"device": "cpu", **worker}}
    return Job.model_validate(tables).with_sample_tokens(32)


def batch(rows: int = 4) -> Samples:
    ids = np.random.default_rng(0).integers(3, 300, (rows, 32))
    return Samples({"input_ids": ids}, np.zeros((rows, 3), np.int64))


@pytest.mark.parametrize(
    ("config", "task", "expected"),
    [
        (LLAMA, "causal-lm", {"autocast": "bf16", "fused_loss": True, "attention": "sdpa"}),
        ({**LLAMA, "dtype": "bfloat16"}, "causal-lm", {"fused_loss": True, "attention": "sdpa"}),
        (MIXTRAL, "causal-lm", {"autocast": "bf16", "fused_loss": True, "attention": "sdpa"}),
        (GEMMA, "causal-lm", {"autocast": "bf16"}),
        (RESNET, "image-classification", {"autocast": "bf16"}),
    ],
    ids=["llama", "llama of 16 bits", "experts", "capped logits", "images"],
)
def test_chosen_settings_are_those_that_the_model_allows(
    config: dict[str, Any], task: str, expected: dict[str, Any]
) -> None:
    """A CPU takes a step with what a GPU would choose, so no check of a setting refuses it."""
    job = job_of(config, task)
    found = chosen_job(job, GPU, model_facts(job, skeleton(job.model)))
    assert settings_of(found) == {**OFF, **expected}
    trainer = SupervisedTrainer(found)
    if task == "causal-lm":
        step = trainer.step(batch())
        assert step.loss.isfinite() and not step.problems


def test_facts_of_a_model_are_those_of_its_configuration() -> None:
    facts = {name: model_facts(job, skeleton(job.model)) for name, job in
             {"llama": job_of(LLAMA), "mixtral": job_of(MIXTRAL), "dbrx": job_of(DBRX),
              "t5": job_of(T5, "seq2seq-lm")}.items()}  # fmt: skip
    llama = facts["llama"]
    assert (llama.layers, llama.features, llama.vocabulary) == (MODEL["num_hidden_layers"], MODEL["hidden_size"], 40000)
    assert [facts[name].routed for name in facts] == [False, True, True, False]
    assert [facts[name].fuses for name in ("llama", "mixtral", "t5")] == [True, True, False]
    assert not any(one.narrow or one.foreign or one.adapted for one in facts.values())


def test_without_a_gpu_a_worker_computes_as_it_always_did() -> None:
    job = resolved_job(job_of(LLAMA))
    assert settings_of(job) == OFF and set(job.reasons.values()) == {"no GPU"}
    default, plain = SupervisedTrainer(job_of(LLAMA)), SupervisedTrainer(job_of(LLAMA, **OFF))
    assert torch.equal(default.step(batch()).loss, plain.step(batch()).loss)
    assert all(torch.equal(*pair) for pair in zip(default.model.parameters(), plain.model.parameters(), strict=True))


class Failing(torch.nn.Module):
    """A model that some setting breaks.

    Args:
        breaks: whether it breaks with the first batch in full precision, too.

    """

    def __init__(self, model: Any, breaks: bool = False) -> None:
        super().__init__()
        self.inner, self.config, self.breaks = model, model.config, breaks

    def forward(self, **inputs: Any) -> Any:
        if self.breaks or torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no kernel of 16 bits")
        return self.inner(**inputs)


def computation(breaks: bool = False, reasons: dict[str, str] | None = None) -> Callable[[], Losses]:
    job = job_of(MODEL).with_worker({**OFF, "autocast": "bf16"}, {"autocast": "why"} if reasons is None else reasons)
    trainer = SupervisedTrainer(job.with_worker(OFF, {}))
    model = Failing(trainer.model, breaks)
    computed = Computation(job, task_of(job.model, trainer.model), model, keeps_copies=True)
    inputs = {name: torch.from_numpy(array) for name, array in batch().arrays.items()}
    inputs["labels"] = inputs["input_ids"]
    result = computed(inputs, torch.device("cpu"))
    said = "what was chosen doesn't work here, and is left off (RuntimeError: no kernel of 16 bits)"
    assert computed.autocast is None and computed.problems == (f"worker.autocast = auto: {said}",)
    assert computed.disabled == ("autocast",)
    expected = trainer._computation(inputs, torch.device("cpu"))
    assert torch.equal(result.trained, expected.trained)
    return lambda: computed(inputs, torch.device("cpu"))


def test_chosen_setting_that_fails_with_the_first_batch_is_left_off_and_said() -> None:
    again = computation()
    assert again().trained.isfinite()


def test_failure_that_no_setting_is_the_reason_of_and_a_given_setting_are_raised() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        computation(breaks=True)
    with pytest.raises(RuntimeError, match="no kernel"):
        computation(reasons={})


class Unbackward(torch.autograd.Function):
    """Code whose backward pass can't be compiled."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("no code for gradients")


@pytest.mark.parametrize("fails", [False, True])
def test_trial_of_compiled_code_is_of_its_gradients_too_and_leaves_no_trace(fails: bool) -> None:
    config = GPT2 | {"resid_pdrop": 0.5}

    def compiler(function: Any) -> Any:
        def run(inputs: Any) -> Any:
            losses = function(inputs)
            return losses._replace(trained=Unbackward.apply(losses.trained)) if fails else losses

        return run

    plain, tried = SupervisedTrainer(job_of(config)), SupervisedTrainer(job_of(config))
    computed = tried._computation
    computed._compute = CompiledByShape(computed._compute, compiler)
    computed._settings_on_trial = {"compile"}
    steps = []
    for trainer in (plain, tried):
        trainer.seed(0)
        steps.append(trainer.step(batch()))
    assert torch.equal(steps[0].loss, steps[1].loss)
    assert all(torch.equal(*pair) for pair in zip(plain.model.parameters(), tried.model.parameters(), strict=True))
    assert steps[1].disabled == (("compile",) if fails else ())


def test_problem_of_a_setting_reaches_the_loop_with_the_step() -> None:
    trainer = SupervisedTrainer(job_of(MODEL))
    trainer._computation.problems = ("a line",)
    trainer._computation.disabled = ("autocast",)
    step = trainer.step(batch())
    assert (step.problems, step.disabled) == (("a line",), ("autocast",))


def test_short_batch_is_computed_plainly_until_its_shape_is_usual() -> None:
    compiled: list[tuple[int, ...]] = []

    def compute(inputs: Any) -> Any:
        return inputs["x"].sum() * 2

    def compiler(function: Any) -> Any:
        def run(inputs: Any) -> Any:
            compiled.append(tuple(inputs["x"].shape))
            return function(inputs)

        return run

    by_shape = CompiledByShape(compute, compiler)
    rows = [8, 8, 3, 8, 5, 8, 3, 3, *[3] * ADMITTED_AFTER, 8]
    for count in rows:
        assert by_shape({"x": torch.ones(count, 2)}) == 4 * count
    admitted = rows.index(5) + 2 + ADMITTED_AFTER - 1
    assert compiled == [(count, 2) for place, count in enumerate(rows) if count == 8 or place >= admitted]


def test_search_for_damaged_samples_compiles_nothing() -> None:
    """Its batches are of one sample, one after the other."""
    compiled: list[int] = []

    def compiler(function: Any) -> Any:
        def run(inputs: Any) -> Any:
            compiled.append(len(inputs["input_ids"]))
            return function(inputs)

        return run

    trainer = SupervisedTrainer(job_of(MODEL))
    trainer._computation._compute = CompiledByShape(trainer._computation._compute, compiler)
    trainer.step(batch(8))
    assert trainer.find_damaged(batch(8)).all()
    trainer.step(batch(8))
    assert compiled == [8, 8]


class OfLogits(TorchDispatchMode):
    """Notes the operations that return as many numbers as there are logits, those of the backward pass included."""

    def __init__(self, logits: int) -> None:
        super().__init__()
        self.logits = logits
        self.operations: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.logits:
            self.operations.add(operation.name())
        return result


def test_logits_of_texts_are_not_cut_since_their_gradient_would_be_copied() -> None:
    with OfLogits(4 * 32 * LLAMA["vocab_size"]) as noted:
        SupervisedTrainer(job_of(LLAMA)).step(batch())
    assert "aten::_log_softmax_backward_data" in noted.operations
    assert "aten::slice_backward" not in noted.operations


@pytest.mark.parametrize("compiles", [True, "layers"])
def test_machine_that_cannot_compile_is_told_when_the_model_is_built(
    compiles: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the first batch, whose samples would be named as the reason."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"MODEL008.*worker\.compile.*cpu.*no sign of a compiler \(g\+\+"):
        SupervisedTrainer(job_of(MODEL, compile=compiles))


@pytest.mark.parametrize("place", ["lib/python", "Headers"])
@pytest.mark.parametrize("variable", ["CXX", "CC"])
def test_named_compilers_and_headers_are_looked_for(
    variable: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"CXX": "cpu", "CC": "cuda"}[variable]
    monkeypatch.setattr("sysconfig.get_path", lambda name, **scheme: str(tmp_path / "lib" / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv(variable, "mine")
    assert missing_to_compile(device) == ["Python's headers"]
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "Python.h").touch()
    assert missing_to_compile(device) == []
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [part.split(" (")[0] for part in missing_to_compile(device)] == ["a compiler"]


@pytest.mark.slow
def test_compiled_step_has_the_plain_losses_and_gradients_and_compiles_no_second_shape() -> None:
    """The graphs that torch traces are run as they are, so that no compiler is needed."""
    graphs: list[Any] = []
    returned: list[tuple[int, ...]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        (outputs,) = graph.graph.output_node().args
        returned.extend(tuple(node.meta["example_value"].shape) for node in outputs)
        return graph.forward

    plain, traced = SupervisedTrainer(job_of(MODEL)), SupervisedTrainer(job_of(MODEL))
    inner = traced._computation._compute
    compiler = lambda compute: torch.compile(compute, backend=backend, dynamic=False)  # noqa: E731
    traced._computation._compute = CompiledByShape(inner, compiler)
    counts = []
    for rows in (4, 4, 2, 4, 3, 4):
        losses = [one.step(batch(rows)).loss for one in (plain, traced)]
        assert torch.allclose(*losses, rtol=1e-6)
        counts.append(len(graphs))
    assert counts[0] >= 1 and set(counts) == {counts[0]}
    assert set(returned) == {()}, "a gradient of zeros is made for each of the logits that is returned"
    for expected, found in zip(plain.model.parameters(), traced.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "optimizer"), [(LLAMA, "adamw"), (GPT2, "adamw"), (LLAMA, "adafactor")], ids=["llama", "gpt2", "waited"]
)
def test_compiled_texts_without_padding_are_attended_to_without_a_mask(
    config: dict[str, Any], optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without compiling: with a mask, torch takes a slow kernel. Texts with padding keep theirs."""
    masks: list[Any] = []
    counts: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        masks.extend((node.kwargs["attn_mask"] is None, node.kwargs["is_causal"]) for node in nodes)
        return graph.forward

    use_slow_device(monkeypatch)
    inner = InnerOptimizer(name=optimizer)
    job = job_of(config).model_copy(update={"inner_optimizer": inner})
    plain, traced = SupervisedTrainer(job), SupervisedTrainer(job.with_worker({"compile": True}, {}))
    compute = traced._computation._plain
    compiler = lambda compute: torch.compile(compute, backend=backend, dynamic=False)  # noqa: E731
    traced._computation._compute = CompiledByShape(compute, compiler)
    for length in (32, 32, 20, 20, 32, 20):
        one = batch()
        one.arrays["attention_mask"] = np.ones_like(one.arrays["input_ids"])
        one.arrays["attention_mask"][1:, length:] = 0
        losses = [trainer.begin_step(one).result().loss for trainer in (plain, traced)]
        assert torch.allclose(*losses, rtol=1e-6)
        counts.append(len(masks))
    layers = counts[0]
    assert layers and masks == [(True, True)] * layers + [(False, False)] * layers
    assert counts == [layers] * 2 + [2 * layers] * 4, "a batch of the usual size is compiled either way"


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, GPT2, GEMMA_3], ids=["llama", "gpt2", "gemma of two kinds of layers"])
def test_compiled_layers_have_the_plain_losses_and_gradients_and_share_their_code(config: dict[str, Any]) -> None:
    """The graphs that torch traces are run as they are; four layers need no more of them than two."""
    graphs_of: dict[int, int] = {}
    for layers in (2, 4):
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        sized = config | {"num_hidden_layers": layers}
        if config is GEMMA_3:
            sized["layer_types"] = LAYER_TYPES[:layers]
        plain, traced = SupervisedTrainer(job_of(sized)), SupervisedTrainer(job_of(sized))
        blocks = blocks_of(traced.model)
        assert len(blocks) == layers
        compiler = lambda function: torch.compile(function, backend=backend, dynamic=False)  # noqa: E731
        by_layer = partial(compile_layers, blocks, compiler=compiler)
        traced._computation._compute = CompiledByShape(traced._computation._compute, by_layer)
        for rows in (4, 4, 2, 4):
            losses = [one.step(batch(rows)).loss for one in (plain, traced)]
            assert torch.allclose(*losses, rtol=1e-6)
        for expected, found in zip(plain.model.parameters(), traced.model.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        count = len(graphs)
        with torch.no_grad():
            inputs = {"input_ids": torch.from_numpy(batch().arrays["input_ids"])}
            assert torch.equal(traced.model(**inputs).logits, deepcopy(traced.model)(**inputs).logits)
        assert len(graphs) == count, "an evaluation compiles nothing"
        graphs_of[layers] = count
    assert 2 <= graphs_of[2] == graphs_of[4]


@pytest.mark.parametrize(
    ("config", "task", "counts"),
    [
        (MODEL, "causal-lm", True),
        (MODEL, "sequence-classification", True),
        (MIXTRAL, "causal-lm", False),
        (T5, "seq2seq-lm", False),
        (RESNET, "image-classification", False),
    ],
)
def test_operations_are_counted_for_models_that_all_tokens_go_through(
    config: dict[str, Any], task: str, counts: bool
) -> None:
    job = job_of(config, task)
    assert token_operations(job, skeleton(job.model), 1000) == (6000.0 if counts else None)


def test_operations_of_an_adapter_and_the_peak_of_a_cpu_are_unknown() -> None:
    adapted = Job.model_validate({"model": {"config": MODEL, "lora": {"rank": 2}}})
    assert token_operations(adapted, skeleton(adapted.model), 1000) is None
    assert peak_operations(adapted.worker_groups[0], torch.device("cpu")) is None
