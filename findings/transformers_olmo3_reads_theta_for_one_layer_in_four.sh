#!/usr/bin/env bash
# transformers 5.23.0 gives an OLMo 3 model's rope_theta to its layers of full attention alone: those with a window, three
# in four, get 500 000, whatever the folder says. 4.57.3 gave it to all.
#
# Olmo3Config takes rope_theta out of its arguments for full attention, and then once more for the windows; by then it is
# gone, and the default stands in. OLMo 3 as released has 500 000, so nobody sees it there. A model with another base does:
# the default of 4.57.3 was 10 000, so each Olmo3Config that was made with that release and without a word of RoPE has it.
# Its folder loads with all weights and no warning, other logits, and saving it again makes the mixture permanent. A base
# for longer contexts, given to Olmo3Config of 5.23.0 itself, reaches one layer in four as well. What helps is
# rope_parameters with both kinds of layers. Some 300 small models of other architectures, with each kind of RoPE that
# 4.57.3 has for them, had the same logits in 5.23.0.
#
# hypha_ray loads such a folder as transformers does; docs/operations.md says so, and how to mend the folder.
#
# Seen with transformers 5.23.0 and 4.57.3, torch 2.13.0, Python 3.11:
#   4.57.3, made by default: theta 10000.0 in all layers
#   5.23.0, its folder: window 500000.0, full 10000.0; largest difference of logits 7.1 of 6.6
#   5.23.0, both given in rope_parameters: window 10000.0, full 10000.0; largest difference of logits 0.0 of 6.6
#   5.23.0, Olmo3Config(rope_theta=8000000): window 500000.0, full 8000000.0
#   5.23.0, Olmo2Config(rope_theta=8000000): 8000000.0 in all layers
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --disable-pip-version-check --target "$work/$1" "${@:2}"; }
install torch torch==2.13.0 numpy
install new transformers==5.23.0
install old transformers==4.57.3

cat > "$work/save.py" <<'PY'
import sys
import torch
from transformers import Olmo3Config, Olmo3ForCausalLM

torch.manual_seed(0)
config = Olmo3Config(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    pad_token_id=0, eos_token_id=1, initializer_range=0.2,
)
model = Olmo3ForCausalLM(config).eval()
model.save_pretrained(sys.argv[1])
text = torch.arange(400)[None] * 7 % 96
with torch.no_grad():
    torch.save(model(text).logits, sys.argv[2])
bases = set()
for rotary in model.model.rotary_embs.values():
    exponent = 2 * torch.arange(8) / 16
    bases.add(float(config.rope_theta))
    assert torch.allclose(rotary.inv_freq, config.rope_theta ** -exponent, rtol=1e-4)
print("4.57.3, made by default: theta", *bases, "in all layers")
PY
cat > "$work/load.py" <<'PY'
import json
import pathlib
import sys
import warnings
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Olmo2Config, Olmo3Config

folder = pathlib.Path(sys.argv[1])
expected = torch.load(sys.argv[2])
text = torch.arange(400)[None] * 7 % 96


def bases(config):
    parameters = config.rope_parameters
    return f"window {float(parameters['sliding_attention']['rope_theta'])}, full {float(parameters['full_attention']['rope_theta'])}"


def compared():
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    with torch.no_grad():
        found = model.eval()(text).logits
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    return f"{bases(model.config)}; largest difference of logits {difference:.1f} of {largest:.1f}"


print("5.23.0, its folder:", compared())
file = folder / "config.json"
config = json.loads(file.read_text())
theta = config.pop("rope_theta")
assert theta == 10000 and "rope_parameters" not in config
both = {kind: {"rope_type": "default", "rope_theta": theta} for kind in ("sliding_attention", "full_attention")}
file.write_text(json.dumps(config | {"rope_parameters": both}))
print("5.23.0, both given in rope_parameters:", compared())
print("5.23.0, Olmo3Config(rope_theta=8000000):", bases(Olmo3Config(rope_theta=8000000)))
print(f"5.23.0, Olmo2Config(rope_theta=8000000): {float(Olmo2Config(rope_theta=8000000).rope_parameters['rope_theta'])} in all layers")
PY
PYTHONPATH="$work/old:$work/torch" python3 "$work/save.py" "$work/model" "$work/logits.pt" 2>> "$work/errors" | tee "$work/seen"
PYTHONPATH="$work/new:$work/torch" python3 "$work/load.py" "$work/model" "$work/logits.pt" 2>> "$work/errors" | tee -a "$work/seen"
if grep -Eqi 'rope|theta' "$work/errors"; then echo 'transformers speaks of it now'; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
