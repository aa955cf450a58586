#!/usr/bin/env bash
# PEFT 0.21.2: add_weighted_adapter leaves out the tokens that its adapters have trained (trainable_token_indices).
#
# LoraConfig(trainable_token_indices=[...]) trains single rows of the embedding beside LoRA: the way for new special tokens
# and the markers of a chat. add_weighted_adapter of such adapters adds up A and B, and gives the new adapter fresh rows,
# which are those of the base; its configuration names the tokens as trained all the same, and so does the folder that
# save_pretrained writes. Even one adapter with weight 1 comes back without them. No error, no warning, in each way of
# combining. Two adapters that train a whole module of the same name are refused; tokens aren't.
# (Open reports name other parts that are combined wrongly: rank-stabilised scaling, DoRA, biases; huggingface/peft 3761.)
#
# hypha_ray is not touched: it goes on training such an adapter, but has one at a time, and combines none.
#
# Seen with peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11 (share of the adapters' own changes):
#   one adapter, linear: LoRA 1.00, tokens 0.00
#   one adapter, cat: LoRA 1.00, tokens 0.00
#   one adapter, svd: LoRA 1.00, tokens 0.00
#   two adapters, linear: tokens 0.00
#   two adapters, cat: LoRA 1.00, tokens 0.00
#   two adapters, svd: tokens 0.00
#   one adapter, cat, saved and loaded: LoRA 1.00, tokens 0.00, which its configuration names: [3, 5]
#   one adapter itself, saved and loaded: LoRA 1.00, tokens 1.00, which its configuration names: [3, 5]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() { "$work/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy
pip torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/combine.py" <<'PY'
import copy
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LORA, TOKENS = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2,
    ))


def trained(names):
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5])
    model = get_peft_model(base(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    torch.manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key or "trainable_tokens_delta" in key:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


def changes(model, name):
    """Merged weights without those of the base: what an adapter does, by its own merge."""
    model.set_adapter(name)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    before = base().state_dict()
    return {key: merged[key] - before[key] for key in (LORA, TOKENS)}


def share(found, wanted):
    return f"{abs(float((found * wanted).sum() / (wanted * wanted).sum())):.2f}"


names = {"one": ["first"], "two": ["first", "second"]}
for count, adapters in names.items():
    for kind in ("linear", "cat", "svd"):
        model = trained(adapters)
        parts = [changes(model, name) for name in adapters]
        assert all(float(part[TOKENS].abs().max()) > 0.1 for part in parts)
        model.add_weighted_adapter(adapters, [1.0] * len(adapters), "sum", combination_type=kind)
        found = changes(model, "sum")
        shares = [f"tokens {share(found[TOKENS], sum(part[TOKENS] for part in parts))}"]
        if count == "one" or kind == "cat":  # the others only come near to the sum of two
            shares.insert(0, f"LoRA {share(found[LORA], sum(part[LORA] for part in parts))}")
        print(f"{count} adapter{'s' if count == 'two' else ''}, {kind}: {', '.join(shares)}")

model = trained(["first"])
wanted = changes(model, "first")
model.add_weighted_adapter(["first"], [1.0], "sum", combination_type="cat")
model.save_pretrained(sys.argv[1])
for title, name in {"one adapter, cat": "sum", "one adapter itself": "first"}.items():
    loaded = PeftModel.from_pretrained(base(), f"{sys.argv[1]}/{name}", adapter_name="loaded")
    found = changes(loaded, "loaded")
    shares = f"LoRA {share(found[LORA], wanted[LORA])}, tokens {share(found[TOKENS], wanted[TOKENS])}"
    named = loaded.peft_config["loaded"].trainable_token_indices
    print(f"{title}, saved and loaded: {shares}, which its configuration names: {named}")
PY
"$work/env/bin/python" -W always "$work/combine.py" "$work/saved" 2> "$work/errors" | tee "$work/seen"
if grep -Eqi 'token_indices|trainable_tokens|weighted' "$work/errors"; then echo 'PEFT speaks of it now'; exit 1; fi
diff "$work/seen" - <<'SEEN'
one adapter, linear: LoRA 1.00, tokens 0.00
one adapter, cat: LoRA 1.00, tokens 0.00
one adapter, svd: LoRA 1.00, tokens 0.00
two adapters, linear: tokens 0.00
two adapters, cat: LoRA 1.00, tokens 0.00
two adapters, svd: tokens 0.00
one adapter, cat, saved and loaded: LoRA 1.00, tokens 0.00, which its configuration names: [3, 5]
one adapter itself, saved and loaded: LoRA 1.00, tokens 1.00, which its configuration names: [3, 5]
SEEN
echo 'as described'
