#!/usr/bin/env bash
# PEFT 0.21.2: four documented settings of adapters are accepted, saved with the adapter, and change nothing.
#
# HiRA: rank_pattern is to give single layers another rank than r, as for LoRA. A layer that is wrapped for the first time
# takes r all the same. Only a second adapter of the same model follows its pattern; saved, it can't be loaded alone any
# more, since the first adapter of a fresh model has r again, and its matrices another shape.
# PSOFT: psoft_alpha is described as a scaling factor with the meaning of LoRA's alpha. The frozen matrices are divided by
# that factor when they are made, and their product is multiplied by it, so it cancels out: in the result and in gradients.
# OFT: module_dropout is to replace blocks by the identity while training. The layer for it is made and never called.
# AdaLoRA: alpha_pattern, which its configuration has from LoRA's, is never read.
# No error and no warning. Who compares ranks, strengths or dropouts of these adapters, compares equal models.
# LoRA follows each of the four.
#
# hypha_ray isn't touched: it trains LoRA adapters only.
#
# Seen with peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11:
#   ranks of q_proj and o_proj for r=8 and a pattern of 2 for q_proj:
#     LoRA: 2 and 8; HiRA: 8 and 8; HiRA as a second adapter: 2 and 8, loaded alone: refused
#   the same adapter weights with alpha 16 and 64:
#     LoRA: other logits, other gradients; PSOFT: equal logits, equal gradients
#   two runs in training mode with a dropout of 0.5:
#     LoRA: other logits; OFT: equal logits
#   the same adapter weights with and without an alpha of 64 for q_proj:
#     LoRA: other logits; AdaLoRA: equal logits
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() { "$work/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy
pip torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/settings.py" <<'PY'
import sys

import torch
from peft import AdaLoraConfig, HiraConfig, LoraConfig, OFTConfig, PeftModel, PsoftConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.arange(40).reshape(2, 20)
MODULES = ["q_proj", "o_proj"]


def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2,
    ))


def trained(config):
    model = get_peft_model(base(), config)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def gradients(model):
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def compared(first, second, name):
    """Equal up to rounding, or different by far more."""
    distance = float((first - second).norm() / first.norm())
    assert distance < 1e-4 or distance > 1e-2, distance
    return f"{'equal' if distance < 1e-4 else 'other'} {name}"


def ranks(model, adapter="default"):
    layer = model.base_model.model.model.layers[0].self_attn
    return " and ".join(str(getattr(layer, name).r[adapter]) for name in MODULES)


print("ranks of q_proj and o_proj for r=8 and a pattern of 2 for q_proj:")
pattern = {"target_modules": MODULES, "r": 8, "rank_pattern": {"q_proj": 2}}
model = get_peft_model(base(), HiraConfig(**pattern))
lora, hira = ranks(get_peft_model(base(), LoraConfig(**pattern))), ranks(model)
model.add_adapter("second", HiraConfig(**pattern))
model.save_pretrained(sys.argv[1])
try:
    PeftModel.from_pretrained(base(), f"{sys.argv[1]}/second")
    alone = "loaded"
except RuntimeError as error:
    assert "size mismatch" in str(error)
    alone = "refused"
print(f"  LoRA: {lora}; HiRA: {hira}; HiRA as a second adapter: {ranks(model, 'second')}, loaded alone: {alone}")

print("the same adapter weights with alpha 16 and 64:")
words = []
for name, kind, key in (("LoRA", LoraConfig, "lora_alpha"), ("PSOFT", PsoftConfig, "psoft_alpha")):
    pair = [trained(kind(target_modules=MODULES, r=8, **{key: alpha})) for alpha in (16, 64)]
    assert compared(logits(pair[0]), logits(base()), "logits") == "other logits"
    found = compared(*map(logits, pair), "logits"), compared(*map(gradients, pair), "gradients")
    words.append(f"{name}: {', '.join(found)}")
print(f"  {'; '.join(words)}")

print("two runs in training mode with a dropout of 0.5:")
words = []
for name, config in {
    "LoRA": LoraConfig(target_modules=MODULES, r=8, lora_dropout=0.5),
    "OFT": OFTConfig(target_modules=MODULES, r=0, oft_block_size=4, module_dropout=0.5),
}.items():
    model = trained(config).train()
    words.append(f"{name}: {compared(logits(model), logits(model), 'logits')}")
print(f"  {'; '.join(words)}")

print("the same adapter weights with and without an alpha of 64 for q_proj:")
words = []
for name, kind, more in (("LoRA", LoraConfig, {"r": 8}), ("AdaLoRA", AdaLoraConfig, {"init_r": 8, "total_step": 100})):
    more |= {"target_modules": MODULES, "lora_alpha": 16}
    pair = [trained(kind(**more)), trained(kind(**more, alpha_pattern={"q_proj": 64}))]
    assert compared(logits(pair[0]), logits(base()), "logits") == "other logits"
    words.append(f"{name}: {compared(*map(logits, pair), 'logits')}")
print(f"  {'; '.join(words)}")
PY
"$work/env/bin/python" -W always "$work/settings.py" "$work/saved" 2> "$work/errors" | tee "$work/seen"
if grep -Eqi 'alpha|dropout|rank_pattern' "$work/errors"; then echo 'PEFT speaks of it now'; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
