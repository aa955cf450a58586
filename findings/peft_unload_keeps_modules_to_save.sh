#!/usr/bin/env bash
# PEFT 0.21.2: unload() gives back a model whose modules_to_save are the trained ones: neither the base nor the policy.
#
# unload() is to return the base model without the adapter: by its docstring "the base model by removing all the PEFT
# modules". Modules that are trained whole are copies beside the originals, which are kept for this. disable_adapter() takes
# the originals, and is the base to the last digit. unload() takes away LoRA, and puts the trained copies where the originals
# were; those are gone. No error, no warning. A classifier or reward model has such a module without being asked: with
# task_type SEQ_CLS its score head is one. A base taken in this way as the reference of a policy, or saved as the base, is a
# third model. IA3 does the same; LoRA alone and trainable_token_indices come back as they were.
#
# hypha_ray trains whole modules beside LoRA (model.lora.modules_to_save, and a classifier's head), and is not touched: its
# reference takes the originals, as disable_adapter() does. Take the base of its adapters so, too, or load it anew.
#
# Seen with peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11 (largest difference of logits from the base's, as a
# part of the largest):
#   LoRA of q_proj: adapter disabled 0.0, unloaded 0.0
#   and of two tokens: adapter disabled 0.0, unloaded 0.0
#   and lm_head whole: adapter disabled 0.0, unloaded 1.0; lm_head is the trained one, all other weights the base's
#   LoRA of a classifier: adapter disabled 0.0, unloaded 1.5; score is the trained one, all other weights the base's
#   IA3 and lm_head whole: adapter disabled 0.0, unloaded 1.0; lm_head is the trained one, all other weights the base's
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() { "$work/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy
pip torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/unload.py" <<'PY'
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification


def base(kind):
    torch.manual_seed(0)
    return kind(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2, pad_token_id=0,
    )).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 15)[None]).logits


def distance(one, other):
    return float((one - other).abs().max() / other.abs().max())


def trained(kind, config):
    model = get_peft_model(base(kind), config)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


language, classifier = LlamaForCausalLM, LlamaForSequenceClassification
lora = {"r": 4, "target_modules": ["q_proj"]}
cases = {
    "LoRA of q_proj": (language, LoraConfig(**lora), None),
    "and of two tokens": (language, LoraConfig(**lora, trainable_token_indices=[3, 5]), None),
    "and lm_head whole": (language, LoraConfig(**lora, modules_to_save=["lm_head"]), "lm_head"),
    "LoRA of a classifier": (classifier, LoraConfig(**lora, task_type="SEQ_CLS"), "score"),
    "IA3 and lm_head whole": (
        language, IA3Config(target_modules=["q_proj"], feedforward_modules=[], modules_to_save=["lm_head"]), "lm_head",
    ),
}
for name, (kind, config, whole) in cases.items():
    model, before = trained(kind, config), base(kind)
    with model.disable_adapter():
        disabled = distance(logits(model), logits(before))
    copy = None if whole is None else model.get_submodule(f"base_model.model.{whole}.modules_to_save.default").weight
    unloaded = model.unload()
    line = f"{name}: adapter disabled {disabled:.1f}, unloaded {distance(logits(unloaded), logits(before)):.1f}"
    weights = unloaded.state_dict()
    changed = [key for key, tensor in before.state_dict().items() if not torch.equal(tensor, weights[key])]
    if whole is None:
        assert changed == []
    else:
        assert changed == [f"{whole}.weight"] and torch.equal(weights[f"{whole}.weight"], copy)
        line += f"; {whole} is the trained one, all other weights the base's"
    print(line)
PY
"$work/env/bin/python" -W always "$work/unload.py" 2> "$work/errors" | tee "$work/seen"
if grep -Eqi 'unload|modules_to_save' "$work/errors"; then echo 'PEFT speaks of it now'; exit 1; fi
for name in 'LoRA of q_proj' 'and of two tokens'; do
  grep -qx "$name: adapter disabled 0.0, unloaded 0.0" "$work/seen"
done
for name in 'and lm_head whole' 'LoRA of a classifier' 'IA3 and lm_head whole'; do
  grep -q "^$name: adapter disabled 0.0, unloaded [0-9.]*[1-9]" "$work/seen"
  grep -q "^$name: .* is the trained one, all other weights the base's$" "$work/seen"
done
echo 'as described'
