"""Fine-tuning by the commands of the README: prepare, train, evaluate, and what the trained model knows of its data."""

from __future__ import annotations

import csv
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    Wav2Vec2FeatureExtractor,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hypha_ray.config.schema import Model
from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.model.build import build_model
from tests.support.job_scripts import Done, Jobs
from tests.support.prepared import CHATML, arrays_of

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {"model_type": "bert", "vocab_size": 384, "max_position_embeddings": 64, **SMALL}

VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, **SMALL}
WAV2VEC2 = {
    "model_type": "wav2vec2",
    "conv_dim": [16, 16],
    "conv_kernel": [10, 4],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    **SMALL,
}

T5 = {
    "model_type": "t5",
    "vocab_size": 384,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
LLAMA = {"model_type": "llama", "vocab_size": 384, "max_position_embeddings": 256, "pad_token_id": 0, **SMALL}
ROLES = ("user", "assistant") * 2


SOON = (
    *("--rounds.update_rounds", "4", "--rounds.samples_between_updates", "320", "--rounds.max_batch_size", "8"),
    *("--inner_optimizer.learning_rate", "3e-3", "--inner_optimizer.warmup_steps", "5", "--resources.worker.gpu", "0"),
)
"""Settings by which small models learn something in seconds, on CPUs."""


def train(run_job: Jobs, file: str, model: Path, data: Path, *further: str) -> Path:
    """A run of a job file that is shipped, on another model and dataset; its folder."""
    where = ("--model.repository", model, "--dataset.path", data)
    done = succeeded(run_job("@", f"jobs/configs/{file}.toml", *where, *SOON, *further))
    return Path(done.stdout.splitlines()[-1].removeprefix("run: "))


def succeeded(done: Done) -> Done:
    assert done.returncode == 0, done.stderr
    return done


def score(run_job: Jobs, folder: Path, data: Path) -> dict[str, Any]:
    done = succeeded(run_job("--model", folder, "--dataset", data, "--json", script="evaluate"))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_csv_with_labels_trains_a_pretrained_encoder_to_tell_its_classes(run_job: Jobs, tmp_path: Path) -> None:
    draw = random.Random(0)
    letters = {"early": "abcdefghijklm", "late": "nopqrstuvwxyz"}
    rows = [("".join(draw.choices(letters[name], k=8)), name) for name in letters for _ in range(400)]
    with (tmp_path / "reviews.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("review", "label"), *rows])
    build_model(Model(config=BERT, type="masked-lm"), seed=0).save_pretrained(tmp_path / "encoder")
    data = tmp_path / "reviews"
    source = ("--source", tmp_path / "reviews.csv", "--label-column", "label", "--out", data)
    done = succeeded(run_job(*source, script="prepare"))
    assert "classes            2: early " in done.stdout
    run = train(run_job, "labels", tmp_path / "encoder", data)
    assert score(run_job, run / "model", data)["accuracy"] >= 0.95
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "early", "1": "late"}


@pytest.mark.long
def test_csv_with_numbers_trains_a_pretrained_encoder_to_predict_them(run_job: Jobs, tmp_path: Path) -> None:
    draw = random.Random(0)
    letters = {"1.5": "abcdefghijklm", "-0.5": "nopqrstuvwxyz"}
    rows = [("".join(draw.choices(letters[score], k=8)), score) for score in letters for _ in range(400)]
    with (tmp_path / "scores.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("review", "score"), *rows])
    build_model(Model(config=BERT, type="masked-lm"), seed=0).save_pretrained(tmp_path / "encoder")
    data = tmp_path / "scores"
    source = ("--source", tmp_path / "scores.csv", "--label-column", "score", "--regression", "--out", data)
    succeeded(run_job(*source, script="prepare"))
    run = train(run_job, "labels", tmp_path / "encoder", data)
    model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    arrays = {name: torch.from_numpy(array) for name, array in arrays_of(data, "validation").items()}
    with torch.inference_mode():
        own = model(**{name: tensor if name == "labels" else tensor.long() for name, tensor in arrays.items()})
    found = score(run_job, run / "model", data)
    assert abs(found["val_loss"] - own.loss.item()) < 1e-6
    assert found["val_loss"] < 0.5, "no better than the mean, whose squared error is 1"
    assert "accuracy" not in found


def test_image_folder_trains_a_pretrained_model_to_tell_its_folders(run_job: Jobs, tmp_path: Path) -> None:
    draws, model = np.random.default_rng(0), tmp_path / "vit"
    for name, level in {"dark": 60, "light": 180}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(400):
            pixels = draws.integers(level - 60, level + 60, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    build_model(Model(config=VIT, type="image-classification"), seed=0).save_pretrained(model)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(model)
    data = tmp_path / "data"
    succeeded(run_job("--source", tmp_path / "photos", "--preprocessor", model, "--out", data, script="prepare"))
    run = train(run_job, "images", model, data)
    assert score(run_job, run / "model", data)["accuracy"] >= 0.95
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "dark", "1": "light"}
    assert (run / "model" / "preprocessor_config.json").is_file()


@pytest.mark.long
def test_audio_folder_trains_a_pretrained_model_to_tell_its_folders(run_job: Jobs, tmp_path: Path) -> None:
    draws, model, seconds = np.random.default_rng(0), tmp_path / "wav2vec2", np.arange(400) / 800
    for name, pitch in {"low": 20, "high": 160}.items():
        (tmp_path / "sounds" / name).mkdir(parents=True)
        for number in range(400):
            tone = np.sin(2 * np.pi * (pitch * seconds + draws.random())) + draws.normal(0, 0.1, 400)
            wavfile.write(tmp_path / "sounds" / name / f"{number}.wav", 800, tone.astype(np.float32))
    build_model(Model(config=WAV2VEC2, type="audio-classification"), seed=0).save_pretrained(model)
    Wav2Vec2FeatureExtractor(sampling_rate=800).save_pretrained(model)
    data = tmp_path / "data"
    succeeded(run_job("--source", tmp_path / "sounds", "--preprocessor", model, "--out", data, script="prepare"))
    run = train(run_job, "images", model, data, "--model.type", "audio-classification")
    assert score(run_job, run / "model", data)["accuracy"] >= 0.95
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "high", "1": "low"}


@pytest.mark.long
def test_pairs_train_a_model_with_encoder_and_decoder_to_reverse_texts(run_job: Jobs, tmp_path: Path) -> None:
    texts, model = ["".join(letters) for letters in itertools.permutations("abcdefgh", 3)], tmp_path / "t5"
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "reversed"), *((text, text[::-1]) for text in texts)])
    build_model(Model(config=T5, type="seq2seq-lm"), seed=0).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    data = tmp_path / "data"
    columns = ("--source-column", "text", "--target-column", "reversed")
    done = run_job(
        *("--source", tmp_path / "pairs.csv", *columns, "--tokenizer", model, "--out", data, "--report"),
        script="prepare",
    )
    assert "tokens         1,276 to train on, and 1,276 in targets, which are scored" in succeeded(done).stdout
    longer = (
        *("--rounds.update_rounds", "10", "--rounds.samples_between_updates", "1280", "--rounds.max_batch_size", "16"),
        *("--inner_optimizer.learning_rate", "6e-3", "--inner_optimizer.schedule", "constant"),
    )
    further = ("--model.type", "seq2seq-lm", "--inner_optimizer.warmup_steps", "0", *longer)
    run = train(run_job, "chat", model, data, *further)
    assert score(run_job, run / "model", data)["val_loss"] < 0.3, "a random order of the right letters costs 0.45"
    network: Any = AutoModelForSeq2SeqLM.from_pretrained(run / "model")
    tokenizer, ids = byte_tokenizer(), torch.from_numpy(arrays_of(data, "validation")["input_ids"]).long()
    answers = tokenizer.batch_decode(network.generate(input_ids=ids, max_new_tokens=4), skip_special_tokens=True)
    asked = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = [text for text, answer in zip(asked, answers, strict=True) if answer == text[::-1]]
    assert len(right) >= 0.7 * len(asked)
    told = run_job("--model", run, "--prompt", right[0], "--temperature", "0", script="generate")
    assert succeeded(told).stdout == right[0][::-1] + "\n"


def test_chats_in_the_three_commands_of_the_readme(run_job: Jobs, tmp_path: Path) -> None:
    model, data, source = tmp_path / "model", tmp_path / "chats", tmp_path / "chats.jsonl"
    build_model(Model(config=LLAMA), seed=0).save_pretrained(model)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    turns = [[f"{n}?", "yes", f"{n + 1}?", "no"] for n in range(500)]
    rows = ([{"role": role, "content": text} for role, text in zip(ROLES, chat, strict=True)] for chat in turns)
    source.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    done = succeeded(
        run_job("--source", source, "--chat", "--tokenizer", model, "--out", data, "--report", script="prepare")
    )
    answers = len("yes") + 1 + len("no") + 1
    assert f"of which {475 * answers:,} are scored" in done.stdout
    where = ("--model.repository", model, "--dataset.path", data, "--inner_optimizer.learning_rate", "3e-3")
    done = succeeded(run_job("@", "jobs/configs/chat.toml", *where))
    run = Path(done.stdout.splitlines()[-1].removeprefix("run: "))
    before, after = score(run_job, model, data), score(run_job, run / "model", data)
    assert before["tokens"] == after["tokens"] == 25 * answers
    assert after["val_loss"] < 0.2 * before["val_loss"]
    assert before["val_loss"] == pytest.approx(loss_of_transformers(model, data), abs=1e-5)


def loss_of_transformers(model: Path, data: Path) -> float:
    """Loss of the validation samples, all of which have equally many scored tokens."""
    network = AutoModelForCausalLM.from_pretrained(model)
    batch = {name: torch.from_numpy(array).long() for name, array in arrays_of(data, "validation").items()}
    with torch.no_grad():
        return float(network(**batch).loss)
