"""Preparation of preferences: pairs with explicit and implicit prompts, conversations, and judged answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hypha_ray.config import Job
from hypha_ray.config.training import Preference
from hypha_ray.data.catalogue import load
from hypha_ray.data.encoders import byte_tokenizer, load_tokenizer
from hypha_ray.data.manifest import MANIFEST, TensorInfo
from hypha_ray.data.provenance import MadeBy
from hypha_ray.driver.data_source import opened
from hypha_ray.driver.dataset_settings import preference_task, require_preferences
from hypha_ray.driver.evaluation import ModelSource
from hypha_ray.driver.preflight.notes import preference_notes, reference_notes
from hypha_ray.errors import CheckpointError, ConfigError, DataError
from hypha_ray.model.metrics import batches_of, evaluate, metrics_of
from hypha_ray.model.saved_model import open_saved
from hypha_ray.model.sources import folder_hash
from tests.support.prepared import arrays_of, omissions, prepared, table
from tests.unit.data.test_chats import CHATML, tokenizer_with

PAIRS = [{"prompt": f"Q{n}:", "chosen": f" yes{n}", "rejected": f" no{n}"} for n in range(8)]


def run(rows: list[dict[str, Any]], folder: Path, **options: Any) -> Path:
    source = table(folder / "rows.jsonl", *rows)
    out = folder / "out"
    prepared(source, out, **{"kind": "preferences", "validation_fraction": 0.25, **options})
    return out


def sides(out: Path, split: str = "train") -> list[tuple[str, str, str]]:
    """Prompt, first and second answer of each sample, as texts with special tokens."""
    tokenizer = load_tokenizer(str(out / "tokenizer"))
    arrays = arrays_of(out, split)
    found = []
    for ids, mask, labels in zip(arrays["input_ids"], arrays["attention_mask"], arrays["labels"], strict=True):
        texts = []
        prompts = set()
        for side in range(2):
            real = ids[side][mask[side] == 1]
            scored = labels[side][mask[side] == 1] != -100
            assert (labels[side][labels[side] != -100] == real[scored]).all()
            start = int(scored.argmax())
            assert (labels[side][mask[side] == 0] == -100).all()
            prompts.add(tokenizer.decode(real[:start]))
            texts.append(tokenizer.decode(real[scored]))
        (prompt,) = prompts
        found.append((prompt, texts[0], texts[1]))
    return sorted(found)


def test_pairs_have_the_chosen_answer_first_and_an_end_behind_both(tmp_path: Path) -> None:
    out = run(PAIRS, tmp_path)
    expected = [(f"Q{n}:", f" yes{n}</s>", f" no{n}</s>") for n in range(8)]
    assert sorted(sides(out) + sides(out, "validation")) == expected
    manifest = load(out)
    assert manifest.modality == "preferences"
    assert manifest.samples("validation") == 2
    assert manifest.tokens is not None and manifest.tokens.ends == (1,)
    assert set(manifest.shapes) == {"input_ids", "attention_mask", "labels"}


def test_prompt_is_what_both_texts_begin_with(tmp_path: Path) -> None:
    rows = [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "Count: one 2", "rejected": "Count: one 3"},
        {"chosen": "same", "rejected": "same"},
        {"chosen": "longer text", "rejected": "longer"},
    ]
    out = run(rows, tmp_path, validation_fraction=0.0)
    assert sides(out) == [
        ("Count: one", " 2</s>", " 3</s>"),  # The space belongs to the answer, as in TRL.
        ("The sky is", " blue.</s>", " green.</s>"),
    ]
    assert omissions(load(out)) == {
        "rows whose two answers are the same": 1,
        "rows of which one answer is the beginning of the other, and no prompt is given": 1,
    }


def conversation(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


@pytest.mark.parametrize("explicit", [True, False])
def test_conversations_are_rendered_and_only_last_answers_scored(tmp_path: Path, explicit: bool) -> None:
    before = conversation("a", "b", "c")
    answers = {"chosen": [{"role": "assistant", "content": "d"}], "rejected": [{"role": "assistant", "content": "e"}]}
    row: dict[str, Any] = {"prompt": before, **answers}
    if not explicit:
        row = {side: before + answer for side, answer in answers.items()}
    tokenizer = tokenizer_with(tmp_path, CHATML)
    out = run([row], tmp_path, chat=True, tokenizer=str(tokenizer), validation_fraction=0.0)
    ((prompt, chosen, rejected),) = sides(out)
    assert prompt.endswith("<extra_id_0>assistant\n")
    assert "b" in prompt and "c" in prompt
    assert (chosen, rejected) == ("d<extra_id_1>", "e<extra_id_1>")


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "S"}
REPEATED: dict[str, dict[str, Any]] = {
    "text": {"prompt": "a", "chosen": conversation("a", "d"), "rejected": conversation("a", "e")},
    "messages": {"prompt": conversation("a"), "chosen": conversation("a", "d"), "rejected": conversation("a", "e")},
    "text of several turns": {
        "prompt": "a",
        "chosen": conversation("a", "b", "c", "d"),
        "rejected": conversation("a", "b", "c", "e"),
    },
    "text and system": {
        "prompt": "a",
        "chosen": [SYSTEM, *conversation("a", "d")],
        "rejected": [SYSTEM, *conversation("a", "e")],
    },
    "single messages": {"prompt": "a", "chosen": answered("d"), "rejected": answered("e")},
}


@pytest.mark.parametrize("row", REPEATED.values(), ids=REPEATED)
def test_prompt_that_answers_repeat_is_there_once(tmp_path: Path, row: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(tmp_path, CHATML)
    out = run([row], tmp_path, chat=True, tokenizer=str(tokenizer), validation_fraction=0.0)
    ((prompt, chosen, rejected),) = sides(out)
    assert prompt.count("user\na<") == 1
    assert prompt.count("system\nS<") == (SYSTEM in list(row["chosen"]))
    assert (chosen, rejected) == ("d<extra_id_1>", "e<extra_id_1>")


def test_judged_answer_that_repeats_its_prompt_has_it_once(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": conversation("a", "d"), "label": 1.0},
        {"prompt": "b", "completion": conversation("b", "e"), "label": 0.0},
    ]
    tokenizer = tokenizer_with(tmp_path, CHATML)
    out = run(rows, tmp_path, chat=True, tokenizer=str(tokenizer), validation_fraction=0.0)
    assert sorted(arrays_of(out)["desirable"].tolist()) == [0, 1]
    for sample in arrays_of(out)["input_ids"]:
        text = load_tokenizer(str(out / "tokenizer")).decode(sample[0])
        assert text.count("user\n") == 1


@pytest.mark.parametrize("late", [{"prompt": "Q:"}, {"q": "Q:"}])
def test_a_prompt_behind_rows_without_one_is_refused_and_an_empty_one_is_none(
    tmp_path: Path, late: dict[str, str]
) -> None:
    """Its answers would have been trained on without it."""
    implicit = {"chosen": "Q: a", "rejected": "Q: b"}
    rows = [implicit, implicit | late]
    options: dict[str, Any] = {"prompt_column": "q"} if "q" in late else {}
    with pytest.raises(DataError, match=r"DATA032.*line [12] has (a|no) column '(prompt|q)'"):
        run(rows, tmp_path, **options)
    out = run([implicit, implicit | {"prompt": None}], tmp_path, validation_fraction=0.0)
    assert sides(out) == [("Q:", " a</s>", " b</s>")] * 2


def test_margins_are_numbers_of_the_source(tmp_path: Path) -> None:
    rows = [row | {"margin": number / 2} for number, row in enumerate(PAIRS)]
    out = run(rows, tmp_path, validation_fraction=0.0)
    assert sorted(arrays_of(out)["margins"].tolist()) == [number / 2 for number in range(8)]
    for margin in ("wide", 1e39, -1e300, True, "inf"):
        match = f"DATA031.*'margin' is of no use — got {re.escape(repr(margin))}, allowed a finite number"
        with pytest.raises(DataError, match=match):
            run([PAIRS[0] | {"margin": margin}], tmp_path, overwrite=True)


@pytest.mark.parametrize("without", [{}, {"margin": None}, {"margin": float("nan")}])
@pytest.mark.parametrize("place", [0, 3])
def test_preference_without_a_margin_beside_others_is_counted(
    tmp_path: Path, without: dict[str, Any], place: int
) -> None:
    """A margin is part of the loss, so no number is made up for a row that has none."""
    rows = [row | {"margin": number / 2} for number, row in enumerate(PAIRS)]
    rows[place] = PAIRS[place] | without
    out = run(rows, tmp_path, validation_fraction=0.0)
    others = [number / 2 for number in range(8) if number != place]
    assert sorted(arrays_of(out)["margins"].tolist()) == others
    assert omissions(load(out))["rows without a margin, which others have"] == 1


def test_margin_that_no_row_has_is_refused_if_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA032.*'by'.*--margin-column"):
        run(PAIRS, tmp_path, margin_column="by")


def test_columns_of_other_names_are_read(tmp_path: Path) -> None:
    rows = [{"q": "Q:", "good": f" a{n}", "bad": f" b{n}", "by": n} for n in range(3)]
    names = {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad", "margin_column": "by"}
    out = run(rows, tmp_path, kind=None, validation_fraction=0.0, **names)
    assert sides(out) == [("Q:", f" a{n}</s>", f" b{n}</s>") for n in range(3)]


@pytest.mark.parametrize("chat", [False, True])
def test_input_of_an_instruction_follows_it_as_in_chats(tmp_path: Path, chat: bool) -> None:
    named: dict[str, Any] = {"prompt_column": "instruction", "validation_fraction": 0.0}
    if chat:
        named |= {"chat": True, "tokenizer": tokenizer_with(tmp_path, CHATML)}
    rows = [{"instruction": "add", "input": f"{n}", "chosen": "a", "rejected": "b"} for n in range(4)]
    out = run(rows, tmp_path, **named)
    assert all(f"add\n\n{n}" in prompt for n, (prompt, _, _) in enumerate(sides(out)))
    assert omissions(load(out)) == {}


def test_judged_answers_come_with_the_answer_of_the_sample_before(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{n}:", "completion": f" a{n}", "label": n % 3 == 0} for n in range(9)]
    out = run(rows, tmp_path, validation_samples=2)
    tokenizer = load_tokenizer(str(out / "tokenizer"))
    for split in ("train", "validation"):
        arrays = arrays_of(out, split)
        texts = []
        for ids, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True):
            texts.append([tokenizer.decode(ids[side][mask[side] == 1]) for side in range(2)])
        numbers = [int(first[1]) for first, _ in texts]
        for index, (first, second) in enumerate(texts):
            assert first == f"Q{numbers[index]}: a{numbers[index]}</s>"
            assert second == f"Q{numbers[index]}: a{numbers[index - 1]}</s>"
        assert arrays["desirable"].tolist() == [int(number % 3 == 0) for number in numbers]


def test_judgements_of_csv_files_are_read_and_others_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text("prompt,completion,label\nQ,a,true\nQ,b,0\nQ,c,False\nQ,d,1\n")
    prepared(source, tmp_path / "out", kind="preferences", validation_fraction=0.0)
    assert sorted(arrays_of(tmp_path / "out")["desirable"].tolist()) == [0, 0, 1, 1]
    source.write_text("prompt,completion,label\nQ,a,good\n")
    with pytest.raises(DataError, match=r"DATA031.*'label' is of no use — got 'good', allowed true or false"):
        prepared(source, tmp_path / "b", kind="preferences")
    source.write_text("prompt,completion,label\nQ,a,true\nQ,b,true\n")
    with pytest.raises(DataError, match=r"DATA067.*judged alike — got desirable alone"):
        prepared(source, tmp_path / "c", kind="preferences")


def test_training_samples_of_one_judgement_are_refused_whatever_is_held_out(tmp_path: Path) -> None:
    """With some seed the only undesirable answer is held out, and with another one it is trained on."""
    rows = [{"prompt": f"Q{n}:", "completion": f" a{n}", "label": n != 0} for n in range(4)]
    outcomes = set()
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            out = run(rows, folder, seed=seed, validation_samples=2, validation_fraction=0.5)
        except DataError as error:
            assert "DATA067" in str(error) and "training samples" in str(error) and "desirable alone" in str(error)
            outcomes.add("refused")
        else:
            assert set(arrays_of(out)["desirable"].tolist()) == {0, 1}
            outcomes.add("prepared")
    assert outcomes == {"refused", "prepared"}


def test_pairs_that_are_cut_off_keep_two_different_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Q:", "chosen": "abcdefgh", "rejected": "xy"},
        {"prompt": "Q:", "chosen": "abcdefgh", "rejected": "abcdefxy"},
        {"prompt": "longer than", "chosen": "a", "rejected": "b"},
    ]
    out = run(rows, tmp_path, seq_len=6, validation_fraction=0.0)
    assert sides(out) == [("Q:", "abcd", "xy</s>")]
    left_out = omissions(load(out))
    assert left_out["preferences whose first 6 tokens are the same, see --seq-len"] == 1
    assert left_out["preferences without an answer in the first 6 tokens, see --seq-len"] == 1
    assert left_out["tokens behind the first 6 of an answer, see --seq-len"] == 5


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA032.*has no preference — got answer, question, allowed chosen and"):
        run([{"question": "a", "answer": "b"}], tmp_path)
    with pytest.raises(DataError, match=r"DATA032.*no column 'rejected'"):
        run([{"chosen": "a", "prompt": "b"}], tmp_path)
    without_prompt = r"DATA031.*'chosen' has an answer without a prompt.*a list of messages.*--prompt-column"
    for answers in (("a b", "a c"), (answered("b"), answered("c"))):
        with pytest.raises(DataError, match=without_prompt):
            run([{"chosen": answers[0], "rejected": answers[1]}], tmp_path, **chat(tmp_path))


def chat(folder: Path) -> dict[str, Any]:
    return {"chat": True, "tokenizer": str(tokenizer_with(folder, CHATML))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack": True}, "--pack has no effect on preferences"),
        ({"label_column": "a"}, "--label-column has no effect on preferences"),
        ({"answer_column": "a"}, "--answer-column has no effect on preferences"),
        ({"report": True}, "--report has no effect on preferences"),
        ({"chosen_column": "a", "desirable_column": "b"}, "--chosen-column and --desirable-column exclude each other"),
        ({"kind": None, "text_column": "t", "reference": "m"}, "--reference has no effect on documents"),
        ({"kind": "chats", "chosen_column": "a"}, "--kind chats and the other options exclude each other"),
        ({"reference_revision": "v1"}, "--reference-revision has no effect without --reference"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"PREP007.*{message}"):
        run(PAIRS, tmp_path, **options)


def test_bare_folder_of_preferences_is_known_as_such(tmp_path: Path) -> None:
    out = run(PAIRS, tmp_path)
    (out / MANIFEST).unlink()
    assert load(out).modality == "preferences"


def test_manifest_of_preferences_without_a_tensor_is_refused(tmp_path: Path) -> None:
    out = run(PAIRS, tmp_path)
    content = json.loads((out / MANIFEST).read_text())
    content["tensors"] = [tensor for tensor in content["tensors"] if tensor["name"] != "labels"]
    (out / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"DATA003.*preferences without labels"):
        load(out)


def test_datasets_are_refused_by_losses_that_take_others(tmp_path: Path) -> None:
    pairs = load(run(PAIRS, tmp_path))
    with pytest.raises(DataError, match=r"DATA035.*trained on by the job dpo"):
        pairs.refuse_prompts()
    require_preferences(pairs, Preference(loss="dpo"))
    require_preferences(pairs, Preference(loss="simpo", reference="dataset"))
    require_preferences(pairs, Preference(loss="own:loss"))
    with pytest.raises(DataError, match=r"PREF003.*'kto'.*chosen and rejected answers"):
        require_preferences(pairs, Preference(loss="kto"))
    with pytest.raises(DataError, match=r"PREF001.*of evaluate, --reference names a model or none"):
        require_preferences(pairs, Preference(loss="ipo", reference="dataset"))
    texts = prepared(table(tmp_path / "t.jsonl", {"text": "a" * 900}), tmp_path / "texts", validation_fraction=0.0)
    with pytest.raises(DataError, match=r"PREF002.*got language"):
        require_preferences(texts, Preference(loss="dpo"))
    folder = tmp_path / "judged"
    folder.mkdir()
    judged = load(run([{"prompt": "a", "completion": f"{n}", "label": n % 2} for n in range(4)], folder))
    with pytest.raises(DataError, match=r"PREF003.*answers that are judged one by one"):
        require_preferences(judged, Preference(loss="orpo"))
    assert np.isin(arrays_of(folder / "out")["desirable"], [0, 1]).all()


def test_reference_of_a_dataset_that_is_no_start_of_training_is_noted(tmp_path: Path) -> None:
    made_by = MadeBy("rows.jsonl", {"reference": str(tmp_path / "base")}, None)
    manifest = load(run(PAIRS, tmp_path)).model_copy(update={"made_by": made_by})

    def notes(repository: str | None, reference: str = "dataset", loss: str = "dpo") -> list[str]:
        tables = {"model": {"repository": repository}, "preference": {"loss": loss, "reference": reference}}
        return list(reference_notes(Job.model_validate(tables), manifest))

    base = str(tmp_path / "base")
    assert notes(base) == notes(f"{base}/") == notes("other", "initial") == notes("other", loss="simpo") == []
    (note,) = notes("other")
    assert f"is {base}, and training begins with other" in note
    (note,) = notes(None)
    assert "training begins with random weights" in note

    Path(base).mkdir()
    (Path(base) / "config.json").write_text("{}")
    shutil.copytree(base, tmp_path / "copy")
    made_by = MadeBy("rows.jsonl", {"reference": base, "reference_sha256": folder_hash(Path(base))}, None)
    manifest = manifest.model_copy(update={"made_by": made_by})
    assert notes(base) == notes(str(tmp_path / "copy")) == []
    (Path(base) / "config.json").write_text('{"other": 1}')
    (note,) = notes(base)
    assert "training begins with what has been changed there since" in note


@pytest.mark.parametrize(
    ("loss", "reference", "words"),
    [
        ("dpo", "dataset", []),
        ("own:loss", "dataset", []),
        ("robust", "dataset", ["margins of dataset"]),
        ("simpo", "dataset", ["margins of dataset"]),
        ("dpo", "initial", ["log-probabilities of a reference in dataset"]),
        ("ipo", "none", ["margins of dataset"]),
    ],
)
def test_what_a_dataset_has_and_a_loss_leaves_aside_is_noted(
    tmp_path: Path, loss: str, reference: str, words: list[str]
) -> None:
    manifest = load(run([row | {"margin": 0.5} for row in PAIRS], tmp_path))
    stored = TensorInfo(name="reference_logprobs", dtype="float32", shape=(2,))
    manifest = manifest.model_copy(update={"tensors": (*manifest.tensors, stored), "made_by": None})
    job = Job.model_validate({"preference": {"loss": loss, "reference": reference}})
    notes = list(preference_notes(job, manifest))
    assert [note.partition(" '")[0] for note in notes] == words


def test_reference_that_has_changed_since_a_run_began_scores_nothing(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    start, saved = tmp_path / "start", tmp_path / "model"
    for folder in (start, saved):
        LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).save_pretrained(folder)
    (tmp_path / "config.toml").write_text(f'[model]\nrepository = "{start}"\n[preference]\nloss = "dpo"\n')
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "identity.json").write_text(json.dumps({"model.repository": folder_hash(start)}))
    pairs = load(run(PAIRS, tmp_path))
    model = ModelSource(saved)
    _, task = open_saved(saved)
    _, shown = preference_task(task, model.job(), pairs, None, torch.device("cpu"))
    assert shown == "dpo, reference initial"
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).save_pretrained(start)
    with pytest.raises(CheckpointError, match=r"CKPT007.*reference has changed.*\(model.repository\).*--reference"):
        preference_task(task, model.job(), pairs, None, torch.device("cpu"))
    _, shown = preference_task(task, model.job(), pairs, str(start), torch.device("cpu"))
    assert shown == f"dpo, reference {start}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache of a hub with two commits of some/model, of which the branch is at the second; the hub can't be reached."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    cache = tmp_path / "cache" / "models--some--model"
    for commit in "ab":
        folder = cache / "snapshots" / (commit * 40)
        LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("b" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def test_reference_of_a_run_is_the_commit_of_the_hub_that_it_began_with(hub: Path, tmp_path: Path) -> None:
    saved = tmp_path / "model"
    shutil.copytree(hub / "snapshots" / ("a" * 40), saved)
    (tmp_path / "config.toml").write_text('[model]\nrepository = "some/model"\n[preference]\nloss = "dpo"\n')
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "identity.json").write_text(json.dumps({"model.revision": "a" * 40}))
    out = run(PAIRS, tmp_path, tokenizer="byte")
    network, task = open_saved(saved)
    margins = {}
    for reference in (None, "some/model"):
        scored_by, _ = preference_task(task, ModelSource(saved).job(), load(out), reference, torch.device("cpu"))
        figures = metrics_of(scored_by, evaluate(network, scored_by, batches_of([arrays_of(out)], 6), "cpu"))
        margins[reference] = figures["margin"]
    assert margins[None] == 0
    assert margins["some/model"] != 0


def test_reference_of_the_hub_is_known_by_its_commit_and_by_each_dataset_of_a_mixture(
    hub: Path, tmp_path: Path
) -> None:
    parts = []
    for name in ("some/model", str(hub / "snapshots" / ("a" * 40))):
        folder = tmp_path / f"part{len(parts)}"
        folder.mkdir()
        parts.append(run(PAIRS, folder, tokenizer="byte", reference=name))
    made_by = load(parts[0]).made_by
    assert made_by is not None and made_by.options["reference_commit"] == "b" * 40
    mix = [{"path": str(part), "weight": 1.0} for part in parts]
    preference = {"loss": "dpo", "reference": "dataset"}
    job = Job.model_validate({"model": {"repository": "some/model"}, "preference": preference, "dataset": {"mix": mix}})
    with opened(job.dataset) as source:
        first, second = (list(reference_notes(job, manifest)) for manifest in source.manifests)
        assert not first and len(second) == 1 and "training begins with some/model" in second[0]
        (hub / "refs" / "main").write_text("a" * 40)
        (note,) = reference_notes(job, source.manifests[0])
    assert "is some/model, and training begins with another commit of it" in note


def test_reference_with_other_tokens_or_too_few_positions_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    reference = tmp_path / "reference"
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).save_pretrained(reference)
    byte_tokenizer().save_pretrained(reference)
    how = {"reference": str(reference), "validation_fraction": 0.0}
    scored = run(PAIRS, tmp_path, tokenizer="byte", **how)
    assert "reference_logprobs" in arrays_of(scored)
    recorded = load(scored).made_by
    assert recorded is not None and recorded.options["reference_sha256"] == folder_hash(reference)
    with pytest.raises(DataError, match=r"DATA023.*has other tokens than the preferences.*--tokenizer"):
        run(PAIRS, tmp_path, tokenizer="characters", overwrite=True, **how)
    GPT2LMHeadModel(GPT2Config(vocab_size=400, n_positions=4, n_embd=8, n_layer=1, n_head=2)).save_pretrained(reference)
    with pytest.raises(DataError, match=r"DATA024.*the sequences of the preferences are too long.*up to 4"):
        run(PAIRS, tmp_path, tokenizer="byte", overwrite=True, **how)


def test_characters_of_answers_without_a_template_are_the_vocabulary(tmp_path: Path) -> None:
    out = run([{"prompt": "1", "chosen": "2", "rejected": "3"}], tmp_path, tokenizer="characters")
    assert {"1", "2", "3"} <= set(load_tokenizer(str(out / "tokenizer")).get_vocab())
    assert "u" not in load_tokenizer(str(out / "tokenizer")).get_vocab()
