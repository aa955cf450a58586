"""Makes tests/unit/rl/oracles.json: inputs, and what verl and trl compute of them.

In an environment of its own, beside torch and transformers:

    pip install --no-deps trl==1.16.0 verl==0.9.1 tensordict==0.14.3 pyvers omegaconf hydra-core \\
        antlr4-python3-runtime==4.9.3 codetiming orjson accelerate
    python tests/support/rl_oracles.py
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FILE = Path(__file__).parents[1] / "unit" / "rl" / "oracles.json"
PROMPTS, GROUP, TOKENS, LONGEST = 3, 4, 5, 7
CLIPS = {"plain": (0.2, 0.2, None), "asymmetric": (0.1, 0.28, None), "dual": (0.2, 0.2, 1.5)}
BETA = 0.05
DISCOUNT, DECAY, VALUE_CLIP = 0.9, 0.8, 0.2
TARGET, HORIZON, DIVERGENCES = 0.1, 100, (0.0, 0.09, 0.11, 3.0)


def inputs() -> dict[str, torch.Tensor]:
    """Rewards with an equal group, responses of unequal lengths, log-probabilities far enough apart to be clipped."""
    generator = torch.Generator().manual_seed(11)
    rewards = torch.rand(PROMPTS, GROUP, generator=generator, dtype=torch.float64).mul(4).round() / 4
    rewards[1] = 0.5
    lengths = torch.randint(1, TOKENS + 1, (PROMPTS * GROUP,), generator=generator)
    mask = (torch.arange(TOKENS) < lengths[:, None]).double()
    new, old, reference = (
        -2 + 0.4 * torch.randn(PROMPTS * GROUP, TOKENS, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return {"rewards": rewards, "mask": mask, "new": new, "old": old, "reference": reference}


def advantages(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Advantages of verl, one for each response."""
    from verl.trainer.ppo import core_algos as verl

    mask = given["mask"]
    scores = torch.zeros_like(mask)
    scores[:, 0] = given["rewards"].flatten()
    groups = torch.arange(PROMPTS).repeat_interleave(GROUP).tolist()
    grpo = verl.compute_grpo_outcome_advantage
    return {
        "group_std": grpo(scores, mask, groups)[0][:, 0],
        "group_mean": grpo(scores, mask, groups, norm_adv_by_std_in_grpo=False)[0][:, 0],
        "leave_one_out": verl.compute_rloo_outcome_advantage(scores, mask, groups)[0][:, 0],
        "batch_std": verl.compute_reinforce_plus_plus_baseline_outcome_advantage(scores, mask, groups)[0][:, 0],
    }


class Config(SimpleNamespace):
    """Settings with attribute access and `get`, as verl wants them."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting."""
        return getattr(self, name, default)


def verl_losses(given: dict[str, torch.Tensor], advantage: torch.Tensor) -> dict[str, float]:
    """Clipped losses of verl by ``clip/aggregation``, and GSPO's."""
    from verl.trainer.ppo import core_algos as verl
    from verl.workers.config import ActorConfig

    modes = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
    old, new, mask = given["old"], given["new"], given["mask"]
    rows = advantage[:, None].expand_as(mask)
    found = {}
    for name, (low, high, dual) in CLIPS.items():
        for own, mode in modes.items():
            info = {"loss_scale_factor": LONGEST} if own == "constant" else {}
            config = Config(
                clip_ratio=low,
                clip_ratio_low=low,
                clip_ratio_high=high,
                clip_ratio_c=dual or 1e9,
                global_batch_info=info,
            )
            loss, _ = verl.compute_policy_loss_vanilla(old, new, rows, mask, mode, config)
            found[f"{name}/{own}"] = float(loss)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
    )
    found["gspo"] = float(verl.compute_policy_loss_gspo(old, new, rows, mask, "seq-mean-token-mean", config)[0])
    return found


def trl_losses(given: dict[str, torch.Tensor], advantage: torch.Tensor) -> dict[str, float]:
    """Losses of trl with the k3 divergence, by trl's name of the loss."""
    from trl import GRPOTrainer

    rows, ones = given["mask"].shape[0], torch.ones(given["mask"].shape[0], 1, dtype=torch.long)
    batch = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": given["mask"].long(),
        "completion_mask": given["mask"], "advantages": advantage, "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"], "num_items_in_batch": given["mask"].sum(),
    }  # fmt: skip
    found = {}
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo"):
        anything: Any = _Anything()
        stub = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (given["new"], torch.zeros_like(given["new"]), None),
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
            importance_sampling_level="token", beta=BETA, loss_type=kind, epsilon_low=0.2, epsilon_high=0.2,
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=LONGEST,
            _entropy_bonus_enabled=False, _metrics=anything, accelerator=_Accelerator(),
        )  # fmt: skip
        found[kind] = float(GRPOTrainer._compute_loss(stub, None, batch))
    assert rows == PROMPTS * GROUP
    return found


class _Anything(dict):  # type: ignore[type-arg]
    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, _Lists())


class _Lists(dict):  # type: ignore[type-arg]
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])  # type: ignore[no-any-return]


class _Accelerator:
    num_processes = 1

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def divergences(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Estimates of verl, token by token."""
    from verl.trainer.ppo.core_algos import kl_penalty_forward

    return {name: kl_penalty_forward(given["new"], given["reference"], name) for name in ("k1", "k2", "k3")}


def critics(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Advantages and returns of generalized advantage estimation, value loss, and coefficients that adapt, by verl."""
    from verl.trainer.ppo import core_algos as verl

    mask = given["mask"]
    values, rewards = (given[name] * mask for name in ("reference", "new"))
    advantages, returns = verl.compute_gae_advantage_return(rewards, values, mask, DISCOUNT, DECAY)
    loss, share = verl.compute_value_loss(given["new"], returns, given["old"], mask, VALUE_CLIP)
    coefficients = []
    for divergence in DIVERGENCES:
        controller = verl.AdaptiveKLController(BETA, TARGET, HORIZON)
        controller.update(divergence, PROMPTS * GROUP)
        coefficients.append(controller.value)
    return {
        "advantages": (advantages * mask).tolist(),
        "returns": (returns * mask).tolist(),
        "value_loss": float(loss),
        "value_clip_share": float(share),
        "coefficients": coefficients,
    }


def main() -> None:
    """Write the file."""
    given = inputs()
    made = advantages(given)
    record = {
        "inputs": {name: tensor.tolist() for name, tensor in given.items()},
        "advantages": {name: tensor.tolist() for name, tensor in made.items()},
        "verl": verl_losses(given, made["group_std"]),
        "trl": trl_losses(given, made["group_std"]),
        "critics": critics(given),
        "divergences": {name: tensor.tolist() for name, tensor in divergences(given).items()},
    }
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in record.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
