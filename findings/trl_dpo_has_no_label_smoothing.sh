#!/usr/bin/env bash
# TRL 1.16.0 trains DPO's own loss as if label_smoothing were 0, without a word; its CPO smooths by the same name.
#
# DPOConfig takes label_smoothing with the default loss_type "sigmoid". The losses of four steps are those without it, to
# the last digit, and no warning is printed. The description of the key names Robust DPO and EXO. CPOConfig (experimental)
# has the key, too: there the sigmoid loss is smoothed, and losses that ignore it (hinge, ipo) say so in a warning.
#
# Seen with trl 1.16.0, transformers 5.23.0, torch 2.13.0, Python 3.11:
#   dpo sigmoid: the same losses with 0.0 and 0.3, no warning of smoothing
#   dpo robust: other losses
#   cpo sigmoid: other losses
#   cpo hinge: a warning of smoothing
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 trl==1.16.0 transformers==5.23.0

cat > "$work/train.py" <<'PY'
import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

kind, loss, smoothing, folder = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "a", "b", "c", "d"])}, "<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=7, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
model = LlamaForCausalLM(config)
data = Dataset.from_list([{"prompt": "a b", "chosen": " c", "rejected": " d"}] * 8)
settings = dict(
    output_dir=folder, max_steps=4, per_device_train_batch_size=4, learning_rate=0.05, logging_steps=1, report_to=[],
    use_cpu=True, bf16=False, seed=0, disable_tqdm=True, label_smoothing=smoothing,
)
if kind == "dpo":
    arguments = DPOConfig(loss_type=[loss], **settings)
    trainer = DPOTrainer(model, copy.deepcopy(model), arguments, train_dataset=data, processing_class=tokenizer)
else:
    trainer = CPOTrainer(model, CPOConfig(loss_type=loss, **settings), train_dataset=data, processing_class=tokenizer)
trainer.train()
print("losses", *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
PY
train() { "$work/venv/bin/python" -W always "$work/train.py" "$1" "$2" "$3" "$work/out" 2> "$work/$1-$2-$3.err" | grep '^losses'; }

smoothed() {
  if [ "$(train "$1" "$2" 0.0)" = "$(train "$1" "$2" 0.3)" ]; then echo 'the same losses'; else echo 'other losses'; fi
}
warned() { if grep -qi smoothing "$work/$1.err"; then echo 'a warning'; else echo 'no warning'; fi; }

echo "dpo sigmoid: $(smoothed dpo sigmoid), $(warned dpo-sigmoid-0.3)" | tee "$work/seen"
echo "dpo robust: $(smoothed dpo robust)" | tee -a "$work/seen"
echo "cpo sigmoid: $(smoothed cpo sigmoid)" | tee -a "$work/seen"
train cpo hinge 0.3 > "$work/hinge"
echo "cpo hinge: $(warned cpo-hinge-0.3)" | tee -a "$work/seen"

diff "$work/seen" - <<'SEEN'
dpo sigmoid: the same losses, no warning
dpo robust: other losses
cpo sigmoid: other losses
cpo hinge: a warning
SEEN
echo 'as described'
