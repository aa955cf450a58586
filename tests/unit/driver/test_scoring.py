"""The trial before a start, on datasets as they lie on disk, and masked language models with real tokenizers."""

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, BertTokenizerFast, PreTrainedTokenizerFast

from hypha_ray.config import Job
from hypha_ray.config.schema import Model
from hypha_ray.data.manifest import Manifest, PreprocessorInfo
from hypha_ray.data.slices import describe, merge, write_slice
from hypha_ray.driver.attempts import specials_of
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.preflight.checks import case_of, check_case
from hypha_ray.errors import HyphaError
from hypha_ray.model.build import build_model, task_of
from hypha_ray.model.checks import small_copies
from hypha_ray.model.loss_check import check_loss_of
from hypha_ray.model.metrics import batches_of, evaluate
from hypha_ray.model.saved_model import open_saved
from hypha_ray.model.task import IGNORE_INDEX
from hypha_ray.types import Arrays, Samples
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.truth_cases import ACCEPTED, Case

WORDS = [f"word{number}" for number in range(40)]
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 64}
GPT = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 64}


def bert_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizerFast(vocab={word: index for index, word in enumerate(vocabulary)})
    tokenizer.save_pretrained(folder)
    return tokenizer


def roberta_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS, "<mask>"])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    names = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **{f"{one}_token": token for one, token in names.items()})
    tokenizer.save_pretrained(folder)
    return tokenizer


TOKENIZERS = {
    "bert": (bert_tokenizer, BERT | {"model_type": "bert"}),
    "roberta": (roberta_tokenizer, BERT | {"model_type": "roberta", "max_position_embeddings": 40}),
}


def encoded(tokenizer: PreTrainedTokenizerFast, samples: int = 12) -> Arrays:
    draws = np.random.default_rng(1)
    texts = [" ".join(draws.choice([*WORDS, "strange"], size=draws.integers(1, 9))) for _ in range(samples)]
    found = tokenizer([*texts[1:], ""], padding="max_length", max_length=12, return_tensors="np")
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


def dataset(folder: Path, train: Arrays, validation: Arrays | None = None) -> tuple[Path, Manifest]:
    folder.mkdir(parents=True, exist_ok=True)
    parts = [("train", train), *([] if validation is None else [("validation", validation)])]
    slices = tuple(write_slice(folder, index, split, arrays) for index, (split, arrays) in enumerate(parts))
    tensors = describe(train, "slice")[1]
    if validation is not None:
        tensors = merge(tensors, describe(validation, "slice")[1], "slice")
    manifest = Manifest(name="words", modality="other", slices=slices, tensors=tensors)
    manifest.save(folder)
    return folder, manifest


def job_of(config: dict[str, Any] | str, task: str, **tables: Any) -> Job:
    model = {"repository": config} if isinstance(config, str) else {"config": config}
    return Job.model_validate({"model": model | {"type": task}, "resources": {"num_workers": 1}, **tables})


def keys(size: int, epoch: int = 0) -> np.ndarray:
    return np.stack([np.full(size, epoch), np.zeros(size, np.int64), np.arange(size)], axis=1)


@pytest.mark.parametrize("family", TOKENIZERS)
def test_dataset_of_other_tokens_than_the_repositorys_is_told(family: str, tmp_path: Path) -> None:
    bert_tokenizer(tmp_path / "model")
    build_model(Model(config=BERT | {"model_type": "bert"}, type="masked-lm"), 0).save_pretrained(tmp_path / "model")
    make, _ = TOKENIZERS[family]
    folder, manifest = dataset(tmp_path / "data", encoded(make(tmp_path / "data" / "tokenizer")))
    manifest = manifest.model_copy(update={"preprocessor": PreprocessorInfo(family, folder="tokenizer")})
    notes = check_case(case_of(job_of(str(tmp_path / "model"), "masked-lm"), in_folder(folder, manifest)))
    told = f"the numbers in dataset 'words' are other tokens than those of {tmp_path / 'model'}"
    assert [note.startswith(told) for note in notes] == [True] * (family != "bert")


@pytest.mark.parametrize("family", TOKENIZERS)
def test_masked_model_with_its_tokenizer_trains_and_is_scored_on_the_same_tokens_once_saved(
    family: str, tmp_path: Path
) -> None:
    make, config = TOKENIZERS[family]
    tokenizer = make(tmp_path / "model")
    build_model(Model(config=config, type="masked-lm"), 0).save_pretrained(tmp_path / "model")
    arrays = encoded(tokenizer)
    folder, manifest = dataset(tmp_path / "data", arrays, arrays)
    job = job_of(str(tmp_path / "model"), "masked-lm")
    assert check_case(case_of(job, in_folder(folder, manifest))) == []
    trainer = SupervisedTrainer(job, specials_of(job, in_folder(folder, manifest)))
    result = trainer.step(Samples(arrays, keys(12, epoch=2)))
    ordinary = ~np.isin(arrays["input_ids"], tokenizer.all_special_ids)
    assert 0 < result.scored < ordinary.sum()
    assert torch.isfinite(result.loss)
    parts = [trainer.evaluate([Samples(arrays, keys(12)).part(one)]) for one in (slice(5, 12), slice(0, 5))]
    trainer.model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    network, task = open_saved(tmp_path / "saved")
    again = evaluate(network, task, batches_of([arrays], 5), "cpu")
    (loss_sum, count), of_parts = again["val_loss"], [part["val_loss"] for part in parts]
    assert count == sum(one[1] for one in of_parts)
    assert loss_sum == pytest.approx(sum(one[0] for one in of_parts), rel=1e-5)


@pytest.mark.parametrize("family", TOKENIZERS)
def test_masked_model_never_has_to_guess_a_special_token(family: str, tmp_path: Path) -> None:
    make, config = TOKENIZERS[family]
    tokenizer = make(tmp_path / "tokenizer")
    job = job_of(config, "masked-lm", preprocessor={"repository": str(tmp_path / "tokenizer")})
    trainer, arrays = SupervisedTrainer(job), encoded(tokenizer, 200)
    guessed: list[torch.Tensor] = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, fed: guessed.append(fed["labels"][fed["labels"] != IGNORE_INDEX]), with_kwargs=True
    )
    trainer.step(Samples(arrays, keys(200)))
    assert len(guessed[0]) > 100
    assert not set(guessed[0].tolist()) & set(tokenizer.all_special_ids)


def test_tokenizer_beside_the_dataset_says_which_token_masks(tmp_path: Path) -> None:
    tokenizer = bert_tokenizer(tmp_path / "data" / "tokenizer")
    arrays = encoded(tokenizer)
    folder, manifest = dataset(tmp_path / "data", arrays)
    job = job_of(BERT | {"model_type": "bert"}, "masked-lm")
    check_case(case_of(job, in_folder(folder, manifest)))
    specials = specials_of(job, in_folder(folder, manifest))
    assert specials is not None
    assert (specials.mask_token_id, set(specials.all_special_ids)) == (4, {0, 1, 2, 3, 4})


def ids(samples: int = 8, **others: Any) -> Arrays:
    return {"input_ids": np.random.default_rng(0).integers(6, 60, (samples, 16)), **others}


@pytest.mark.parametrize(
    ("config", "task", "arrays", "code"),
    [
        (BERT | {"model_type": "bert"}, "causal-lm", ids(), "MODEL016"),
        (BERT | {"model_type": "megatron-bert"}, "causal-lm", ids(), "MODEL016"),
        (BERT | {"model_type": "bert"}, "masked-lm", ids(), "MODEL007"),
        (BERT | {"model_type": "bert", "mask_token_id": 64}, "masked-lm", ids(), "MODEL007"),
        (GPT, "causal-lm", ids(labels=np.full((8, 16), IGNORE_INDEX)), "DATA052"),
        (GPT, "auto", ids(labels=np.zeros(8, np.int64)), "MODEL012"),
    ],
    ids=["sees all", "sees all too", "no mask token", "mask token beyond", "nothing to score", "no loss"],
)
def test_job_whose_loss_means_nothing_is_refused_before_it_starts(
    config: dict[str, Any], task: str, arrays: Arrays, code: str, tmp_path: Path
) -> None:
    folder, manifest = dataset(tmp_path, arrays)
    with pytest.raises(HyphaError, match=code):
        check_case(case_of(job_of(config, task), in_folder(folder, manifest)))


def test_fused_loss_is_refused_before_the_start_for_capped_logits_alone(tmp_path: Path) -> None:
    folder, manifest = dataset(tmp_path, ids())
    wanted = {"worker": {"fused_loss": True}}
    assert check_case(case_of(job_of(GPT, "causal-lm", **wanted), in_folder(folder, manifest))) == []
    gemma = {**BERT, "model_type": "gemma2", "head_dim": 8, "num_key_value_heads": 1, "pad_token_id": 0}
    with pytest.raises(HyphaError, match=r"MODEL020.*worker\.fused_loss: Gemma2ForCausalLM"):
        check_case(case_of(job_of(gemma, "causal-lm", **wanted), in_folder(folder, manifest)))


def test_validation_split_with_nothing_to_score_is_refused(tmp_path: Path) -> None:
    prompts = ids(labels=np.full((8, 16), IGNORE_INDEX))
    folder, manifest = dataset(tmp_path, ids(labels=ids()["input_ids"]), prompts)
    with pytest.raises(HyphaError, match=r"DATA052.*words/validation"):
        check_case(case_of(job_of(GPT, "causal-lm"), in_folder(folder, manifest)))


def test_tensor_that_the_model_cannot_take_is_named(tmp_path: Path) -> None:
    arrays = ids(source=np.arange(8), token_type_ids=np.zeros((8, 16), np.int64), labels=np.arange(8))
    folder, manifest = dataset(tmp_path, arrays)
    notes = check_case(case_of(job_of(GPT, "causal-lm"), in_folder(folder, manifest)))
    assert len(notes) == 2
    assert "tensor 'labels' is left out" in notes[0]
    assert "tensor 'source' is left out" in notes[1]
    explicit = job_of(GPT, "causal-lm").model_copy(
        update={"model": Model(config=GPT, type="causal-lm", input_names=["input_ids"])}
    )
    assert check_case(case_of(explicit, in_folder(folder, manifest))) == []


def test_sample_that_overflows_does_not_refuse_the_model(tmp_path: Path) -> None:
    case: Case = next(one for one in ACCEPTED if one.task == "image-classification")
    pictures = case.arrays["images"].copy()
    pictures[0] = np.finfo(np.float32).max
    folder, manifest = dataset(tmp_path, {**case.arrays, "images": pictures})
    job = job_of({"model_type": case.model_type, **case.config}, case.task)
    assert check_case(case_of(job, in_folder(folder, manifest))) == []


def test_large_model_is_tried_on_a_small_copy(tmp_path: Path) -> None:
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    folder, manifest = dataset(tmp_path, ids())
    job = job_of(large | {"model_type": "bert", "vocab_size": 30_000}, "causal-lm")
    with pytest.raises(HyphaError, match="MODEL016"):
        check_case(case_of(job, in_folder(folder, manifest)))
    decoder = job_of(large | {"model_type": "bert", "vocab_size": 30_000, "is_decoder": True}, "causal-lm")
    assert check_case(case_of(decoder, in_folder(folder, manifest))) == []


def test_trainer_outside_of_ray_refuses_a_loss_that_is_not_the_tasks() -> None:
    samples = Samples(ids(), keys(8))
    with pytest.raises(HyphaError, match="MODEL016"):
        SupervisedTrainer(job_of(BERT | {"model_type": "bert"}, "causal-lm")).check_loss(samples)
    with pytest.raises(HyphaError, match="MODEL012"):
        SupervisedTrainer(job_of(BERT | {"model_type": "bert"}, "text-encoding"))


@pytest.mark.parametrize(("padding", "fits"), [(0, True), (5, False), (None, False)])
def test_decoder_that_would_classify_by_padding_is_refused(padding: int | None, fits: bool, tmp_path: Path) -> None:
    """Transformers gives the class of a text alone to a padded one only if it knows the token for padding."""
    few = ids(labels=np.arange(8) % 2, attention_mask=np.ones((8, 16), np.int64))
    few["input_ids"][3, 9:], few["attention_mask"][3, 9:] = 0, 0
    job = job_of(
        GPT | {"pad_token_id": padding, "num_labels": 2}, "sequence-classification", rounds={"max_batch_size": 1}
    )
    network: Any = build_model(job.model, 0).eval()
    row, mask = (torch.tensor(few[name][3:4]) for name in ("input_ids", "attention_mask"))
    alone = network(row[:, :9]).logits
    assert torch.allclose(network(row, attention_mask=mask).logits, alone, atol=1e-6) == fits
    folder, manifest = dataset(tmp_path, few)
    task = task_of(job.model, network)
    checks = (
        lambda: check_case(case_of(job, in_folder(folder, manifest))),
        lambda: check_loss_of(task, network, Samples(few, keys(8))),
    )
    for check in checks:
        with nullcontext() if fits else pytest.raises(HyphaError, match=r"MODEL018.*padding"):
            check()


def test_check_of_a_loss_changes_no_step() -> None:
    samples, found = Samples(ids(), keys(8)), []
    for checks in (False, True):
        trainer = SupervisedTrainer(job_of(GPT, "causal-lm"))
        trainer.seed(0)
        if checks:
            trainer.check_loss(samples)
        trainer.step(samples)
        found.append([one.detach().clone() for one in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("family", ["bamba", "jamba", "mamba2", "mbart", "mixtral", "qwen3_moe"])
def test_small_copy_can_be_made_of_a_large_model(family: str) -> None:
    large = AutoConfig.for_model(family, vocab_size=1000)
    for copy in small_copies(large):
        with suppress(RuntimeError, ValueError):
            network = AutoModelForCausalLM.from_config(copy)
            network(input_ids=torch.arange(24).reshape(2, 12), use_cache=False)
            break
    else:
        pytest.fail("no copy can be run")
    assert sum(one.numel() for one in network.parameters()) < 100_000_000


def test_seed_repeats_a_step_of_a_model_that_draws_from_numpy() -> None:
    case: Case = next(one for one in ACCEPTED if one.task == "audio-classification")
    drawing = {"mask_time_prob": 0.5, "mask_time_length": 2, "mask_feature_prob": 0.5, "mask_feature_length": 2}
    job = job_of({"model_type": case.model_type, **case.config, **drawing}, case.task)
    found = []
    for noise in (1, 2):
        np.random.seed(noise)
        trainer = SupervisedTrainer(job)
        trainer.seed(0, 3, 1)
        found.append(trainer.step(Samples(case.arrays, keys(6))))
    assert torch.equal(found[0].loss, found[1].loss)
    assert torch.equal(found[0].norm, found[1].norm)
