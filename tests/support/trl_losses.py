"""Losses and gradients of preferences by TRL on fixed batches, frozen in trl_losses.safetensors.

It takes TRL, which isn't among the requirements. In an environment of its own:

    pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0 && python tests/support/trl_losses.py

Model, reference and batches are frozen, too. All has 64 bits: with 32, processors differ by more than 1e-6 of
large gradients. Losses come from these trainers, without an optimizer's step:

    dpo, robust, ipo    trl.DPOTrainer, loss types sigmoid, robust and ipo
    kto                 trl.KTOTrainer
    simpo               trl.experimental.cpo.CPOTrainer, loss type simpo, cpo_alpha = 0
    dpo smoothed        the same, loss type sigmoid with label_smoothing; it has no reference
    orpo                trl.experimental.orpo.ORPOTrainer
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

FILE: Final = Path(__file__).with_name("trl_losses.safetensors")
CONFIG: Final = {
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Configuration of a Llama."""
CASES: Final[dict[str, dict[str, Any]]] = {
    "dpo": {},
    "dpo beta": {"beta": 0.7},
    "dpo smoothed": {"label_smoothing": 0.2, "beta": 0.5, "reference": "none"},
    "robust": {"label_smoothing": 0.2, "beta": 0.5},
    "ipo": {},
    "ipo beta": {"beta": 0.5},
    "simpo": {"beta": 2.0, "gamma": 0.8},
    "simpo smoothed": {"beta": 2.0, "gamma": 0.8, "label_smoothing": 0.1},
    "orpo": {},
    "kto": {},
    "kto weighted": {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.6},
}
"""Settings of each case, whose name begins with that of the loss."""


def batch(generator: torch.Generator, samples: int = 5, width: int = 10) -> dict[str, Tensor]:
    """Sequences of random tokens, int64 [N, 2, L], with prompts and answers of several lengths."""
    ids = torch.randint(2, CONFIG["vocab_size"], (samples, 2, width), generator=generator)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for sample in range(samples):
        prompt = 2 + sample % 3
        ids[sample, 1, :prompt] = ids[sample, 0, :prompt]
        for side in range(2):
            end = prompt + 2 + (sample + 2 * side) % (width - prompt - 2)
            mask[sample, side, :end] = 1
            labels[sample, side, prompt:end] = ids[sample, side, prompt:end]
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def model_of(seed: int) -> Any:
    """A Llama with weights large enough that its probabilities differ."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def tokenizer() -> Any:
    """A tokenizer of words, which the trainers need and these batches don't."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(22))]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def trainer_of(name: str, settings: Mapping[str, Any], policy: Any, reference: Any, folder: str) -> Any:
    """The trainer of a case."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    loss, _, _ = name.partition(" ")
    common = {
        "output_dir": folder,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "beta": settings.get("beta", 0.1),
    }
    common["gradient_checkpointing"] = False
    compared = datasets.Dataset.from_list([{"prompt": "w1 w2", "chosen": " w3", "rejected": " w4"}] * 4)
    if loss == "kto":
        judged = [{"prompt": "w1 w2", "completion": f" w{number}", "label": number % 2 == 0} for number in range(4)]
        weights = {key: value for key, value in settings.items() if key.endswith("_weight")}
        arguments = trl.KTOConfig(**common, **weights, train_sampling_strategy="sequential")
        dataset = datasets.Dataset.from_list(judged)
        return trl.KTOTrainer(policy, reference, arguments, train_dataset=dataset, processing_class=tokenizer())
    smoothing = settings.get("label_smoothing", 0.0)
    if loss == "orpo":
        orpo: Any = importlib.import_module("trl.experimental.orpo")
        return orpo.ORPOTrainer(policy, orpo.ORPOConfig(**common), train_dataset=compared, processing_class=tokenizer())
    if loss == "simpo" or settings.get("reference") == "none":
        cpo: Any = importlib.import_module("trl.experimental.cpo")
        loss_type = "simpo" if loss == "simpo" else "sigmoid"
        gamma = settings.get("gamma", 0.5)
        arguments = cpo.CPOConfig(
            **common, loss_type=loss_type, cpo_alpha=0.0, simpo_gamma=gamma, label_smoothing=smoothing
        )
        return cpo.CPOTrainer(policy, arguments, train_dataset=compared, processing_class=tokenizer())
    loss_type = "sigmoid" if loss == "dpo" else loss
    arguments = trl.DPOConfig(**common, loss_type=[loss_type], label_smoothing=smoothing)
    return trl.DPOTrainer(policy, reference, arguments, train_dataset=compared, processing_class=tokenizer())


def loss_of(trainer: Any, name: str, inputs: Mapping[str, Tensor], desirable: Tensor) -> Tensor:
    """The loss of a batch by a trainer, in the form that its collator gives batches."""
    loss, _, _ = name.partition(" ")
    ids, mask, labels = inputs["input_ids"], inputs["attention_mask"], inputs["labels"]
    answers = (labels != -100).long()
    if hasattr(trainer, "get_batch_loss_metrics"):
        of_sides = {}
        for side, prefix in enumerate(("chosen", "rejected")):
            of_sides[f"{prefix}_input_ids"] = ids[:, side]
            of_sides[f"{prefix}_attention_mask"] = mask[:, side]
            of_sides[f"{prefix}_labels"] = labels[:, side]
        return trainer.get_batch_loss_metrics(trainer.model, of_sides)[0]
    if loss == "kto":
        judged = {"input_ids": ids[:, 0], "attention_mask": mask[:, 0], "completion_mask": answers[:, 0]}
        mismatched = {
            f"KL_{key}": value
            for key, value in (
                ("input_ids", ids[:, 1]),
                ("attention_mask", mask[:, 1]),
                ("completion_mask", answers[:, 1]),
            )
        }
        return trainer.compute_loss(trainer.model, judged | mismatched | {"label": desirable.bool()})
    chosen_first = {"input_ids": ids, "attention_mask": mask, "completion_mask": answers}
    return trainer.compute_loss(
        trainer.model, {key: value.transpose(0, 1).flatten(0, 1) for key, value in chosen_first.items()}
    )


def main() -> None:
    """Write the file anew."""
    inputs = batch(torch.Generator().manual_seed(5))
    desirable = torch.tensor([1, 0, 1, 1, 0])
    policy, reference = model_of(1), model_of(2)
    weights = {key: value.clone() for key, value in policy.state_dict().items()}
    tensors = {f"batch/{key}": value for key, value in inputs.items()} | {"batch/desirable": desirable}
    tensors |= {f"policy/{key}": value for key, value in weights.items()}
    tensors |= {f"reference/{key}": value.clone() for key, value in reference.state_dict().items()}
    for name, settings in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            fresh, frozen = model_of(1).double(), model_of(2).double()
            trainer = trainer_of(name, settings, fresh, frozen, folder)
            trainer.model.train()
            loss = loss_of(trainer, name, inputs, desirable)
            loss.backward()
            tensors[f"{name}/loss"] = loss.detach().clone()
            for key, parameter in fresh.named_parameters():
                assert parameter.grad is not None
                tensors[f"{name}/{key}"] = parameter.grad.clone()
            print(f"{name:<16} {loss.item():.7f}")
    versions = {package: importlib.import_module(package).__version__ for package in ("trl", "torch", "transformers")}
    save_file({key: value.contiguous() for key, value in tensors.items()}, FILE, {"versions": json.dumps(versions)})


if __name__ == "__main__":
    main()
