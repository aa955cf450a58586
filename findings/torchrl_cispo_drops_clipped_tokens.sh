#!/usr/bin/env bash
# torchrl 0.14.1: CISPOLoss gives clipped tokens no gradient, where CISPO is made so that every token has one.
#
# CISPO, of the MiniMax-M1 paper that the class names, clips the importance weight, takes it as a constant, and
# multiplies it with the advantage and the log-probability: a token outside of the bounds trains with the bound as its
# weight, and none is dropped as by PPO. CISPOLoss multiplies the clipped weight, as a function of the policy, with the
# advantage, and has no log-probability. Within the bounds the gradient is the same; outside of them it is 0, on both
# sides and for both signs of the advantage. That is more dropped than by GRPOLoss, the loss that it should improve on,
# which keeps the tokens that would be made likelier from below or less likely from above. Runs with it train, so
# nothing tells. The loss itself is the number of the docstring, which has no word of gradients.
#
# hypha_ray isn't touched: it has its own losses.
#
# Seen with torchrl 0.14.1, torch 2.13.0, transformers 5.12.1, Python 3.11 (the weight of the token's log-probability in
# the gradient per unit of advantage, bounds 0.8 and 1.2):
#   CISPOLoss, advantage 1: ratio 0.5 has 0.00, ratio 1 has 1.00, ratio 1.1 has 1.10, ratio 2 has 0.00
#   CISPOLoss, advantage -1: ratio 0.5 has 0.00, ratio 1 has 1.00, ratio 1.1 has 1.10, ratio 2 has 0.00
#   GRPOLoss, advantage 1: ratio 0.5 has 0.50, ratio 1 has 1.00, ratio 1.1 has 1.10, ratio 2 has 0.00
#   GRPOLoss, advantage -1: ratio 0.5 has 0.00, ratio 1 has 1.00, ratio 1.1 has 1.10, ratio 2 has 2.00
#   CISPO by the paper: ratio 0.5 has 0.80, ratio 1 has 1.00, ratio 1.1 has 1.10, ratio 2 has 1.20
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 transformers==5.12.1 torchrl==0.14.1 tensordict==0.14.3

cat > "$work/clipped.py" <<'PY'
import math

import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import CISPOLoss, GRPOLoss
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)
torch.manual_seed(0)
RATIOS = (0.5, 1.0, 1.1, 2.0)
WORDS = {f"w{word}": word for word in range(16)}
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(WORDS, unk_token="w0")), pad_token="w0", eos_token="w1"
)
MODEL = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )
).eval()
POLICY = TransformersWrapper(MODEL, tokenizer=TOKENIZER, input_mode="tokens", generate=False, pad_output=False)
TOKENS = torch.tensor([5, 9, 3, 7, 2])
ANSWER = torch.tensor([False, False, False, False, True])


def log_probabilities():
    logits = MODEL(TOKENS[None]).logits[0]
    following = logits[:-1].log_softmax(-1).gather(-1, TOKENS[1:, None])[:, 0]
    return torch.cat([following.new_zeros(1), following])


def gradient(value):
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(value, list(MODEL.parameters()))])


def weight(kind, ratio, advantage):
    sampled = log_probabilities().detach() - math.log(ratio)
    row = TensorDict(
        {
            "tokens": TensorDict({"full": TOKENS}),
            "masks": TensorDict({"all_attention_mask": torch.ones_like(ANSWER), "all_assistant_mask": ANSWER}),
            "log_probs": TensorDict({"full": sampled}),
            "advantage": torch.full((len(TOKENS), 1), advantage),
        }
    )
    loss = kind(POLICY, clip_epsilon=0.2, entropy_bonus=False, masking_strategy="rlhf")
    found = gradient(loss(lazy_stack([row])).loss_objective.sum())
    of_token = gradient(log_probabilities()[ANSWER].sum())
    share = (found @ of_token) / (of_token @ of_token)
    assert torch.allclose(found, share * of_token, atol=1e-5)
    return -share.item() / advantage


def line(label, weights):
    texts = [f"ratio {ratio:g} has {abs(weight):.2f}" for ratio, weight in zip(RATIOS, weights, strict=True)]
    print(f"{label}: {', '.join(texts)}")


for kind in (CISPOLoss, GRPOLoss):
    for advantage in (1.0, -1.0):
        line(f"{kind.__name__}, advantage {advantage:g}", [weight(kind, ratio, advantage) for ratio in RATIOS])
line("CISPO by the paper", [min(max(ratio, 0.8), 1.2) for ratio in RATIOS])
PY
"$work/env/bin/python" -W ignore "$work/clipped.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
