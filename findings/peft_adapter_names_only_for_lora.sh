#!/usr/bin/env bash
# PEFT 0.21.2 takes adapter_names=[...] with every method, and most leave it out: each row gets the active adapter.
#
# One batch can ask for another adapter in each row, "__base__" for none. LoRA does so. PeftModel takes the argument out of
# the call for all methods and hands it to the method's forward hooks, and the hook that most inherit does nothing with it.
# So a row for the base model, or for the second adapter, comes from the first, without an error or a warning. Within LoRA
# each layer that can't do it raises (DoRA, merged, unknown names); a name that doesn't exist isn't noticed elsewhere.
# Base and policy in one batch, as for a KL divergence, then gives 0 for ever.
#
# hypha_ray is not touched: it trains LoRA alone, and one adapter.
#
# Seen with peft 0.21.2, transformers 5.23.0, torch 2.13.0, Python 3.11:
#   LORA: base row is base's, second's row is second's, unknown name: ValueError, warnings: 0
#   the nine others below: base row is first's, second's row is first's, unknown name: accepted, warnings: 0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2

cat > "$work/rows.py" <<'PY'
import warnings

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

attention = ["q_proj", "v_proj"]
configs = [
    peft.LoraConfig(r=4, target_modules=attention),
    peft.IA3Config(target_modules=attention, feedforward_modules=[]),
    peft.LoHaConfig(r=4, target_modules=attention),
    peft.LoKrConfig(r=4, target_modules=attention),
    peft.OFTConfig(r=0, oft_block_size=8, target_modules=attention),
    peft.HRAConfig(r=4, target_modules=attention),
    peft.FourierFTConfig(n_frequency=8, target_modules=attention),
    peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=8, target_modules=attention),
    peft.MissConfig(r=4, target_modules=attention),
    peft.LNTuningConfig(target_modules=["input_layernorm"]),
]
tokens = torch.arange(3, 15).repeat(3, 1)


def of_model(model, **arguments):
    with torch.no_grad():
        return model(tokens, **arguments).logits


def nearest(row, outputs):
    return min(outputs, key=lambda name: float((row - outputs[name][0]).abs().max()))


for config in configs:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2,
    )).eval()
    outputs = {"base": of_model(base)}
    model = peft.get_peft_model(base, config, adapter_name="first")
    model.add_adapter("second", config)
    for number, name in enumerate(["first", "second"]):
        model.set_adapter(name)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    for name in ["first", "second"]:
        model.set_adapter(name)
        outputs[name] = of_model(model.eval())
    assert float((outputs["first"] - outputs["base"]).abs().max()) > 1e-3
    assert float((outputs["first"] - outputs["second"]).abs().max()) > 1e-3
    model.set_adapter("first")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rows = of_model(model, adapter_names=["first", "__base__", "second"])
    assert nearest(rows[0], outputs) == "first"
    try:
        of_model(model, adapter_names=["absent"] * 3)
        unknown = "accepted"
    except ValueError:
        unknown = "ValueError"
    print(
        f"{config.peft_type.value}: base row is {nearest(rows[1], outputs)}'s, second's row is "
        f"{nearest(rows[2], outputs)}'s, unknown name: {unknown}, warnings: {len(said)}"
    )
PY
"$work/env/bin/python" "$work/rows.py" | tee "$work/seen"
grep -qx "LORA: base row is base's, second's row is second's, unknown name: ValueError, warnings: 0" "$work/seen"
test "$(grep -c "base row is first's, second's row is first's, unknown name: accepted, warnings: 0\$" "$work/seen")" = 9
echo 'as described'
