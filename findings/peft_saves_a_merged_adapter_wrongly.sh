#!/usr/bin/env bash
# PEFT 0.21.2 saves an adapter while it is merged, without a word, and some of these can't be loaded as what they were.
#
# merge_adapter() adds the adapter to the weights of the base for fast generation, and unmerge_adapter() takes it away.
# A checkpoint that is saved in between is right for LoRA on attention and MLP layers: only A and B are written. With
# embed_tokens or lm_head among the targets save_pretrained adds the weights of these layers' base to the file, by default
# (save_embedding_layers="auto"): merged ones here, so that the loaded model has the adapter twice. Layer norm tuning
# merges by swapping its weights with those of the base, so the file holds the untrained norms: the training is gone.
#
# hypha_ray is not touched: it merges only for its export, after the adapter is saved, and trains no merged model.
#
# Seen with peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11 (largest difference of logits after loading,
# of the largest logit):
#   LoRA of q_proj: saved 0.0, saved while merged 0.0
#   LoRA of embed_tokens: saved 0.0, saved while merged 0.6
#   LoRA of lm_head: saved 0.0, saved while merged 0.7
#   layer norm tuning: saved 0.0, saved while merged 0.5, and equal to the base
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/save.py" <<'PY'
import sys

import torch
from peft import LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2,
    )).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 15)[None]).logits


def distance(one, other):
    return float((one - other).abs().max() / other.abs().max())


configs = {
    "LoRA of q_proj": LoraConfig(r=4, target_modules=["q_proj"]),
    "LoRA of embed_tokens": LoraConfig(r=4, target_modules=["embed_tokens"]),
    "LoRA of lm_head": LoraConfig(r=4, target_modules=["lm_head"]),
    "layer norm tuning": LNTuningConfig(target_modules=["input_layernorm"]),
}
for name, config in configs.items():
    model = get_peft_model(base(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape)
    trained = logits(model)
    folder = f"{sys.argv[1]}/{name}"
    model.save_pretrained(folder)
    plain = distance(logits(PeftModel.from_pretrained(base(), folder)), trained)
    model.merge_adapter()
    assert distance(logits(model), trained) < 1e-4
    model.save_pretrained(f"{folder}, merged")
    model.unmerge_adapter()
    assert distance(logits(model), trained) < 1e-4
    loaded = logits(PeftModel.from_pretrained(base(), f"{folder}, merged"))
    is_base = distance(loaded, logits(base())) < 1e-6
    print(f"{name}: saved {plain:.1f}, saved while merged {distance(loaded, trained):.1f}, equal to the base: {is_base}")
PY
"$work/env/bin/python" -W always "$work/save.py" "$work" 2> "$work/errors" | tee "$work/seen"
if grep -qi merge "$work/errors"; then echo 'PEFT speaks of the merge now'; exit 1; fi
grep -qx 'LoRA of q_proj: saved 0.0, saved while merged 0.0, equal to the base: False' "$work/seen"
for name in 'LoRA of embed_tokens' 'LoRA of lm_head'; do
  grep -q "^$name: saved 0.0, saved while merged 0.[1-9], equal to the base: False" "$work/seen"
done
grep -q '^layer norm tuning: saved 0.0, saved while merged 0.[1-9], equal to the base: True' "$work/seen"
echo 'as described'
