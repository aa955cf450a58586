#!/usr/bin/env bash
# AReaL 1.0.4: in joint distillation and reinforcement learning (KDRL) the teacher has no influence on the training.
#
# With a teacher and rl_loss_weight above 0 (its default is 1) the loss adds distill_loss_weight times the mean of
# logprobs - teacher_logp over the sampled tokens. teacher_logp is a constant there, so the gradient is that of logprobs
# alone: the same for every teacher, and 0 on average over tokens that the student has drawn. It makes what was sampled
# less likely, whatever the teacher says. The documentation calls it "mathematically equivalent to minimizing the
# Reverse KL objective" and its gradient an "unbiased estimate"; the value is one, is logged, and looks right. With
# rl_loss_weight=0 the gradient is weighted by the distance to the teacher, and is the right one. A run with both pays
# for the teacher's forward passes and trains as without it, but for noise. Nothing is said.
#
# hypha_ray isn't touched: it doesn't use this loss.
#
# Seen with areal 1.0.4, torch 2.13.0, Python 3.11 (8 words; the student's own tokens, advantages of 0):
#   rl_loss_weight 1: gradients by a teacher and by its opposite differ by 0.00
#   rl_loss_weight 1: length of the gradient over 1000000 tokens 0.00
#   rl_loss_weight 0: gradients by a teacher and by its opposite differ by 0.50
#   rl_loss_weight 0: length of the gradient over 1000000 tokens 0.64
#   the gradient of the reverse KL: length 0.64
#   reverse KL before: 1.74
#   reverse KL after 200 steps of its gradient: 0.00
#   reverse KL after 200 steps with rl_loss_weight 1: 1.56
#   reverse KL after 200 steps with rl_loss_weight 0: 0.00
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 transformers==5.24.0 ray==2.60.0 numba==0.68.1 datasets==5.2.0 \
    torchdata==0.11.0 hydra-core==1.4.0.dev1 omegaconf==2.4.0.dev2 aiohttp==3.14.5 httpx==0.28.1 openai==3.57.0 \
    colorlog==6.12.0 tenacity==9.2.1 lark==1.3.1 uvloop==0.23.0 pyyaml==6.0.4 pillow==12.3.0 orjson==3.13.0 \
    einops==0.8.2 aiofiles==25.1.0 swanlab==0.10.3 trackio==0.43.0 wandb==0.31.0 tensorboardX==2.6.5 tabulate==0.10.0 \
    pybase64==1.5.1 flask==3.1.3
"${pip[@]}" --no-deps areal==1.0.4

cat > "$work/teacher.py" <<'PY'
import torch
from areal.trainer.ppo.actor import grpo_loss_fn

torch.set_num_threads(1)
WORDS, TOKENS, STEPS, RATE = 8, 512, 200, 0.5
DRAW = torch.Generator().manual_seed(0)
STUDENT = torch.randn(WORDS, generator=DRAW)
TEACHER = 2 * torch.randn(WORDS, generator=DRAW)


def distance(logits, teacher):
    """The reverse KL that the penalty stands for, over the whole vocabulary."""
    student = logits.log_softmax(0)
    return (student.exp() * (student - teacher.log_softmax(0))).sum()


def exact(logits, teacher):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(distance(logits, teacher), logits)[0]


def gradient(logits, teacher, rl_weight, draw, tokens=TOKENS):
    """The gradient of areal's loss for tokens of the student itself, with advantages of 0: that of the distillation."""
    chosen = torch.multinomial(logits.softmax(0), tokens, replacement=True, generator=draw)
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)[chosen]
    batch = {
        "logprobs": logprobs.detach(),
        "prox_logp": logprobs.detach(),
        "advantages": torch.zeros(tokens),
        "loss_mask": torch.ones(tokens, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32),
        "teacher_logp": teacher.log_softmax(0)[chosen],
        "rl_loss_weight": rl_weight,
        "distill_loss_weight": 1.0,
    }
    loss = grpo_loss_fn(logprobs, torch.zeros(tokens), batch, eps_clip=0.2, eps_clip_higher=None, c_clip=None)
    return torch.autograd.grad(loss, logits)[0]


def trained(step):
    logits = STUDENT.clone()
    draw = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        logits -= RATE * step(logits, draw)
    return distance(logits, TEACHER).item()


for weight in (1.0, 0.0):
    first, second = (gradient(STUDENT, sign * TEACHER, weight, torch.Generator().manual_seed(1)) for sign in (1, -1))
    mean = gradient(STUDENT, TEACHER, weight, torch.Generator().manual_seed(1), 1_000_000)
    apart = (first - second).abs().max()
    print(f"rl_loss_weight {weight:g}: gradients by a teacher and by its opposite differ by {apart:.2f}")
    print(f"rl_loss_weight {weight:g}: length of the gradient over 1000000 tokens {mean.norm():.2f}")
print(f"the gradient of the reverse KL: length {exact(STUDENT, TEACHER).norm():.2f}")
print(f"reverse KL before: {distance(STUDENT, TEACHER):.2f}")
print(f"reverse KL after {STEPS} steps of its gradient: {trained(lambda logits, draw: exact(logits, TEACHER)):.2f}")
for weight in (1.0, 0.0):
    after = trained(lambda logits, draw: gradient(logits, TEACHER, weight, draw))
    print(f"reverse KL after {STEPS} steps with rl_loss_weight {weight:g}: {after:.2f}")
PY
(cd "$work" && env/bin/python -W ignore teacher.py 2> errors | tee seen)
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
