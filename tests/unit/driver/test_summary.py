"""The summary of a job: each figure is held against another source of it."""

from __future__ import annotations

import json
import shutil
from collections import Counter, namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hypha_ray.codec import encoders, payload_bytes, sends_differences
from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.data.mixture import described, mixed
from hypha_ray.driver.data_source import DataSource, in_folder
from hypha_ray.driver.dataset_settings import with_rounds
from hypha_ray.driver.earlier_runs import pace_of_earlier_run, pace_of_run
from hypha_ray.driver.preflight.checks import case_of
from hypha_ray.driver.preflight.run_costs import DiskSizes, disk_sizes, exchange_of
from hypha_ray.driver.preflight.summary import (
    data_text,
    disk_text,
    epochs_by_dataset,
    exchange_text,
    model_text,
    rounds_text,
    run_samples,
    size_text,
    space_notes,
    summary_of_new,
    summary_of_resumed,
    tokens_of,
)
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of, views
from hypha_ray.model.lora import build_trained
from hypha_ray.model.saved_model import export
from hypha_ray.store.directory import RunDirectory
from tests.support.jobs import MODEL, job_of
from tests.unit.driver.test_scoring import dataset

FREE = namedtuple("FREE", "total used free")


def texts(folder: Path, samples: int = 40, held_out: int = 8, padded: bool = False) -> DataSource:
    """A dataset of samples of 16 tokens, of which padding is cut off at random."""
    random = np.random.default_rng(0)
    parts = []
    for count in (samples, held_out):
        mask = np.ones((count, 16), np.int64)
        if padded:
            for row, length in enumerate(random.integers(4, 17, count)):
                mask[row, length:] = 0
        parts.append({"input_ids": random.integers(3, 300, (count, 16)), "attention_mask": mask})
    train, validation = parts
    path, manifest = dataset(folder, train, validation if held_out else None)
    return in_folder(path, manifest)


def small_job(path: Path, **tables: dict[str, Any]) -> Job:
    return job_of("small", path, **tables)


def facts_of(job: Job, source: DataSource, price: float | None = None) -> dict[str, str]:
    report = summary_of_new(job, source, case_of(job, source), [], price)
    return dict(report.facts)


# ── model ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_transformers_counts(tmp_path: Path, tied: bool) -> None:
    config = MODEL | {"tie_word_embeddings": tied}
    source = texts(tmp_path / "data")
    known = AutoModelForCausalLM.from_config(LlamaConfig(**config)).num_parameters()
    facts = facts_of(small_job(source.folder, model={"config": config}), source)
    assert facts["model"] == f"LlamaForCausalLM, {known:,} parameters, all of them trained"


_SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA_LIKE = _SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": _SIZES | {"intermediate_size": 64},
    "opt": _SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
    "bloom": {"vocab_size": 320, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": _SIZES,
    "phi": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gemma3_text": _LLAMA_LIKE,
    "cohere": _LLAMA_LIKE,
    "mixtral": _LLAMA_LIKE | {"num_local_experts": 4},
    "mamba": {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_of_an_architecture_are_those_that_transformers_counts(tmp_path: Path, name: str) -> None:
    """Half of these share the weights of embedding and head, which count once."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = {"model_type": name} | ARCHITECTURES[name] | special
    known = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    source = texts(tmp_path / "data")
    case = case_of(small_job(source.folder, model={"config": config}), source)
    expected = f"{type(known).__name__}, {known.num_parameters():,} parameters, all of them trained"
    assert model_text(case.modules, layout_of(case.modules)) == expected


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_parameters_of_an_adapter_are_those_that_peft_counts(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_config(LlamaConfig(**MODEL))
    base.save_pretrained(tmp_path / "base")
    peft_model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained, total = peft_model.get_nb_trainable_parameters()
    source = texts(tmp_path / "data")
    job = small_job(source.folder)
    job = Job.model_validate(
        job.model_dump(exclude={"model"}) | {"model": {"repository": str(tmp_path / "base"), "lora": {"rank": 4}}}
    )
    text = facts_of(job, source)["model"]
    assert f"{trained:,} of {total:,} parameters trained ({trained / total:.2%})" in text


def test_parameters_of_policy_and_critic_are_those_of_two_models_without_the_second_head(tmp_path: Path) -> None:
    config = MODEL | {"tie_word_embeddings": False}
    policy = AutoModelForCausalLM.from_config(LlamaConfig(**config))
    critic = policy.get_decoder().num_parameters() + config["hidden_size"] + 1
    total = policy.num_parameters() + critic
    source = texts(tmp_path)
    job = small_job(tmp_path, model={"config": config}, rl={"algorithm": "ppo"})
    layout = layout_of(case_of(job, source).modules)
    expected = f"LlamaForCausalLM as policy and as critic, {total:,} parameters, all of them trained"
    assert model_text(case_of(job, source).modules, layout) == expected


# ── data and rounds ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("padded", [True, False])
def test_tokens_are_those_of_the_attention_masks(tmp_path: Path, padded: bool) -> None:
    source = texts(tmp_path, padded=padded)
    (info,) = source.manifest.of("train")
    expected = int(source.read(info)["attention_mask"].sum())
    assert tokens_of(source) == (expected, False)
    assert f"words: 40 samples, {expected:,} tokens, " in data_text(small_job(tmp_path), source)


def test_padding_of_a_dataset_elsewhere_is_not_read_and_the_number_is_a_bound(tmp_path: Path) -> None:
    source = texts(tmp_path, padded=True)
    elsewhere = DataSource(source.manifest, tmp_path / "copy", source.places, source.read)
    assert tokens_of(elsewhere) == (40 * 16, True)
    assert "at most 640 tokens" in data_text(small_job(tmp_path), elsewhere)


@pytest.mark.parametrize(
    ("held_out", "ending"),
    [
        (0, "; none held out, so nothing is evaluated"),
        (99, "; 99 held out, too few to tell small differences from chance"),
        (100, "; 100 held out"),
    ],
)
def test_few_samples_that_are_held_out_are_told(tmp_path: Path, held_out: int, ending: str) -> None:
    source = texts(tmp_path, held_out=held_out)
    assert data_text(small_job(tmp_path), source).endswith(ending)


def test_epochs_are_the_samples_of_all_rounds_over_those_of_the_dataset(tmp_path: Path) -> None:
    source = texts(tmp_path)
    rounds = {"update_rounds": 5, "samples_between_updates": 62, "max_batch_size": 4, "warmup_rounds": 2}
    job = small_job(tmp_path, rounds=rounds)
    # Two rounds of a batch of both workers, three of 16 batches, which are 64 samples.
    assert run_samples(job, source.manifest) == 2 * 2 * 4 + 3 * 64
    assert epochs_by_dataset(job, source.manifest) == [208 / 40]
    assert "5.2 epochs in all rounds" in data_text(job, source)


def test_run_of_epochs_has_exactly_these(tmp_path: Path) -> None:
    source = texts(tmp_path)
    rounds = {"epochs": 3, "samples_between_updates": 25, "max_batch_size": 4}
    job = with_rounds(small_job(tmp_path, rounds=rounds), source.manifest, None)
    assert run_samples(job, source.manifest) == 3 * 40
    assert "3 epochs in all rounds" in data_text(job, source)
    whole = "5 of 25 samples, the last one with the rest: about 3 to 4 batches of 4 by each"
    assert rounds_text(job, source.manifest).startswith(whole)
    assert rounds_text(Job.model_validate({"rounds": rounds})) == "as many of 25 samples as 3 epochs take"
    longer = {"epochs": 1, "samples_between_updates": 5000, "max_batch_size": 4}
    only_round = with_rounds(small_job(tmp_path, rounds=longer), source.manifest, None)
    assert rounds_text(only_round, source.manifest).startswith("1 of 40 samples: about 5 batches of 4 by each")
    short = {"epochs": 1, "samples_between_updates": 3, "max_batch_size": 4}
    short_rounds = with_rounds(small_job(tmp_path, rounds=short), source.manifest, None)
    assert ": about 0 to 1 batches of 3 by each" in rounds_text(short_rounds, source.manifest)
    without_barrier = with_rounds(small_job(tmp_path, rounds=rounds, sync={"strategy": "async"}), source.manifest, None)
    assert ", 3 epochs in all rounds" in data_text(without_barrier, source)


def test_epochs_of_a_mixture_are_those_of_each_dataset_by_its_weight(tmp_path: Path) -> None:
    manifests = [texts(tmp_path / name, samples).manifest for name, samples in (("web", 40), ("code", 10))]
    mix = [{"path": str(tmp_path / "web"), "weight": 3.0}, {"path": str(tmp_path / "code"), "weight": 1.0}]
    job = Job.model_validate({"dataset": {"mix": mix}, "rounds": {"update_rounds": 1, "samples_between_updates": 160}})
    assert epochs_by_dataset(job, mixed(manifests)) == [120 / 40, 40 / 10]
    source = DataSource(mixed(manifests), tmp_path, (), in_folder(tmp_path / "web").read)
    assert "epochs in all rounds: about web 3, code 4" in data_text(job, source)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({}, "3 of 64 samples: about 8 batches of 4 by each of 2 workers"),
        ({"rounds": {"samples_between_updates": 60}},
         "3 of 60 samples: about 7 to 8 batches of 4 by each of 2 workers"),
        ({"rounds": {"samples_between_updates": 61}}, "3 of 64 samples: about 8 batches of 4 by each of 2 workers"),
        ({"resources": {"num_workers": 1}}, "3 of 64 samples: 16 batches of 4"),
        ({"run": {"mode": "replay"}}, "3 of 64 samples: 8 batches of 4 by each of 2 workers"),
        ({"sync": {"strategy": "sync"}, "rounds": {"samples_between_updates": 8}},
         "3 of 8 samples: 1 batch of 4 by each of 2 workers"),
        ({"sync": {"strategy": "async", "period": 4}}, "3 of 64 samples: about 4 batches of 4 by each of 2 workers"),
        ({"rounds": {"warmup_rounds": 1}},
         "3 of 64 samples: about 8 batches of 4 by each of 2 workers; the first is one batch of each worker"),
        ({"rounds": {"warmup_rounds": 2, "patience": 1}},
         "3 of 64 samples: about 8 batches of 4 by each of 2 workers; the first 2 are one batch of each worker; "
         "the run ends after 1 round without a better evaluation"),
    ],
)  # fmt: skip
def test_rounds_are_told_with_the_batches_of_a_worker(
    tmp_path: Path, tables: dict[str, dict[str, Any]], text: str
) -> None:
    assert rounds_text(small_job(tmp_path, **tables)) == text


def test_rounds_of_rewards_are_told_in_prompts_and_responses() -> None:
    rl = {"algorithm": "grpo", "group_size": 4}
    rounds = {"update_rounds": 20, "samples_between_updates": 32, "max_batch_size": 16}
    job = Job.model_validate({"rl": rl, "rounds": rounds, "resources": {"num_workers": 1}})
    assert rounds_text(job, done=3) == "20 of 32 prompts with 4 responses each: 2 batches of 16; 3 are done"


# ── traffic and disk ──────────────────────────────────────────────────────────────────────────────────────────────────


def encoded_bytes(job: Job) -> list[int]:
    """Bytes of the payload of each fragment, by encoding changed weights of the real model."""
    model = build_model(job.model, 0)
    layout = layout_of(model, job.sync.fragments, job.sync.partition)
    random = np.random.default_rng(1)
    sizes = []
    for fragment, encoder in enumerate(encoders(job.sync)):
        theta = gather(model, layout, fragment)
        values = {}
        for group, array in theta.items():
            values[group] = array + random.standard_normal(array.size).astype(array.dtype) / 100
        payload, _ = encoder.encode(values, theta if sends_differences(job.sync) else None)
        sizes.append(payload_bytes(payload))
    return sizes


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16", "int8", "int4", "e3m0", "topk", "huffman2", "huffman3"])
@pytest.mark.parametrize("sync", [{}, {"fragments": 2}, {"strategy": "sync"}], ids=["whole", "fragments", "gradients"])
def test_bytes_up_are_those_of_encoded_payloads(tmp_path: Path, codec: str, sync: dict[str, Any]) -> None:
    rounds = {"update_rounds": 7, "warmup_rounds": 1}
    sync = {"dynamic_local_steps": False, **sync}
    job = small_job(tmp_path, sync={**sync, "codec": codec}, rounds=rounds, resources={"num_workers": 3})
    layout = layout_of(build_model(job.model, 0), job.sync.fragments, job.sync.partition)
    sizes = encoded_bytes(job)
    expected = sum(3 * sizes[fragment] for round in range(7) for fragment in fragments_of_round(job, round))
    exchange = exchange_of(job, layout)
    assert exchange.is_exact == (not codec.startswith("huffman"))
    if exchange.is_exact:
        assert exchange.total_up == expected
    else:
        assert exchange.total_up == pytest.approx(expected, rel=0.1)
        assert exchange_text(job, exchange).startswith("about ")
    assert sum(exchange.up.values()) == sum(exchange.down.values()) == 7
    assert exchange.total_down == sum(
        3 * layout.bytes(fragment) for round in range(7) for fragment in fragments_of_round(job, round)
    )


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ({"codec": "visible"}, "at most "),
        ({"downward_codec": "visible"}, "at most "),
        ({"codec": "visible", "downward_codec": "visible", "fragments": 2}, "at most "),
        ({"codec": "huffman2", "downward_codec": "visible"}, "at most about "),
        ({"codec": "visible", "quorum": 1}, "at most about "),
    ],
)
def test_traffic_of_visible_changes_is_bounded_by_bfloat16(tmp_path: Path, sync: dict[str, Any], words: str) -> None:
    job = small_job(tmp_path, sync=sync)
    layout = layout_of(build_model(job.model, 0), job.sync.fragments, job.sync.partition)
    exchange = exchange_of(job, layout)
    assert exchange_text(job, exchange).startswith(words)
    assert not exchange.is_exact
    plain = small_job(tmp_path, sync={key: "bf16" if value == "visible" else value for key, value in sync.items()})
    of_bfloat16 = exchange_of(plain, layout)
    assert exchange.total_up == pytest.approx(of_bfloat16.total_up, rel=0.01)
    assert exchange.total_down == pytest.approx(of_bfloat16.total_down, rel=0.01)


def test_traffic_of_fragments_in_turn_is_told_as_a_range(tmp_path: Path) -> None:
    job = small_job(tmp_path, sync={"fragments": 2, "codec": "int8"}, rounds={"update_rounds": 5})
    layout = layout_of(build_model(job.model, 0), 2)
    text = exchange_text(job, exchange_of(job, layout))
    least, most = sorted([2 * layout.bytes(0), 2 * layout.bytes(1)])[0], 2 * layout.bytes()
    assert f"{size_text(least)} to {size_text(most)} down a round" in text
    assert text.endswith("in all (2 workers, int8 up, fp32 down)")


@pytest.mark.parametrize("warmup", [0, 1, 5, 20])
def test_traffic_of_a_billion_rounds_is_counted_without_each_of_them(tmp_path: Path, warmup: int) -> None:
    rounds = {"update_rounds": 20, "warmup_rounds": warmup}
    job = small_job(tmp_path, sync={"fragments": 3}, rounds=rounds)
    layout = layout_of(build_model(job.model, 0), 3)
    sizes = [2 * sum(map(layout.bytes, fragments_of_round(job, number))) for number in range(20)]
    assert exchange_of(job, layout).down == Counter(sizes)
    assert exchange_of(job.lasting(10**9), layout).down.total() == 10**9


@pytest.mark.parametrize(("samples", "is_even"), [(25, False), (20, True)])
def test_last_round_of_epochs_is_told_apart_only_if_it_is_shorter(tmp_path: Path, samples: int, is_even: bool) -> None:
    source = texts(tmp_path)
    assert source.manifest.samples("train") == 40
    rounds = {"epochs": 3, "samples_between_updates": samples, "max_batch_size": 4}
    job = with_rounds(small_job(tmp_path, rounds=rounds), source.manifest, None)
    assert ("the last one with the rest" in rounds_text(job, source.manifest)) != is_even


def test_rounds_that_grow_are_told_as_limits(tmp_path: Path) -> None:
    source = texts(tmp_path)
    rounds = {"epochs": 3, "samples_between_updates": 25, "max_batch_size": 4, "max_exchange_share": 0.1}
    job = with_rounds(small_job(tmp_path, rounds=rounds), source.manifest, None)
    limits = "at most 5 of 25 samples, the last one with the rest, and fewer, up to 16 times as long, "
    assert rounds_text(job, source.manifest).startswith(f"{limits}if exchanges take over 10 % of the time: ")
    assert ", at most " in exchange_text(job, exchange_of(job, layout_of(build_model(job.model, 0))))


@pytest.mark.parametrize(
    ("equal", "rounds", "senders", "words"),
    [
        (True, {"samples_between_updates": 12}, 3, ""),
        (True, {"samples_between_updates": 8}, 2, ""),
        (False, {"samples_between_updates": 12}, 3, "at most "),
        (False, {"samples_between_updates": 4}, 1, "at most "),
        (True, {"samples_between_updates": 12, "epochs": 1}, 3, "at most "),
    ],
    ids=["equal", "fewer batches than workers", "by speed", "one batch", "short last round"],
)
def test_workers_without_a_batch_send_nothing(
    tmp_path: Path, equal: bool, rounds: dict[str, Any], senders: int, words: str
) -> None:
    sync = {"dynamic_local_steps": not equal}
    source = texts(tmp_path / "data")
    job = small_job(source.folder, sync=sync, rounds={"max_batch_size": 4, **rounds}, resources={"num_workers": 3})
    job = with_rounds(job, source.manifest, None)
    layout = layout_of(build_model(job.model, 0))
    exchange = exchange_of(job, layout)
    assert max(exchange.up) == senders * layout.bytes()
    assert max(exchange.down) == 3 * layout.bytes()
    text = exchange_text(job, exchange)
    assert text.startswith(f"{words}{size_text(max(exchange.up))} up and ")
    assert exchange.is_exact == (not words)


def test_a_quorum_makes_the_traffic_an_estimate(tmp_path: Path) -> None:
    job = small_job(tmp_path, sync={"quorum": 1})
    assert not exchange_of(job, layout_of(build_model(job.model, 0))).is_exact


@pytest.mark.parametrize(
    ("checkpoint", "rounds", "snapshots", "models"),
    [
        ({}, 3, 2, 1),
        ({}, 1, 1, 1),
        ({"keep": 5}, 3, 3, 1),
        ({"keep": 5, "every_rounds": 2}, 7, 5, 1),
        ({"keep": 5, "every_rounds": 4}, 7, 3, 1),
        ({"keep": 5, "every_rounds": 7}, 7, 2, 1),
        ({"best": True}, 6, 3, 2),
    ],
)
def test_snapshots_that_stay_are_those_to_keep_if_so_many_are_written(
    tmp_path: Path, checkpoint: dict[str, Any], rounds: int, snapshots: int, models: int
) -> None:
    source = texts(tmp_path)
    job = small_job(tmp_path, checkpoint=checkpoint, rounds={"update_rounds": rounds})
    case = case_of(job, source)
    sizes = disk_sizes(case, layout_of(case.modules))
    assert (sizes.snapshots, sizes.models) == (snapshots, models)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("lora", [{}, {"rank": 8}], ids=["whole", "adapter"])
def test_size_of_a_saved_model_is_that_of_its_weights(tmp_path: Path, lora: dict[str, Any], dtype: str | None) -> None:
    config = LlamaConfig(**MODEL | {"hidden_size": 64, "intermediate_size": 256})
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    source = texts(tmp_path / "data")
    tables: dict[str, Any] = small_job(source.folder, checkpoint={"export_dtype": dtype}).model_dump(exclude={"model"})
    job = Job.model_validate(tables | {"model": {"repository": str(tmp_path / "base"), "lora": lora}})
    case = case_of(job, source)
    trained = build_trained(job)
    layout = layout_of(trained)
    export(job, None, views(layout, [gather(trained, layout, 0)]), tmp_path / "model")
    written = sum(file.stat().st_size for file in (tmp_path / "model").rglob("*.safetensors"))
    headers = sum(2500 for _ in (tmp_path / "model").rglob("*.safetensors"))
    assert written == pytest.approx(disk_sizes(case, layout).model, abs=2 * headers)


def test_too_little_space_is_a_warning_for_each_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(tmp_path, run={"dir": str(tmp_path)}, checkpoint={"mirror": str(tmp_path / "mirror")})
    sizes = DiskSizes(snapshot=1000, snapshots=2, model=500, models=1, is_bound=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: FREE(10_000, 6_501, 3_499))
    notes = list(space_notes(job, sizes))
    assert len(notes) == 2
    assert notes[0].startswith(f"the run takes up to 3.50 kB in {tmp_path}, and 3.50 kB are free: make room")
    assert "choose another checkpoint.mirror" in notes[1]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: FREE(10_000, 6_500, 3_500))
    assert list(space_notes(job, sizes)) == []
    space = "about 2.50 kB beside logs, plots and records"
    assert disk_text(job, sizes).startswith(f"{space}: 2 snapshots of 1.00 kB, 1 model of 500 B; 3.50 kB free in ")


# ── time and cost ─────────────────────────────────────────────────────────────────────────────────────────────────────


def write_run(job: Job, parent: Path, source: DataSource, ends_s: Sequence[float], workers: int = 2) -> Path:
    """Write the files of a run whose rounds were committed at these times."""
    folder = parent / str(job.run.name)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(resolved_toml(job))
    (folder / "dataset.json").write_text(described(source.manifest))
    records = []
    for number, end_s in enumerate(ends_s):
        record = {"kind": "round", "round": number, "elapsed_s": end_s, "workers": workers}
        records.append(json.dumps(record | {"bytes_up": 1000, "bytes_down": 2000}))
    (folder / "metrics.jsonl").write_text("\n".join(records) + "\n")
    joins = [json.dumps({"kind": "join", "worker": worker, "device": "cpu"}) for worker in range(workers)]
    (folder / "events.jsonl").write_text("\n".join(joins) + "\n")
    return folder


def test_time_and_cost_are_those_of_an_earlier_run_of_the_same_work(tmp_path: Path) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    tables = {"run": {"name": "first", "dir": str(runs)}}
    write_run(small_job(source.folder, **tables), runs, source, [9.0, 11.0, 13.0, 17.0])
    longer = small_job(
        source.folder, run={"name": "second", "dir": str(runs)}, rounds={"update_rounds": 900},
        inner_optimizer={"learning_rate": 1e-4},
    )  # fmt: skip
    facts = facts_of(longer, source, price=6.0)
    assert facts["time"] == "about 30m00s: 2.0s a round, the median of 3 rounds of run first on cpu"
    assert facts["cost"] == "about 3.00, at 6.00 an hour"
    assert "goal" not in facts


def test_goal_stands_beside_the_time_that_was_measured_without_one(tmp_path: Path) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    write_run(small_job(source.folder, run={"name": "first", "dir": str(runs)}), runs, source, [9.0, 11.0, 13.0])
    second = {"run": {"name": "second", "dir": str(runs)}, "rounds": {"update_rounds": 900}}
    late = facts_of(small_job(source.folder, goal={"by": "20min", "at_most": 2.5}, **second), source, price=6.0)
    assert late["time"].startswith("about 30m00s: 2.0s a round")
    too_early = "done 20min after the first start, which is 10m00s too early for that pace"
    assert late["goal"] == f"{too_early}; at most 2.5 for all leases"
    early = facts_of(small_job(source.folder, goal={"by": "1h"}, **second), source)
    assert early["goal"] == "done 1h after the first start"
    bare = facts_of(small_job(source.folder, goal={"by": "3600"}, **second), source)
    assert bare["goal"] == "done 3600s after the first start"


def test_runs_with_a_goal_show_no_pace(tmp_path: Path) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    first = small_job(source.folder, run={"name": "first", "dir": str(runs)}, goal={"by": "1h"})
    write_run(first, runs, source, [9.0, 11.0, 13.0])
    assert pace_of_earlier_run(first, source.manifest) is None


@pytest.mark.parametrize(
    "tables",
    [
        {"rounds": {"samples_between_updates": 32}},
        {"resources": {"num_workers": 3}},
        {"worker": {"autocast": "bf16"}},
        {"sync": {"codec": "int8"}},
        {"model": {"config": MODEL | {"num_hidden_layers": 1}}},
    ],
)
def test_runs_of_other_work_tell_nothing(tmp_path: Path, tables: dict[str, dict[str, Any]]) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    write_run(small_job(source.folder, run={"name": "first", "dir": str(runs)}), runs, source, [9.0, 11.0])
    job = small_job(source.folder, **{"run": {"name": "second", "dir": str(runs)}, **tables})
    assert pace_of_earlier_run(job, source.manifest) is None
    facts = facts_of(job, source, price=6.0)
    assert facts["time"] == "not measured yet: --rounds.update_rounds 2 shows the pace"
    assert facts["cost"] == "6.00 an hour"


def test_runs_of_other_samples_tell_nothing(tmp_path: Path) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    job = small_job(source.folder, run={"name": "first", "dir": str(runs)})
    write_run(job, runs, texts(tmp_path / "others", samples=41), [9.0, 11.0])
    second = small_job(source.folder, run={"name": "second", "dir": str(runs)})
    assert pace_of_earlier_run(second, source.manifest) is None


def test_rounds_with_fewer_workers_or_across_a_gap_have_no_pace(tmp_path: Path) -> None:
    source = texts(tmp_path / "data")
    job = small_job(source.folder)
    alone = write_run(job, tmp_path / "one", source, [1.0, 2.0, 3.0], workers=1)
    assert pace_of_run(alone, 2) is None
    short = write_run(job, tmp_path / "short", source, [1.0])
    assert pace_of_run(short, 2) is None
    resumed = write_run(job, tmp_path / "resumed", source, [1.0, 3.0, 50.0, 52.0])
    lines = (resumed / "metrics.jsonl").read_text().splitlines()
    (resumed / "metrics.jsonl").write_text("\n".join([*lines[:2], "damaged", lines[3]]))
    pace = pace_of_run(resumed, 2)
    assert pace is not None and (pace.round_s, pace.rounds) == (2.0, 1)


def test_a_run_that_goes_on_is_told_by_its_own_records(tmp_path: Path) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    job = small_job(source.folder, run={"name": "first", "dir": str(runs)}, rounds={"update_rounds": 10})
    folder = write_run(job, runs, source, [9.0, 11.0, 13.0, 17.0])
    facts = dict(summary_of_resumed(job, source, RunDirectory(folder), None).facts)
    assert facts["rounds"].endswith("; 4 are done")
    assert facts["exchange"] == "1.00 kB up and 2.00 kB down in the newest round, 4.00 kB and 8.00 kB so far"
    assert facts["time"] == "about 12.0s for the rest: 2.0s a round, the median of 3 rounds of run first on cpu"


def test_lines_are_aligned_and_a_partial_job_has_fewer(tmp_path: Path) -> None:
    source = texts(tmp_path)
    job = small_job(tmp_path)
    report = summary_of_new(job, source, case_of(job, source), [], None)
    lines = report.text().splitlines()
    assert [line.split()[0] for line in lines] == ["model", "data", "rounds", "exchange", "disk", "memory",
                                                   "settings", "time"]  # fmt: skip
    assert all(line[10] == " " and line[11] != " " for line in lines)
    assert [subject for subject, _ in summary_of_new(job, source, None, [], None).facts] == ["data", "rounds"]
    assert [subject for subject, _ in summary_of_new(job, None, None, [], None).facts] == ["rounds"]
