#!/usr/bin/env bash
# A model folder saved by transformers 5.23.0 is loaded by transformers 4.57.3 with another RoPE base, without a word.
#
# 5.x writes the base as rope_parameters.rope_theta in config.json, and no rope_theta beside it. 4.57.3 knows only the
# latter, keeps the former as an unknown key, and takes its default of 10 000. All weights load, no warning is printed,
# and the logits differ. With rope_theta written beside it, both agree.
#
# Seen with transformers 5.23.0 and 4.57.3, torch 2.13.0, Python 3.11:
#   saved with theta 500000; 5.23.0 reads 500000.0; 4.57.3 reads 10000.0; largest difference of logits 9.6 of 6.9
#   with rope_theta beside it: 4.57.3 reads 500000.0; the logits are equal
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install() { python3 -m pip install --quiet --disable-pip-version-check --target "$work/$1" "${@:2}"; }
install torch torch==2.13.0
install new transformers==5.23.0
install old transformers==4.57.3

cat > "$work/save.py" <<'PY'
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 500000}, initializer_range=0.2,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
PY
cat > "$work/load.py" <<'PY'
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
text = torch.arange(512)[None] * 7 % 64
with torch.no_grad():
    torch.save(model(text).logits, sys.argv[2])
config = model.config
theta = config.rope_parameters["rope_theta"] if transformers.__version__[0] == "5" else config.rope_theta
print(transformers.__version__, "reads theta", float(theta))
PY
cat > "$work/compare.py" <<'PY'
import sys
import torch

one, other = (torch.load(file) for file in sys.argv[1:3])
print("largest difference of logits", round(float((one - other).abs().max()), 6), "of", round(float(one.abs().max()), 4))
PY
cat > "$work/beside.py" <<'PY'
import json, pathlib, sys

file = pathlib.Path(sys.argv[1], "config.json")
config = json.loads(file.read_text())
assert "rope_theta" not in config, "the newer release writes it again"
file.write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}))
PY
new() { PYTHONPATH="$work/new:$work/torch" python3 "$@"; }
old() { PYTHONPATH="$work/old:$work/torch" python3 "$@"; }

new "$work/save.py" "$work/model"
new "$work/load.py" "$work/model" "$work/new.pt" | tee "$work/seen"
old "$work/load.py" "$work/model" "$work/old.pt" 2> "$work/errors" | tee -a "$work/seen"
new "$work/compare.py" "$work/new.pt" "$work/old.pt" | tee -a "$work/seen"
new "$work/beside.py" "$work/model"
old "$work/load.py" "$work/model" "$work/beside.pt" | tee -a "$work/seen"
new "$work/compare.py" "$work/new.pt" "$work/beside.pt" | tee -a "$work/seen"

grep -q '^5.23.0 reads theta 500000.0$' "$work/seen"
grep -q '^4.57.3 reads theta 10000.0$' "$work/seen"
grep -q '^4.57.3 reads theta 500000.0$' "$work/seen"
if grep -qi 'rope\|theta' "$work/errors"; then echo 'the older release speaks of it now'; exit 1; fi
first=$(awk '/logits/ {print $5; exit}' "$work/seen")
last=$(awk '/logits/ {x = $5} END {print x}' "$work/seen")
python3 -c "import sys; sys.exit(not (float('$first') > 0.001 and float('$last') < 1e-4))"
echo 'as described'
