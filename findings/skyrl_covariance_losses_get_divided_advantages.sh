#!/usr/bin/env bash
# SkyRL 0.3.0: clip_cov clips no token, and kl_cov's penalty is as many times too strong as a mini-batch has tokens.
#
# To take a mean over tokens or rows, the trainer divides the advantages by their number before it calls a loss
# (apply_loss_reduction_to_advantages_minibatch), and losses add up. That is right for losses that are proportional to
# the advantages. clip_cov chooses tokens whose covariance of advantage and log-probability is between 1 and 5: with
# divided advantages it is less than 0.001, so no token is ever chosen, and Clip-Cov is plain PPO. kl_cov adds
# ppo_kl_coef times the distance to the old policy, which nobody divides: the policy's gradient vanishes beside it.
# That holds for each loss_reduction. The metric clip_ratio is 0 for both, as it always is for kl_cov. Nothing is
# said.
#
# hypha_ray isn't touched: it has neither loss.
#
# Seen with skyrl 0.3.0, torch 2.13.0, Python 3.11 (64 rows, default settings; the first way is verl's and the paper's):
#   20107 tokens in the mini-batch
#   regular: the same gradient in both ways True
#   sapo: the same gradient in both ways True
#   cispo: the same gradient in both ways True
#   clip_cov, loss divided by the tokens: 4 tokens clipped, gradient that of regular False
#   clip_cov, advantages divided by the tokens: 0 tokens clipped, gradient that of regular True
#   kl_cov, loss divided by the tokens: its penalty is 11.4 times the policy's gradient
#   kl_cov, advantages divided by the tokens: its penalty is 2.28e+05 times the policy's gradient
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 ray==2.60.0 pydantic==2.14.4 jaxtyping==0.3.11 loguru==0.7.3 omegaconf==2.4.0 \
    pandas==3.1.1
"${pip[@]}" --no-deps skyrl==0.3.0 skyrl-gym==0.4.0

cat > "$work/covariance.py" <<'PY'
import typing

import torch
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # what pydantic asks for below Python 3.12
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
)
from skyrl.train.config import AlgorithmConfig
from skyrl.train.config.config import KLCovConfig

ROWS, LENGTH, WORDS = 64, 512, 200
DRAW = torch.Generator().manual_seed(0)
OLD = (2 * torch.randn(WORDS, generator=DRAW)).log_softmax(0)
TOKENS = torch.multinomial(OLD.exp(), ROWS * LENGTH, replacement=True, generator=DRAW).view(ROWS, LENGTH)
START = OLD + 0.05 * torch.randn(WORDS, generator=DRAW)
MASK = (torch.arange(LENGTH) < torch.randint(100, LENGTH + 1, (ROWS, 1), generator=DRAW)).float()
ADVANTAGES = torch.randn(ROWS, 1, generator=DRAW).expand(ROWS, LENGTH) * MASK
COUNT = MASK.sum()


def gradient(loss_type, scaled, kl_coefficient=1.0):
    """The gradient of the mean over tokens, and how many tokens are clipped.

    The trainer scales the advantages, and the losses add up (scaled); else the mean is taken of the loss.
    """
    config = AlgorithmConfig(policy_loss_type=loss_type, kl_cov=KLCovConfig(ppo_kl_coef=kl_coefficient))
    advantages = ADVANTAGES
    if scaled:
        advantages = apply_loss_reduction_to_advantages_minibatch(ADVANTAGES, MASK, config.loss_reduction, ROWS, LENGTH)
    logits = START.clone().requires_grad_()
    torch.manual_seed(0)
    loss, metrics = PolicyLossRegistry.get(loss_type)(
        logits.log_softmax(0)[TOKENS], OLD[TOKENS], advantages, config=config, loss_mask=MASK
    )
    (result,) = torch.autograd.grad(loss if scaled else loss / COUNT, logits)
    return result, round(metrics["clip_ratio"] * COUNT.item())


print(f"{COUNT:.0f} tokens in the mini-batch")
for name in ("regular", "sapo", "cispo"):
    same = torch.allclose(gradient(name, True)[0], gradient(name, False)[0], rtol=1e-3, atol=1e-8)
    print(f"{name}: the same gradient in both ways {same}")
for scaled in (False, True):
    way = "advantages divided by the tokens" if scaled else "loss divided by the tokens"
    clipped, number = gradient("clip_cov", scaled)
    same = torch.allclose(clipped, gradient("regular", scaled)[0], rtol=1e-5, atol=1e-9)
    print(f"clip_cov, {way}: {number} tokens clipped, gradient that of regular {same}")
for scaled in (False, True):
    way = "advantages divided by the tokens" if scaled else "loss divided by the tokens"
    without = gradient("kl_cov", scaled, 0.0)[0]
    penalty = gradient("kl_cov", scaled)[0] - without
    print(f"kl_cov, {way}: its penalty is {penalty.norm() / without.norm():.3g} times the policy's gradient")
PY
"$work/env/bin/python" -W ignore "$work/covariance.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
