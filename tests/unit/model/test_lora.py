"""Adapters: what is trained and sent, what is saved, and what other programs make of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from huggingface_hub import constants

from hypha_ray.config.schema import Job, Lora, Model
from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError, ConfigError, HyphaError
from hypha_ray.model.build import build_model, compare_weights
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.lora import build_trained, needs_whole, sketch_trained, without_adapter
from hypha_ray.model.saved_model import export, open_saved
from hypha_ray.optim.optimizers import build_optimizer
from tests.support.jobs import MODEL
from tests.support.small_models import RESNET

IDS = torch.arange(3, 35)[None]
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 64, "vocab_size": 64}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), MODEL)


def saved(folder: Path, config: dict[str, Any], task: str = "causal-lm") -> Path:
    build_model(Model(config=config, type=task), seed=1).save_pretrained(folder)
    return folder


def job_of(repository: Path, task: str = "causal-lm", config: dict[str, Any] | None = None, **lora: Any) -> Job:
    model = Model(repository=str(repository), type=task, config=config, lora=Lora(**({"rank": 2} | lora)))
    return Job(model=model)


def going_on(adapter: Path) -> Job:
    return Job(model=Model(repository=str(adapter)))


def moved(job: Job) -> torch.nn.Module:
    """The job's model, with other values in all that is trained."""
    network = build_trained(job)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.3)
    return network.eval()


def exported(job: Job, network: torch.nn.Module, folder: Path) -> Path:
    layout = layout_of(network, 2)
    export(job, None, views(layout, [gather(network, layout, 0), gather(network, layout, 1)]), folder)
    return folder


def loss(network: Any, **inputs: torch.Tensor) -> float:
    with torch.no_grad():
        return float(network(**inputs or {"input_ids": IDS, "labels": IDS}).loss)


KINDS = [{}, {"dora": True}, {"rslora": True, "alpha": 3.0}, {"targets": ["q_proj", "down_proj"]}]


@pytest.mark.slow
@pytest.mark.parametrize("lora", KINDS, ids=str)
def test_export_loads_merged_and_by_peft_with_the_loss_of_training(
    base: Path, tmp_path: Path, lora: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(base, **lora)
    network = moved(job)
    expected = loss(network)
    folder = exported(job, network, tmp_path / "model")
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    by_peft = peft.PeftModel.from_pretrained(plain, folder / "adapter")
    assert abs(expected - loss(transformers.AutoModelForCausalLM.from_pretrained(base))) > 0.01, "nothing was learned"
    assert [loss(merged), loss(by_peft.eval())] == pytest.approx([expected] * 2, rel=1e-5)
    monkeypatch.chdir(folder / "adapter")  # PEFT takes the path of a base model from the current folder.
    assert loss(peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")) == pytest.approx(expected, rel=1e-5)
    assert loss(open_saved(folder / "adapter")[0]) == pytest.approx(expected, rel=1e-5)
    assert loss(build_trained(going_on(folder / "adapter")).eval()) == pytest.approx(expected, rel=1e-5)


def test_gpt2_with_its_transposed_matrices_merges_to_the_same_loss(tmp_path: Path) -> None:
    job = job_of(saved(tmp_path / "base", GPT2))
    network = moved(job)
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(job, network, tmp_path / "model"))
    assert loss(merged) == pytest.approx(loss(network), rel=1e-5)


def test_adapter_of_experts_merges_to_the_same_loss(tmp_path: Path) -> None:
    """PEFT wraps the parameters of experts one inside the other."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    job = job_of(saved(tmp_path / "base", MODEL | sizes | {"model_type": "mixtral"}))
    network = moved(job)
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(job, network, tmp_path / "model"))
    assert any("experts" in name for name, one in network.named_parameters() if one.requires_grad)
    assert loss(merged) == pytest.approx(loss(network), rel=1e-5)


def test_adapter_with_single_tokens_by_peft_merges_to_its_loss(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", MODEL | {"tie_word_embeddings": False})
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=IDS[0, :3].tolist())
    by_peft = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config).eval()
    with torch.no_grad():
        for name, parameter in by_peft.named_parameters():
            parameter.add_(0.5 if "trainable_tokens_delta" in name else 0.0)
    by_peft.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    job = going_on(tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(job, build_trained(job), tmp_path / "model"))
    assert loss(merged) == pytest.approx(loss(by_peft), rel=1e-5)
    assert abs(loss(merged) - loss(transformers.AutoModelForCausalLM.from_pretrained(base))) > 1e-4


def test_network_without_its_adapter_has_the_modules_of_its_base_that_were_trained_whole(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", MODEL | {"tie_word_embeddings": False})
    network = moved(job_of(base, targets=["q_proj"], modules_to_save=["lm_head"]))
    trained = loss(network)
    with without_adapter(network):
        assert loss(network) == loss(transformers.AutoModelForCausalLM.from_pretrained(base))
    assert loss(network) == trained != loss(transformers.AutoModelForCausalLM.from_pretrained(base))


def test_only_the_adapter_is_laid_out_and_its_size_is_that_of_two_thin_matrices(base: Path) -> None:
    layout = layout_of(build_trained(job_of(base, rank=2, targets=["q_proj"])))
    hidden, layers, matrices = MODEL["hidden_size"], MODEL["num_hidden_layers"], 2
    assert layout.bytes() == 4 * layers * matrices * 2 * hidden
    assert all("lora_" in entry.name for entry in layout.entries)
    assert layout_of(sketch_trained(job_of(base, rank=2, targets=["q_proj"]))).entries == layout.entries


def test_all_linear_leaves_out_embeddings_and_output(base: Path) -> None:
    names = [entry.name.split(".lora_")[0] for entry in layout_of(build_trained(job_of(base))).entries]
    adapted = {name.rpartition(".")[2] for name in names}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_step_changes_the_adapter_and_nothing_of_the_base(base: Path) -> None:
    job = job_of(base)
    network = build_trained(job)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    optimizer = build_optimizer(network, job.inner_optimizer)
    for _ in range(2):  # The first step moves one of the matrices only: the other begins with zeros.
        optimizer.zero_grad()
        network(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    changed = {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_fingerprint_tells_bases_apart_and_is_the_same_in_every_process(base: Path, tmp_path: Path) -> None:
    one, again = (layout_of(build_trained(job_of(base))) for _ in range(2))
    assert one.frozen_sha256 is not None and one.sha256() == again.sha256()
    other = Path(shutil.copytree(base, tmp_path / "other"))
    network = transformers.AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        network.model.norm.weight[0] += 1e-6
    network.save_pretrained(other)
    another = layout_of(build_trained(job_of(other)))
    assert another.entries == one.entries and another.sha256() != one.sha256()
    assert layout_of(build_model(Model(repository=str(base)), seed=0)).frozen_sha256 is None


def test_adapter_begins_as_the_base_model_and_depends_on_the_seed(base: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    job = job_of(base)
    assert loss(build_trained(job).eval()) == pytest.approx(loss(plain), rel=1e-6)
    other = job.model_copy(update={"run": job.run.model_copy(update={"seed": 9})})
    state = torch.random.get_rng_state()
    first, same, different = (adapter_of(build_trained(one)) for one in (job, job, other))
    assert np.array_equal(first, same) and not np.array_equal(first, different)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_adapter_on_weights_of_16_bits_is_float32_and_is_merged_in_float32(base: Path, tmp_path: Path) -> None:
    job = job_of(base, config={"dtype": "bfloat16"}, targets=["q_proj"])
    network = moved(job)
    assert {one.dtype for one in network.parameters() if not one.requires_grad} == {torch.bfloat16}
    assert {entry.dtype for entry in layout_of(network).entries} == {"float32"}
    assert layout_of(sketch_trained(job)).entries == layout_of(network).entries
    assert np.isfinite(loss(network))
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(job, network, tmp_path / "model"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    name = "model.layers.0.self_attn.q_proj"
    one, other = (network.get_submodule(f"{name}.lora_{part}.default").weight for part in "AB")
    expected = plain.get_submodule(name).weight.bfloat16().float() + 2 * other @ one
    torch.testing.assert_close(merged.get_submodule(name).weight, expected, rtol=1e-5, atol=1e-6)


def adapter_of(network: torch.nn.Module) -> np.ndarray:
    return gather(network, layout_of(network), 0)["parameters/float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merged_model_has_the_dtype_of_its_base_or_the_one_wished_for(base: Path, tmp_path: Path, dtype: Any) -> None:
    low = tmp_path / "low"
    transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(low)
    job = job_of(low).model_copy(update={"checkpoint": Checkpoint(export_dtype=None if dtype == "bfloat16" else dtype)})
    folder = exported(job, moved(job), tmp_path / "model")
    assert str(transformers.AutoModelForCausalLM.from_pretrained(folder).dtype) == f"torch.{dtype}"


@pytest.mark.parametrize(
    ("problem", "label"), [({}, [2]), ({"problem_type": "multi_label_classification"}, [[1.0, 0.0, 1.0]])]
)
def test_classifier_on_a_language_model_trains_its_head_and_saves_it(
    tmp_path: Path, problem: dict[str, str], label: list[Any]
) -> None:
    folder = saved(tmp_path / "base", BERT, "masked-lm")
    labels = {"id2label": {0: "bad", 1: "good", 2: "other"}, **problem}
    job = job_of(folder, "sequence-classification", labels)
    network = moved(job)
    names = [entry.name for entry in layout_of(network).entries]
    assert "classifier.modules_to_save.default.weight" in names
    assert "bert.pooler.modules_to_save.default.dense.weight" in names, "it isn't in the files, and would stay random"
    inputs = {"input_ids": IDS, "labels": torch.tensor(label)}
    out = exported(job, network, tmp_path / "model")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert loss(merged, **inputs) == pytest.approx(loss(network, **inputs), rel=1e-5)
    opened, task = open_saved(out / "adapter")
    assert (task.name, task.measures) == ("sequence-classification", bool(problem))
    assert loss(opened, **inputs) == pytest.approx(loss(network, **inputs), rel=1e-5)
    assert list(opened.config.id2label.values()) == ["bad", "good", "other"]
    fresh = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    by_peft = peft.PeftModel.from_pretrained(fresh, out / "adapter").eval()
    assert loss(by_peft, **inputs) == pytest.approx(loss(network, **inputs), rel=1e-5)


def refused(job: Job) -> HyphaError:
    with pytest.raises(HyphaError) as sketched:
        compare_weights(job.model, needs_all=needs_whole(job.model))
        sketch_trained(job)
    with pytest.raises(HyphaError) as built:
        build_trained(job)
    assert str(built.value) == str(sketched.value)
    return built.value


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"targets": ["q_prj"]}, "model.lora.targets names no module of the model"),
        ({"modules_to_save": ["lm_heat"]}, "model.lora.modules_to_save names no module"),
        ({"modules_to_save": ["lm_head"]}, "tied: "),
        ({"targets": ["q_proj", "embed_tokens"]}, "tied: "),
        ({"targets": ["norm"]}, "[model.lora] can't be attached to the model"),
    ],
)
def test_names_that_fit_no_module_or_a_tied_one_are_refused(base: Path, lora: dict[str, Any], said: str) -> None:
    error = refused(job_of(base, **lora))
    assert (error.code, type(error)) == ("MODEL019", ConfigError) and said in str(error)


def test_batch_statistics_below_an_adapter_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "base", RESNET, "image-classification")
    assert "batch statistics" in str(refused(job_of(folder, "image-classification", targets=["convolution"])))


def test_language_model_without_its_head_is_refused_below_an_adapter(tmp_path: Path) -> None:
    network = build_model(Model(config=MODEL | {"tie_word_embeddings": False}), seed=1)
    network.model.save_pretrained(tmp_path / "base")
    assert "lm_head.weight" in str(refused(job_of(tmp_path / "base")))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    job = job_of(base)
    return exported(job, moved(job), tmp_path / "model") / "adapter"


def test_adapter_goes_on_with_its_own_rank_and_a_new_one_is_refused(adapter: Path) -> None:
    assert layout_of(build_trained(going_on(adapter))).entries[0].shape == (2, MODEL["hidden_size"])
    error = refused(job_of(adapter, rank=8))
    assert error.code == "MODEL019" and "leave [model.lora] out to go on" in str(error)


def edit(adapter: Path, **settings: Any) -> Job:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return going_on(adapter)


def test_adapter_finds_its_base_when_both_are_moved_and_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(old / "base")
    monkeypatch.chdir(old)
    job = job_of(Path("base"))
    network = moved(job)
    expected = loss(network)
    described = exported(job, network, old / "runs" / "model") / "adapter" / "adapter_config.json"
    monkeypatch.chdir("/")
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(described.parent)
    assert loss(merged) == pytest.approx(expected, rel=1e-5)
    assert json.loads(described.read_text())["base_model_name_or_path"] == str(old / "base")

    old.rename(new)
    monkeypatch.chdir(tmp_path)

    assert loss(open_saved(new / "runs" / "model" / "adapter")[0]) == pytest.approx(expected, rel=1e-5)
    (new / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(HyphaError) as caught:
        open_saved(new / "runs" / "model" / "adapter")
    assert str(new / "runs" / "model" / "adapter" / "adapter_config.json") in caught.value.what
    assert "base_model_name_or_path" in caught.value.what and "set base_model_name_or_path" in caught.value.fix


def test_adapter_whose_base_is_gone_or_unnamed_is_refused(adapter: Path) -> None:
    error = refused(edit(adapter, base_model_name_or_path="/gone"))
    assert "/gone" in str(error) and "base_model_name_or_path in" in error.what
    assert "doesn't name its base model" in str(refused(edit(adapter, base_model_name_or_path=None)))


@pytest.mark.slow
def test_adapters_that_change_their_base_or_are_of_another_kind_are_refused(adapter: Path) -> None:
    assert "lora_bias" in str(refused(edit(adapter, lora_bias=True)))
    assert "pissa" in str(refused(edit(adapter, lora_bias=False, init_lora_weights="pissa")))
    assert "IA3" in str(refused(edit(adapter, peft_type="IA3")))


@pytest.mark.slow
def test_adapter_of_another_model_or_with_pickled_weights_is_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="aren't those of its model"):
        build_trained(edit(adapter, r=3))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert refused(going_on(adapter)).code == "SEC003"


def test_adapter_on_random_weights_is_refused_with_the_job_file() -> None:
    from hypha_ray.config.load import parse

    flags = ["--model.config.model_type", "gpt2", "--model.lora.rank", "4"]
    with pytest.raises(ConfigError, match=r"model\.lora\.rank and --model\.config exclude"):
        parse(flags, "", lambda *_: Path())
