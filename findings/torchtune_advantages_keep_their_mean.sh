#!/usr/bin/env bash
# torchtune 0.6.1: PPO's normalized advantages keep their mean: with larger rewards wrong answers are reinforced, too.
#
# estimate_advantages whitens its result: it subtracts the mean, divides by the deviation, and then adds the mean
# back, as it was before the division. whiten(shift_mean=True), the default, does that; in TRL, from which it is said
# to be taken, it is shift_mean=False that adds the mean. So the spread is 1, and the mean has the size of the
# rewards. With rewards of 0 and 10 and a critic that says 0 all advantages are positive, and wrong answers become
# likelier. Scores of reward models are often of that size. A comment says "normalize advantages", and the recipe of
# PPO uses the default; whiten(shift_mean=False) is right. Nothing is said.
#
# hypha_ray isn't touched: it doesn't use torchtune.
#
# Seen with torchtune 0.6.1, torch 2.13.0, Python 3.11 (half of 64 answers are wrong, a critic that says 0):
#   rewards 0 and 0.1: torchtune's advantages -0.95 and 1.05, 0 % of wrong answers become likelier
#   rewards 0 and 0.1: centered advantages -1.00 and 1.00, 0 % of wrong answers become likelier
#   rewards 0 and 1: torchtune's advantages -0.50 and 1.50, 0 % of wrong answers become likelier
#   rewards 0 and 1: centered advantages -1.00 and 1.00, 0 % of wrong answers become likelier
#   rewards 0 and 3: torchtune's advantages 0.50 and 2.50, 100 % of wrong answers become likelier
#   rewards 0 and 3: centered advantages -1.00 and 1.00, 0 % of wrong answers become likelier
#   rewards 0 and 10: torchtune's advantages 4.00 and 6.00, 100 % of wrong answers become likelier
#   rewards 0 and 10: centered advantages -1.00 and 1.00, 0 % of wrong answers become likelier
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 datasets==5.2.0 omegaconf==2.4.0 tokenizers==0.23.3 sentencepiece==0.2.3 \
    tiktoken==0.14.0
"${pip[@]}" --no-deps torchtune==0.6.1 torchao==0.13.0

cat > "$work/advantages.py" <<'PY'
import torch
from torchtune.rlhf import estimate_advantages, whiten
from torchtune.rlhf.loss import PPOLoss

ROWS, LENGTH = 64, 16
MASK = torch.ones(ROWS, LENGTH, dtype=torch.bool)
RIGHT = torch.arange(ROWS) % 2 == 0


def likelier(advantages):
    """The share of wrong answers that a step of torchtune's PPO makes likelier."""
    old = torch.full((ROWS, LENGTH), -1.0)
    new = old.clone().requires_grad_()
    zeros = torch.zeros(ROWS, LENGTH)
    loss = PPOLoss(value_coeff=0.0)(old, new, advantages, zeros, zeros, zeros)[0]
    (gradient,) = torch.autograd.grad(loss, new)
    return (gradient[~RIGHT].sum(1) < 0).float().mean()


for size in (0.1, 1.0, 3.0, 10.0):
    rewards = torch.zeros(ROWS, LENGTH)
    rewards[:, -1] = size * RIGHT
    seen, returns = estimate_advantages(torch.zeros(ROWS, LENGTH), rewards, gamma=1.0, lmbda=1.0, masks=MASK)
    centered = (returns - returns.mean()) / returns.std()
    assert torch.allclose(centered, whiten(returns, shift_mean=False), atol=1e-4)
    for name, advantages in (("torchtune's", seen), ("centered", centered)):
        wrong, right = advantages[~RIGHT].mean(), advantages[RIGHT].mean()
        share = f"{100 * likelier(advantages):.0f} % of wrong answers become likelier"
        print(f"rewards 0 and {size:g}: {name} advantages {wrong:.2f} and {right:.2f}, {share}")
PY
"$work/env/bin/python" -W ignore "$work/advantages.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
