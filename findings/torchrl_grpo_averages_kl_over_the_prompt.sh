#!/usr/bin/env bash
# torchrl 0.14.1: GRPO's KL penalty gets weaker with every token of the prompt, and the logged KL with it.
#
# GRPOLoss masks the prompt and the padding, and takes the mean of its objective over the answer's tokens alone. For
# kl_to_ref_coeff and kl_to_inference_coeff it sets the masked places to 0 and then takes the mean over all places: with
# a prompt of nine times the answer's length the penalty is a tenth of what its coefficient says, and the balance of the
# two terms changes from batch to batch with the prompts' lengths and the padding. kl_to_ref and kl_to_inference, which
# are to be watched, are divided alike, as are kl_approx and clip_fraction. The documentation has "coefficient for the
# KL divergence to the reference policy", and says that the mask "determines which tokens are included in the loss
# computation". DAPO and CISPOLoss inherit it.
#
# hypha_ray isn't touched: it has its own losses.
#
# Seen with torchrl 0.14.1, torch 2.13.0, transformers 5.12.1, Python 3.11 (two answers of 10 tokens, each less likely
# by a factor of exp(0.5) for the reference and for the sampler; the KL of a token is then exp(-0.5) - 1 + 0.5 = 0.107):
#   prompt of 1: kl_to_ref 0.097, its loss with a coefficient of 1 0.097, clip_fraction 0.91, objective 1.200
#   prompt of 10: kl_to_ref 0.053, its loss with a coefficient of 1 0.053, clip_fraction 0.50, objective 1.200
#   prompt of 90: kl_to_ref 0.011, its loss with a coefficient of 1 0.011, clip_fraction 0.10, objective 1.200
#   prompt of 990: kl_to_ref 0.001, its loss with a coefficient of 1 0.001, clip_fraction 0.01, objective 1.200
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 numpy==2.4.6 transformers==5.12.1 torchrl==0.14.1 tensordict==0.14.3

cat > "$work/prompts.py" <<'PY'
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, models
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)
torch.manual_seed(0)
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
ANSWER, DISTANCE = 10, 0.5


def row(prompt):
    tokens = torch.randint(2, 16, (prompt + ANSWER,))
    answer = torch.arange(prompt + ANSWER) >= prompt
    logits = MODEL(tokens[None]).logits[0].detach()
    following = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    other = torch.cat([following.new_zeros(1), following]) - DISTANCE
    return TensorDict(
        {
            "tokens": TensorDict({"full": tokens}),
            "masks": TensorDict({"all_attention_mask": torch.ones_like(answer), "all_assistant_mask": answer}),
            "log_probs": TensorDict({"full": other}),
            "next": TensorDict({"ref_log_probs": TensorDict({"full": other})}),
            "advantage": torch.ones(len(tokens), 1),
        }
    )


for prompt in (1, 10, 90, 990):
    loss = GRPOLoss(POLICY, entropy_bonus=False, masking_strategy="rlhf", kl_to_ref_coeff=1.0)
    found = loss(lazy_stack([row(prompt), row(prompt)]))
    print(
        f"prompt of {prompt}: kl_to_ref {found.kl_to_ref:.3f}, "
        f"its loss with a coefficient of 1 {found.loss_kl_to_ref:.3f}, "
        f"clip_fraction {found.clip_fraction:.2f}, objective {-found.loss_objective.item():.3f}"
    )
PY
"$work/env/bin/python" -W ignore "$work/prompts.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
