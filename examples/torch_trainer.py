"""An external trainer in plain PyTorch: what a trainer of your own may look like.

    [bridge]
    commands = ["python examples/torch_trainer.py"]

in a job file has one of the job's workers be this process. It knows the job only by what comes over the bridge.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from hypha_ray.bridge.client import Trainer
from hypha_ray.bridge.round import Arrays, Round

AUTO = {"causal-lm": "AutoModelForCausalLM", "vision-classification": "AutoModelForImageClassification"}


def build(job: dict[str, Any]) -> Any:
    """The job's model; its weights come with every round, so the ones it starts from don't matter."""
    model = job["model"]
    auto = getattr(transformers, AUTO[model["type"]])
    if model["repository"]:
        return auto.from_pretrained(model["repository"], revision=model["revision"])
    settings = dict(model["config"])
    return auto.from_config(transformers.AutoConfig.for_model(settings.pop("model_type"), **settings))


def inputs(batch: Arrays) -> dict[str, torch.Tensor]:
    """What the model is fed: samples of a language model or of a classifier of images."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if "input_ids" in tensors:
        ids, mask = tensors["input_ids"].long(), tensors["attention_mask"].long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {"pixel_values": tensors["images"], "labels": tensors["labels"].long()}


class Local:
    """A model and its optimizer."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.manual_seed(job["seed"] + job["worker"])
        self.model = build(job).train()
        config = job["inner_optimizer"]
        self._clip_norm = config["clip_norm"]
        groups = [
            {
                "params": [one for one in self.model.parameters() if one.ndim >= 2],
                "weight_decay": config["weight_decay"],
            },
            {"params": [one for one in self.model.parameters() if one.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=tuple(config["betas"]), eps=config["epsilon"])

    def step(self, batch: Arrays, learning_rate: float) -> tuple[float, float]:
        """One step of AdamW; returns loss and gradient norm."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss = self.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm or float("inf"))
        self._optimizer.step()
        return loss, norm.item()

    def backward(self, batch: Arrays, weight: float = 1.0) -> float:
        """Add the gradient of the batch's mean loss, times a weight, to what there is; returns the loss."""
        loss = self.model(**inputs(batch)).loss
        (weight * loss).backward()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Arrays]) -> tuple[float, int, int | None]:
        """Sum of the loss, what it is a mean over, and for a classifier how many it got right."""
        self.model.eval()
        loss_sum, count, correct, classifies = 0.0, 0, 0, False
        for batch in batches:
            fed = inputs(batch)
            output = self.model(**fed)
            classifies = "pixel_values" in fed
            labels = fed["labels"] if classifies else fed["labels"][:, 1:]
            size = int((labels != -100).sum())
            loss_sum, count = loss_sum + output.loss.item() * size, count + size
            correct += int((output.logits.argmax(-1) == labels).sum()) if classifies else 0
        self.model.train()
        return loss_sum, count, correct if classifies else None

    @torch.no_grad()
    def load(self, weights: Arrays) -> None:
        """Copy weights into the model; tied ones come once."""
        for name, tensor in self.model.state_dict().items():
            if name in weights:
                tensor.copy_(torch.from_numpy(weights[name]))

    def weights(self, wanted: Arrays) -> Arrays:
        """The model's tensors of these names, in these dtypes."""
        state = self.model.state_dict()
        return {name: state[name].numpy().astype(array.dtype) for name, array in wanted.items()}

    def gradient(self, work: Round, wanted: Arrays) -> Arrays:
        """The mean gradient over all samples of a round, by the parameters' names; buffers as they are."""
        self.model.zero_grad()
        samples = 0
        for batch in work.batches():
            size = len(next(iter(batch.values())))
            work.step(self.backward(batch, size))
            samples += size
        found = self.weights(wanted)
        for name, parameter in self.model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / max(1, samples)
            found[name] = gradient.numpy().astype(wanted[name].dtype)
        return found


def train(local: Local, work: Round) -> None:
    """Go through one round."""
    began = time.monotonic()
    weights = work.parameters()
    local.load(weights)
    work.merged(time.monotonic() - began)
    if work.evaluates:
        work.evaluated(*local.evaluate(work.evaluation()))
    if work.gradient:
        work.hand_over(local.gradient(work, weights))
        return
    for batch in work.batches():
        loss, norm = local.step(batch, work.learning_rate)
        work.step(loss, gradient_norm=norm)
    work.hand_over(local.weights(weights))


def main() -> None:
    """Train until the training is completed."""
    torch.set_num_threads(1)
    with Trainer.connect("torch-trainer") as trainer:
        local = Local(trainer.job)
        trainer.ready("cpu", sum(parameter.numel() for parameter in local.model.parameters()))
        for work in trainer.rounds():
            train(local, work)


if __name__ == "__main__":
    main()
