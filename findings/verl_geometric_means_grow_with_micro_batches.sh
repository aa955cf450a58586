#!/usr/bin/env bash
# verl 0.9.1: the gradient of the loss geo_mean (GMPO) is as many times too large as there are micro-batches.
#
# All losses of policies divide by what the whole batch has, its tokens or its sequences, which the engines hand them in
# global_batch_info; the engines add up the gradients of micro-batches and divide by nothing. geo_mean takes the mean of
# the rows that it is given. So one batch has another gradient for each ppo_micro_batch_size_per_gpu, a setting of
# memory; with use_dynamic_bsz it changes from step to step, and rows of small micro-batches count for more. Clipping or
# Adam hide the length, but the penalties beside it (KL, entropy) are normalized: their coefficients are worth as many
# times less. agg_loss promises "invariant to fsdp/megatron parallelism"; geo_mean's docstring says only that
# loss_agg_mode isn't used. Nothing is said.
#
# hypha_ray isn't touched: its losses are its own.
#
# Seen with verl 0.9.1, torch 2.13.0, Python 3.11 (8 rows; lengths of gradients, and that of the whole batch is 1):
#   vanilla: gradient in 1, 2, 4, 8 micro-batches: 1.00, 1.00, 1.00, 1.00
#   dppo_tv: gradient in 1, 2, 4, 8 micro-batches: 1.00, 1.00, 1.00, 1.00
#   gspo: gradient in 1, 2, 4, 8 micro-batches: 1.00, 1.00, 1.00, 1.00
#   sapo: gradient in 1, 2, 4, 8 micro-batches: 1.00, 1.00, 1.00, 1.00
#   gpg: gradient in 1, 2, 4, 8 micro-batches: 1.00, 1.00, 1.00, 1.00
#   dro: gradient in 1, 2, 4, 8 micro-batches: 1.00, 1.00, 1.00, 1.00
#   cispo: gradient in 1, 2, 4, 8 micro-batches: 1.00, 1.00, 1.00, 1.00
#   geo_mean: gradient in 1, 2, 4, 8 micro-batches: 1.00, 2.00, 4.00, 8.00
#   gspo with a KL penalty of 0.5: cosine of the gradients in 1 and in 8 micro-batches 1.00
#   geo_mean with a KL penalty of 0.5: cosine of the gradients in 1 and in 8 micro-batches 0.84
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 tensordict==0.10.0 omegaconf==2.3.0 hydra-core==1.3.2 codetiming==1.4.0 \
    transformers==5.10.4 ray==2.60.0 pandas==3.1.1 pyarrow==26.0.1 torchdata==0.11.0 datasets==5.2.0 accelerate==1.15.0
"${pip[@]}" --no-deps verl==0.9.1

cat > "$work/micro.py" <<'PY'
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

ROWS, LENGTH, WORDS = 8, 16, 50
DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(WORDS, (ROWS, LENGTH), generator=DRAW)
MASK = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (ROWS, 1), generator=DRAW)).float()
ADVANTAGES = torch.randn(ROWS, 1, generator=DRAW).expand(ROWS, LENGTH) * MASK
OLD = torch.randn(WORDS, generator=DRAW).log_softmax(0)
REFERENCE = (OLD + torch.randn(WORDS, generator=DRAW)).log_softmax(0)
START = OLD + 0.05 * torch.randn(WORDS, generator=DRAW)
LOSS = PolicyLossConfig(dro_beta=1.0)


def gradient(name, rows, kl_coefficient=0.0):
    """The gradient of a batch that is trained in micro-batches of some rows, added up as the engines do."""
    logits = START.clone().requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=rows, policy_loss=LOSS)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(MASK.sum()), global_batch_size=ROWS)
    for micro in torch.arange(ROWS).split(rows):
        log_prob = logits.log_softmax(0)[TOKENS[micro]]
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=OLD[TOKENS[micro]],
            log_prob=log_prob,
            advantages=ADVANTAGES[micro],
            response_mask=MASK[micro],
            loss_agg_mode="seq-mean-token-mean",
            config=config,
        )
        penalty = kl_penalty(log_prob, REFERENCE[TOKENS[micro]], "low_var_kl")
        loss = loss + kl_coefficient * agg_loss(penalty, MASK[micro], "seq-mean-token-mean", **config.global_batch_info)
        loss.backward()
    return logits.grad


for name in ("vanilla", "dppo_tv", "gspo", "sapo", "gpg", "dro", "cispo", "geo_mean"):
    whole = gradient(name, ROWS)
    lengths = [(gradient(name, rows).norm() / whole.norm()).item() for rows in (8, 4, 2, 1)]
    print(f"{name}: gradient in 1, 2, 4, 8 micro-batches: " + ", ".join(f"{length:.2f}" for length in lengths))
for name in ("gspo", "geo_mean"):
    alike = torch.nn.functional.cosine_similarity(gradient(name, 8, 0.5), gradient(name, 1, 0.5), dim=0)
    print(f"{name} with a KL penalty of 0.5: cosine of the gradients in 1 and in 8 micro-batches {alike:.2f}")
PY
"$work/env/bin/python" -W ignore "$work/micro.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
