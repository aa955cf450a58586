"""Makes tests/unit/rl/oracles.json: inputs, and what verl, trl and torchrl compute of them.

In an environment of its own, beside torch and transformers:

    pip install --no-deps trl==1.16.0 verl==0.9.1 torchrl==0.14.1 tensordict==0.14.3 pyvers hoptorch omegaconf \\
        hydra-core antlr4-python3-runtime==4.9.3 codetiming orjson accelerate
    python tests/support/rl_oracles.py
"""

from __future__ import annotations

import inspect
import json
import textwrap
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FILE = Path(__file__).parents[1] / "unit" / "rl" / "oracles.json"
PROMPTS, GROUP, TOKENS, LONGEST = 3, 4, 5, 7
CLIPS = {"plain": (0.2, 0.2, None), "asymmetric": (0.1, 0.28, None), "dual": (0.2, 0.2, 1.5)}
BETA = 0.05
DELTA = 1.3
DISCOUNT, DECAY, VALUE_CLIP = 0.9, 0.8, 0.2
ABSENT = (2, 3)
"""Group and number of the response whose reward is absent, for trl's advantages."""
TRUNCATED = (0, 5, 8, 9, 10, 11)
"""Responses that count as cut off: one of each of two groups, and all of the third."""
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


def trl_advantages(given: dict[str, torch.Tensor], scale_rewards: str) -> torch.Tensor:
    """Advantages by the lines of trl that compute them, of rewards of which one is absent."""
    from trl.trainer import grpo_trainer

    source = textwrap.dedent(inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions))
    begin = source.index("    unscorable_mask = torch.isnan(")
    end = source.index("    # Slice to keep only the local part of the data")
    rewards = given["rewards"].clone()
    rewards[ABSENT] = torch.nan
    names: dict[str, Any] = {
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=scale_rewards,
            reward_weights=torch.ones(1, dtype=torch.float64),
        ),
        "rewards_per_func": rewards.view(-1, 1),
        "num_generations": GROUP,
        "device": rewards.device,
    }
    exec(textwrap.dedent(source[begin:end]), vars(grpo_trainer), names)
    return names["advantages"]  # type: ignore[no-any-return]


def trl_losses(given: dict[str, torch.Tensor], advantage: torch.Tensor) -> dict[str, float]:
    """Losses of trl with the k3 divergence: by trl's name of the loss, level of importance, and largest ratio."""
    from trl import GRPOTrainer

    rows, ones = given["mask"].shape[0], torch.ones(given["mask"].shape[0], 1, dtype=torch.long)
    batch = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": given["mask"].long(),
        "completion_mask": given["mask"], "advantages": advantage, "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"], "num_items_in_batch": given["mask"].sum(),
    }  # fmt: skip
    found = {}
    for kind, level, delta in product(("grpo", "bnpo", "dr_grpo", "dapo"), ("token", "sequence"), (None, DELTA)):
        anything: Any = _Anything()
        stub = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (given["new"], torch.zeros_like(given["new"]), None),
            aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
            importance_sampling_level=level, beta=BETA, loss_type=kind, epsilon_low=0.2, epsilon_high=0.2,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
            model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=LONGEST,
            _entropy_bonus_enabled=False, _metrics=anything, accelerator=_Accelerator(),
        )  # fmt: skip
        name = f"{kind}/{level}" if delta is None else f"{kind}/{level}/{delta}"
        found[name] = float(GRPOTrainer._compute_loss(stub, None, batch))
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


def torchrl(given: dict[str, torch.Tensor], advantage: torch.Tensor) -> dict[str, Any]:
    """Advantages and losses of torchrl, all of them by its public classes and functions."""
    mask, tokens = given["mask"].bool(), int(given["mask"].sum())
    rows = advantage[:, None].expand_as(mask)
    one_row = {name: given[name][mask][None] for name in ("new", "old", "reference")}
    full = torch.ones(1, tokens, dtype=torch.bool)
    found: dict[str, Any] = _estimates(given) | {"group_std": _group_advantages(given)}
    for name in ("plain", "asymmetric"):
        low, high, _ = CLIPS[name]
        found[f"ppo/{name}"], found["value_loss"] = _ppo(given, rows, low, high)
        token = _grpo(one_row, full, rows[mask][None], clip_epsilon=(low, high), kl_to_ref_coeff=BETA)
        found[f"grpo/{name}/token"] = float(token.loss_objective + token.loss_kl_to_ref)
        mean = _grpo(given, mask, rows, clip_epsilon=(low, high), aggregation="prompt_mean")
        found[f"grpo/{name}/sequence"] = float(mean.loss_objective)
    return found


def _estimates(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Advantages and returns of generalized advantage estimation; a response is done with its last token."""
    from torchrl.objectives.value.functional import generalized_advantage_estimate

    mask = given["mask"]
    values, rewards = (given[name] * mask for name in ("reference", "new"))
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    done = torch.arange(TOKENS) >= mask.sum(1, keepdim=True) - 1
    columns = [one[..., None] for one in (values, following, rewards, done)]
    advantages, returns = generalized_advantage_estimate(DISCOUNT, DECAY, *columns)
    return {
        "advantages": (advantages[..., 0] * mask).tolist(),
        "returns": (returns[..., 0] * mask).tolist(),
    }


def _group_advantages(given: dict[str, torch.Tensor]) -> list[float]:
    """Advantages of responses by the mean and standard deviation of their group.

    Rewards are a million times as large: torchrl bounds the deviation from below, others add a millionth to it.
    """
    from tensordict import TensorDict
    from torchrl.objectives.llm import MCAdvantage

    transform = MCAdvantage(grpo_size=GROUP, prompt_key="group", trajectory_return="sum")
    found = []
    for number, reward in enumerate(given["rewards"].flatten()):
        step = {"reward": reward.reshape(1, 1) * 1e6, "done": torch.ones(1, 1, dtype=torch.bool)}
        group = torch.full((1,), number // GROUP)
        whole = transform.inv(TensorDict({"group": group, "next": TensorDict(step, [1])}, [1]))
        found += [] if whole is None else whole["advantage"].flatten().tolist()
    return found


def _ppo(given: dict[str, torch.Tensor], rows: torch.Tensor, low: float, high: float) -> tuple[float, float]:
    """Clipped loss and value loss of PPO, means over all tokens; each token is a choice between it and all others."""
    from tensordict import TensorDict
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torchrl.objectives import ClipPPOLoss

    mask = given["mask"].bool()
    new, old = given["new"][mask], given["old"][mask]
    returns = torch.tensor(_estimates(given)["returns"], dtype=torch.float64)[mask]
    same = torch.nn.Identity()
    choice = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    actor = ProbabilisticTensorDictSequential(TensorDictModule(same, ["observed"], ["logits"]), choice)
    critic = TensorDictModule(same, ["value"], ["state_value"])
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=(low, high),
        entropy_bonus=False,
        loss_critic_type="l2",
        clip_value=VALUE_CLIP,
    )
    batch = {
        "observed": torch.stack([new, torch.log1p(-new.exp())], 1),
        "action": torch.zeros(len(new), dtype=torch.long),
        "action_log_prob": old,
        "advantage": rows[mask][:, None],
        "value": new[:, None],
        "state_value": old[:, None],
        "value_target": returns[:, None],
    }
    found = loss(TensorDict(batch, [len(new)]))
    return float(found["loss_objective"]), float(found["loss_critic"])


def _grpo(given: dict[str, torch.Tensor], mask: torch.Tensor, rows: torch.Tensor, **settings: Any) -> Any:
    """Loss of GRPO on tokens whose log-probabilities are given."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import GRPOLoss

    class Given(GRPOLoss):  # type: ignore[misc]
        def _get_cur_log_prob(self, tensordict: Any) -> tuple[torch.Tensor, Any, bool]:
            return given["new"], SimpleNamespace(mask=mask), False

    batch = {
        ("tokens", "full"): mask.long(),
        ("log_probs", "full"): given["old"],
        ("next", "ref_log_probs", "full"): given["reference"],
        "advantage": rows[..., None],
    }
    return Given(entropy_bonus=False, **settings)(TensorDict(batch, [len(mask)]))


def without_truncated(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask of tokens as trl has it with `mask_truncated_completions`."""
    mask = mask.clone()
    mask[list(TRUNCATED)] = 0
    return mask


def main() -> None:
    """Write the file."""
    given = inputs()
    made = advantages(given)
    record = {
        "inputs": {name: tensor.tolist() for name, tensor in given.items()},
        "advantages": {name: tensor.tolist() for name, tensor in made.items()},
        "verl": verl_losses(given, made["group_std"]),
        "trl": trl_losses(given, made["group_std"]),
        "trl_truncated": trl_losses({**given, "mask": without_truncated(given["mask"])}, made["group_std"]),
        "trl_batch": trl_advantages(given, "batch").tolist(),
        "torchrl": torchrl(given, made["group_std"]),
        "critics": critics(given),
        "divergences": {name: tensor.tolist() for name, tensor in divergences(given).items()},
    }
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in record.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
