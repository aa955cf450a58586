import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.task import IGNORE_INDEX, Masking, Task
from hypha_ray.model.tasks import TASKS, find_task

HYPHA_TYPES = """auto pretraining causal-lm masked-lm mask-generation seq2-seq-lm seq2seq-lm seq-2-seq-lm
sequence-classification multiple-choice next-sentence-prediction token-classification question-answering text-encoding
depth-estimation image-classification video-classification keypoint-detection keypoint-matching object-detection
image-segmentation image-to-image semantic-segmentation instance-segmentation universal-segmentation
zero-shot-image-classification zero-shot-object-detection audio-classification audio-frame-classification ctc
speech-seq2-seq speech-seq-2-seq audio-x-vector text-to-spectrogram text-to-waveform audio-tokenization
table-question-answering document-question-answering vison2-seq vision-2-seq image-text-to-text
time-series-prediction vision-classification"""


def masked_lm(**masking) -> Task:
    return dataclasses.replace(TASKS["masked-lm"], masking=Masking(**({"mask_id": 3, "vocab_size": 100} | masking)))


def keys(samples: int, epoch: int = 0, place: int = 0, start: int = 0) -> np.ndarray:
    """Which samples these are: so many of one slice, one after the other."""
    return np.stack([np.full(samples, epoch), np.full(samples, place), np.arange(start, start + samples)], axis=1)


@pytest.mark.parametrize("task", {task.name: task for task in TASKS.values()}.values(), ids=lambda task: task.name)
def test_task_table_auto_class_exists_in_transformers(task: Task) -> None:
    assert hasattr(transformers, task.auto_class)


def test_task_table_every_auto_class_of_transformers_has_a_task() -> None:
    ours = {task.auto_class for task in TASKS.values()}
    assert {name for name in dir(transformers) if name.startswith("AutoModel")} <= ours


@pytest.mark.parametrize("name", HYPHA_TYPES.split())
def test_find_task_every_name_of_hypha_and_the_guide_is_known(name: str) -> None:
    assert find_task(name).auto_class.startswith("AutoModel")


@pytest.mark.parametrize(
    ("name", "auto_class"),
    [
        ("vision-classification", "AutoModelForImageClassification"),
        ("seq2-seq-lm", "AutoModelForSeq2SeqLM"),
        ("speech-seq2-seq", "AutoModelForSpeechSeq2Seq"),
        ("vison2-seq", "AutoModelForImageTextToText"),
        ("table-question-answering", "AutoModelForTableQuestionAnswering"),
        ("Causal_LM", "AutoModelForCausalLM"),
    ],
)
def test_find_task_alias_leads_to_the_right_class(name: str, auto_class: str) -> None:
    assert find_task(name).auto_class == auto_class


def test_find_task_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"MODEL001.*'causl-lm'.*did you mean 'causal-lm'"):
        find_task("causl-lm")


@pytest.mark.parametrize("name", ["sft", "gpt", "diffusion", "reward"])
def test_find_task_unlike_any_suggests_none(name: str) -> None:
    with pytest.raises(ConfigError, match=r"MODEL001.*name one of them, such as causal-lm"):
        find_task(name)


def test_tasks_import_needs_no_torch() -> None:
    code = "import sys, hypha_ray.model.tasks; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_causal_lm_inputs_padding_is_not_scored() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 0]], dtype=torch.int32),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
    }
    inputs = find_task("causal-lm").inputs(batch)
    assert inputs["labels"].tolist() == [[5, 6, 7, IGNORE_INDEX]]
    assert inputs["labels"].dtype == torch.int64
    assert find_task("causal-lm").count(inputs) == 2


def test_causal_lm_inputs_without_attention_mask_score_every_token_but_the_first() -> None:
    task = find_task("causal-lm")
    inputs = task.inputs({"input_ids": torch.arange(12).reshape(3, 4)})
    assert set(inputs) == {"input_ids", "labels"}
    assert task.count(inputs) == 9


def test_image_classification_inputs_images_become_pixel_values() -> None:
    task = find_task("image-classification")
    images, labels = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 2], dtype=torch.int32)
    inputs = task.inputs({"images": images, "labels": labels, "id": labels})
    assert set(inputs) == {"pixel_values", "labels"}
    assert inputs["labels"].dtype == torch.int64
    assert task.count(inputs) == 3
    assert task.inputs({"pixel_values": images, "labels": labels}).keys() == inputs.keys()


def test_token_classification_count_leaves_ignored_labels_out() -> None:
    task = find_task("token-classification")
    assert task.count({"labels": torch.tensor([[1, IGNORE_INDEX, 2], [IGNORE_INDEX, IGNORE_INDEX, 0]])}) == 3


def test_multi_label_classification_count_is_the_number_of_samples() -> None:
    assert find_task("sequence-classification").count({"labels": torch.rand(4, 7)}) == 4


def test_question_answering_count_is_the_number_of_samples() -> None:
    task = find_task("question-answering")
    ones = torch.ones(2, 5, dtype=torch.int64)
    assert task.count(task.inputs({"input_ids": ones, "start_positions": ones[:, 0], "end_positions": ones[:, 1]})) == 2


def test_inputs_missing_tensor_names_it_and_what_is_there() -> None:
    with pytest.raises(DataError, match=r"DATA050.*'images'.*got input_ids"):
        find_task("image-classification").inputs({"input_ids": torch.zeros(1, 2)})


def test_input_names_replace_the_tensors_of_the_task() -> None:
    task = find_task("causal-lm", ["input_ids", "token_type_ids"])
    ids = torch.ones(2, 3, dtype=torch.int64)
    inputs = task.inputs({"input_ids": ids, "attention_mask": ids, "token_type_ids": ids})
    assert set(inputs) == {"input_ids", "token_type_ids", "labels"}


def test_input_names_with_labels_pass_them_as_they_are() -> None:
    task = find_task("causal-lm", ["input_ids", "labels"])
    ids, labels = torch.ones(1, 3, dtype=torch.int64), torch.tensor([[IGNORE_INDEX, 1, IGNORE_INDEX]])
    inputs = task.inputs({"input_ids": ids, "labels": labels})
    assert inputs["labels"].tolist() == labels.tolist()
    assert task.count(inputs) == 1


def test_input_names_without_token_ids_make_no_labels() -> None:
    inputs = find_task("causal-lm", ["inputs_embeds"]).inputs({"inputs_embeds": torch.rand(2, 3, 4)})
    assert set(inputs) == {"inputs_embeds"}


def test_masked_lm_inputs_hide_fifteen_percent_as_bert_does() -> None:
    ids = torch.full((200, 100), 50)
    inputs = masked_lm().inputs({"input_ids": ids}, keys(200))
    scored = inputs["labels"] != IGNORE_INDEX
    assert 0.14 < scored.float().mean() < 0.16
    assert 0.77 < (inputs["input_ids"][scored] == 3).float().mean() < 0.83
    assert 0.08 < (inputs["input_ids"][scored] == 50).float().mean() < 0.13
    assert (inputs["input_ids"][~scored] == 50).all()
    assert (inputs["labels"][scored] == 50).all()
    assert masked_lm().count(inputs) == int(scored.sum())


def test_masked_lm_inputs_same_samples_same_masks_whatever_batch_and_order() -> None:
    ids = torch.randint(5, 100, (12, 7), generator=torch.Generator().manual_seed(1))
    task, order = masked_lm(), [7, 0, 11, 3, 2, 1, 10, 4, 9, 8, 5, 6]
    whole = task.inputs({"input_ids": ids}, keys(12), seed=5)
    others = [task.inputs({"input_ids": ids[[row]]}, keys(12)[[row]], seed=5) for row in order]
    for name in ("input_ids", "labels"):
        assert torch.equal(whole[name][order], torch.cat([other[name] for other in others]))


@pytest.mark.parametrize("name", ["epoch", "place", "start", "seed"])
def test_masked_lm_inputs_other_epoch_slice_index_or_seed_other_masks(name: str) -> None:
    ids, seed, others = torch.full((30, 20), 50), int(name == "seed"), {} if name == "seed" else {name: 30}
    one = masked_lm().inputs({"input_ids": ids}, keys(30))["labels"] != IGNORE_INDEX
    two = masked_lm().inputs({"input_ids": ids}, keys(30, **others), seed)["labels"] != IGNORE_INDEX
    assert 0.05 < (one & two).float().mean() / one.float().mean() < 0.4


def test_masked_lm_inputs_sample_of_special_tokens_alone_counts_nothing() -> None:
    inputs = masked_lm(special_ids=(1, 2)).inputs({"input_ids": torch.tensor([[1, 2, 2, 1], [1, 9, 2, 1]])}, keys(2))
    assert inputs["labels"].tolist() == [[IGNORE_INDEX] * 4, [IGNORE_INDEX, 9, IGNORE_INDEX, IGNORE_INDEX]]
    assert masked_lm().count(inputs) == 1


def test_masked_lm_inputs_labels_of_a_slice_are_taken_as_they_are() -> None:
    ids, labels = torch.tensor([[5, 3, 7]]), torch.tensor([[IGNORE_INDEX, 6, IGNORE_INDEX]])
    task = dataclasses.replace(masked_lm(), accepts=frozenset({"labels"}))
    inputs = task.inputs({"input_ids": ids, "labels": labels}, keys(1))
    assert inputs["input_ids"].tolist() == ids.tolist()
    assert inputs["labels"].tolist() == labels.tolist()


def test_causal_lm_labels_of_a_slice_are_scored_and_those_of_whole_samples_are_not() -> None:
    task = dataclasses.replace(find_task("causal-lm"), accepts=frozenset({"labels", "token_type_ids"}))
    ids, labels = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[IGNORE_INDEX, IGNORE_INDEX, 7, 8]], dtype=torch.int32)
    inputs = task.inputs({"input_ids": ids, "labels": labels, "token_type_ids": ids, "source": ids})
    assert set(inputs) == {"input_ids", "labels", "token_type_ids"}
    assert task.count(inputs) == 2
    assert task.inputs({"input_ids": ids, "labels": torch.tensor([1])})["labels"].tolist() == ids.tolist()


def test_spans_beyond_the_sequence_are_left_out_with_both_ends() -> None:
    task, ids = find_task("question-answering"), torch.ones(4, 5, dtype=torch.int64)
    ends = {"start_positions": torch.tensor([0, 4, 5, 4]), "end_positions": torch.tensor([1, 9, 5, 4])}
    inputs = task.inputs({"input_ids": ids, **ends})
    assert task.count(inputs) == 2
    assert [bool(one < 5) for one in inputs["start_positions"]] == [True, False, False, True]
    assert [bool(one < 5) for one in inputs["end_positions"]] == [True, False, False, True]


def test_segmentation_count_leaves_the_ignored_label_out() -> None:
    task = dataclasses.replace(find_task("semantic-segmentation"), ignored=255)
    assert task.count({"labels": torch.tensor([[[1, 255], [0, 3]], [[255, 255], [255, 1]]])}) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.uint8])
def test_images_of_any_type_become_float32_and_their_labels_int64(dtype: torch.dtype) -> None:
    batch = {"images": torch.ones(2, 1, 4, 4).to(dtype), "labels": torch.tensor([0, 1], dtype=torch.uint8)}
    inputs = find_task("image-classification").inputs(batch)
    assert inputs["pixel_values"].dtype == torch.float32
    assert inputs["labels"].dtype == torch.int64


def test_masked_lm_inputs_padding_and_special_tokens_stay_and_each_sample_has_a_hidden_token() -> None:
    ids = torch.tensor([[1, 8, 2, 0]]).repeat(50, 1)
    mask = torch.tensor([[1, 1, 1, 0]]).repeat(50, 1)
    labels = masked_lm(special_ids=(1, 2)).inputs({"input_ids": ids, "attention_mask": mask}, keys(50))["labels"]
    assert labels.tolist() == [[IGNORE_INDEX, 8, IGNORE_INDEX, IGNORE_INDEX]] * 50


def test_masked_lm_inputs_int32_tokens_stay_int32() -> None:
    inputs = masked_lm().inputs({"input_ids": torch.full((2, 8), 7, dtype=torch.int32)}, keys(2))
    assert inputs["input_ids"].dtype == torch.int32


def test_masked_lm_without_mask_token_raises() -> None:
    with pytest.raises(ConfigError, match=r"MODEL007.*mask token"):
        find_task("masked-lm").inputs({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, keys(1))
