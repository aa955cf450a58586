"""An external trainer with a loop of reinforcement learning of its own: GRPO (arXiv 2402.03300) in plain PyTorch.

    [bridge]
    commands = ["python examples/grpo_trainer.py"]

in a job file with `rl.algorithm` has one of the job's workers be this process, beside islands. It gets prompts, the
weights of each round and the tokenizer over the bridge, and gives weights back. Rewards are its own: the share of right
characters.
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from hypha_ray.bridge.client import Trainer
from hypha_ray.bridge.round import Arrays, Round


def load_tokenizer(files: dict[str, str]) -> Any:
    """The tokenizer of the job, whose files come with it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(base64.b64decode(content))
        return transformers.AutoTokenizer.from_pretrained(folder)


def reward(response: str, answer: str, ended: bool) -> float:
    """Share of right characters, the end being one more."""
    same = sum(a == b for a, b in zip(response, answer, strict=False))
    return (same + (ended and len(response) == len(answer))) / (len(answer) + 1)


class Policy:
    """A language model, its optimizer, and what it has to know of the job."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.manual_seed(job["seed"] + job["worker"])
        settings = dict(job["model"]["config"])
        config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        self.rl, inner = job["rl"], job["inner_optimizer"]
        self._clip_norm = inner["clip_norm"] or float("inf")
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=tuple(inner["betas"]), eps=inner["epsilon"], weight_decay=0.0
        )
        self._tokenizer = load_tokenizer(job["tokenizer"])
        self._pad, self._size = self._tokenizer.pad_token_id, len(self._tokenizer)
        rules = self._tokenizer.init_kwargs.get("token_rules", {})
        self._ends = torch.tensor(sorted({self._tokenizer.eos_token_id, *rules.get("ends", ())}))

    @torch.no_grad()
    def generate(self, batch: Arrays, samples: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Responses to each prompt: ids of prompts and responses, and the mask of both together."""
        ids, mask = (torch.from_numpy(batch[name]).long() for name in ("input_ids", "attention_mask"))
        ids, mask = ids.repeat_interleave(samples, 0), mask.repeat_interleave(samples, 0)
        alive = torch.ones(len(ids), dtype=torch.bool)
        for _ in range(self.rl["generation"]["max_response_tokens"]):
            logits = self._logits(ids, mask)[:, -1]
            chosen = (
                torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0] if temperature else logits.argmax(-1)
            )
            ids = torch.cat([ids, chosen.where(alive, self._pad)[:, None]], 1)
            mask = torch.cat([mask, alive[:, None].long()], 1)
            alive = alive & ~torch.isin(chosen, self._ends)
        return ids, mask

    def rewards(self, batch: Arrays, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Reward of each response, [prompts, samples]."""
        width, found = batch["input_ids"].shape[1], []
        samples = len(ids) // len(batch["input_ids"])
        answers = [json.loads(bytes(row).rstrip(b"\0"))["answer"] for row in batch["reward_data"]]
        for row, (tokens, kept) in enumerate(zip(ids[:, width:], mask[:, width:].bool(), strict=True)):
            response = tokens[kept]
            text = self._tokenizer.decode(response, skip_special_tokens=True)
            found.append(reward(text, answers[row // samples], bool(torch.isin(response[-1], self._ends))))
        return torch.tensor(found).view(-1, samples)

    def step(self, batch: Arrays, learning_rate: float) -> tuple[float, float]:
        """One step on one group of responses to each prompt; returns loss and gradient norm."""
        temperature = self.rl["generation"]["temperature"]
        ids, mask = self.generate(batch, self.rl["group_size"], temperature)
        rewards = self.rewards(batch, ids, mask)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        width = batch["input_ids"].shape[1]
        logprobs = (self._logits(ids, mask)[:, width - 1 : -1] / temperature).log_softmax(-1)
        taken = logprobs.gather(2, ids[:, width:, None])[..., 0]
        kept = mask[:, width:].float()
        # On the policy's own responses, the ratio is 1, and its gradient is that of the log-probability.
        loss = -((taken - taken.detach()).exp() * advantages.view(-1, 1) * kept).sum() / kept.sum()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self._optimizer.step()
        return loss.item(), norm.item()

    def evaluate(self, work: Round) -> dict[str, tuple[float, float]]:
        """Total and weight of the mean reward and of pass@1."""
        settings, totals = self.rl["evaluation"], {"reward": (0.0, 0.0), "pass@1": (0.0, 0.0)}
        for batch in work.evaluation():
            rewards = self.rewards(batch, *self.generate(batch, settings["samples"], settings["temperature"]))
            right = (rewards >= 1).float().mean(1)
            for name, values in (("reward", rewards), ("pass@1", right)):
                total, weight = totals[name]
                totals[name] = total + values.sum().item(), weight + values.numel()
        return totals

    @torch.no_grad()
    def load(self, weights: Arrays) -> None:
        """Copy weights into the model; tied ones come once."""
        for name, tensor in self.model.state_dict().items():
            if name in weights:
                tensor.copy_(torch.from_numpy(weights[name]))

    def weights(self, wanted: Arrays) -> Arrays:
        """The model's tensors of these names."""
        state = self.model.state_dict()
        return {name: state[name].numpy().astype(array.dtype) for name, array in wanted.items()}

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, position_ids=places).logits
        return logits[..., : self._size].float()  # Further rows stand for no token.


def train(policy: Policy, work: Round) -> None:
    """Go through one round."""
    weights = work.parameters()
    policy.load(weights)
    work.merged()
    if work.evaluates:
        work.evaluated(0.0, 0, figures=policy.evaluate(work))
    for batch in work.batches():
        loss, norm = policy.step(batch, work.learning_rate)
        work.step(loss, gradient_norm=norm)
    work.hand_over(policy.weights(weights))


def main() -> None:
    """Train until the training is completed."""
    torch.set_num_threads(1)
    with Trainer.connect("grpo-trainer") as trainer:
        policy = Policy(trainer.job)
        trainer.ready("cpu", sum(parameter.numel() for parameter in policy.model.parameters()))
        for work in trainer.rounds():
            train(policy, work)


if __name__ == "__main__":
    main()
