#!/usr/bin/env bash
# PEFT 0.21.2: adding a second adapter with layer_replication overwrites half of what the first has learned.
#
# layer_replication=[[0, 2], [0, 2]] stacks the two layers of the base twice; base weights are shared, each copy has its own
# A and B. add_adapter with the same configuration replicates again, on the model that is replicated already: its layers 2
# and 3 become copies of 0 and 1, adapters included. The first adapter's A and B of the upper layers are then those of the
# lower ones, its logits change, and save_pretrained writes it so. load_adapter of a saved folder does the same.
# No error, no warning. Without layer_replication the first adapter stays as it is.
#
# hypha_ray is not touched: it trains one adapter, and has no layer_replication.
#
# Seen with peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11 (difference of the first adapter's logits, as a
# part of the largest logit):
#   plain: first adapter differs by 0.00 after add_adapter, by 0.00 after load_adapter; upper layers are the lower ones: False
#   replicated: first adapter differs by 0.78 after add_adapter, by 0.78 after load_adapter; upper layers are the lower ones: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/second.py" <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def logits(model):
    model.set_adapter("first")
    with torch.no_grad():
        return model.eval()(torch.arange(3, 15)[None]).logits


def trained(config):
    torch.manual_seed(0)
    layers = 2 if config.layer_replication else 4
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2,
    ))
    model = get_peft_model(base, config, adapter_name="first")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


def upper_is_lower(model):
    layers = model.base_model.model.model.layers
    lower, upper = (layers[number].self_attn.q_proj.lora_A["first"].weight for number in (0, 2))
    return torch.equal(lower, upper)


def distance(model, before):
    return float((logits(model) - before).abs().max() / before.abs().max())


for name, replication in {"plain": None, "replicated": [[0, 2], [0, 2]]}.items():
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layer_replication=replication)
    model = trained(config)
    assert not upper_is_lower(model)
    before = logits(model)
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    model.add_adapter("second", config)
    added = distance(model, before)
    other = trained(config)
    other.load_adapter(f"{sys.argv[1]}/{name}/first", "second")
    loaded = distance(other, before)
    print(
        f"{name}: first adapter differs by {added:.2f} after add_adapter, by {loaded:.2f} after load_adapter; "
        f"upper layers are the lower ones: {upper_is_lower(model)}"
    )
PY
"$work/env/bin/python" -W always "$work/second.py" "$work" 2> "$work/errors" | tee "$work/seen"
if grep -qi replicat "$work/errors"; then echo 'PEFT speaks of replication now'; exit 1; fi
grep -qx 'plain: first adapter differs by 0.00 after add_adapter, by 0.00 after load_adapter; upper layers are the lower ones: False' "$work/seen"
grep -q '^replicated: .* upper layers are the lower ones: True$' "$work/seen"
awk '/^replicated/ { exit !($6 > 0.05 && $10 > 0.05) }' "$work/seen"
echo 'as described'
