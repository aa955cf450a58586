#!/usr/bin/env bash
# mergekit 0.1.5: merges by sce and by model_stock depend on the size of the changes, and give up on small ones in silence.
#
# Both compare fine-tuned models by their differences from a base. sce weights each model by the mean square of its
# difference, divided by the sum of all models'. model_stock goes a share t of the way from the base to the average, and t
# depends on the cosine between the differences. So multiplying all differences by one number shouldn't change a weight.
# But sce takes equal weights when the mean squares add up to less than 1e-6, and model_stock divides by at least 1e-6 in
# place of the product of two norms, which makes the cosine smaller, down to 0. The documentation of the two methods has no
# such bounds. A rate of 1e-6, used for hundreds of steps of AdamW, changes a weight by less than a thousandth.
# With changes of 0.0003 and 0.0009 the weights of sce, its own step, are gone. With 0.0001 model_stock loses part of the
# changes of vectors (as norms have them) and, by filter_wise, of rows; with 0.00001 nearly all: they are those of the base.
# No error, no warning. The longer a vector or a row, the later it comes: the models here are 64 wide.
#
# hypha_ray isn't touched: it merges no models by mergekit.
#
# Seen with mergekit 0.1.5, transformers 5.23.0, torch 2.13.0, Python 3.11 (the second model of sce changed three times as
# much; float32):
#   changes of 0.01: sce weighs 0.10 and 0.90; model_stock goes 0.65 of the way, in a vector 0.65 of 0.65, by row 0.65
#   changes of 0.001: sce weighs 0.10 and 0.90; model_stock goes 0.65 of the way, in a vector 0.65 of 0.65, by row 0.65
#   changes of 0.0003: sce weighs 0.50 and 0.50; model_stock goes 0.65 of the way, in a vector 0.65 of 0.65, by row 0.65
#   changes of 0.0001: sce weighs 0.50 and 0.50; model_stock goes 0.65 of the way, in a vector 0.43 of 0.65, by row 0.47
#   changes of 0.00001: sce weighs 0.50 and 0.50; model_stock goes 0.32 of the way, in a vector 0.01 of 0.65, by row 0.01
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip() { "$work/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy
pip torch==2.13.0 transformers==5.23.0 peft==0.21.2 mergekit==0.1.5

cat > "$work/changes.py" <<'PY'
import sys

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

MATRIX, VECTOR = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
SIZES = ("0.01", "0.001", "0.0003", "0.0001", "0.00001")


def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4,
    ))


def tuned(seed, size):
    """The base with changes of that standard deviation, half of whose variance all tuned models share."""
    model, shared, own = base(), torch.Generator().manual_seed(1000), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.randn(parameter.shape, generator=shared) + torch.randn(parameter.shape, generator=own)
            parameter += size * change / 2**0.5
    return model


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def merged(method, folders, out, **parameters):
    config = {
        "merge_method": method, "dtype": "float32", "base_model": f"{root}/base", "parameters": parameters,
        "models": [{"model": folder} for folder in folders],
    }
    run_merge(MergeConfiguration.model_validate(config), out, MergeOptions(copy_tokenizer=False, quiet=True))
    return changes(out)


def changes(folder):
    found, before = (load_file(f"{name}/model.safetensors") for name in (folder, f"{root}/base"))
    return {name: (found[name] - before[name]).double().flatten() for name in (MATRIX, VECTOR)}


def share(change, average):
    return float(change @ average / (average @ average))


root = sys.argv[1]
saved(base(), f"{root}/base")
for size in SIZES:
    here = f"{root}/{size}"
    first = saved(tuned(1, float(size)), f"{here}/first")
    second = saved(tuned(2, float(size)), f"{here}/second")
    larger = saved(tuned(2, 3 * float(size)), f"{here}/larger")

    pair = [changes(folder)[MATRIX] for folder in (first, larger)]
    agreed = pair[0].sign() == pair[1].sign()
    sum_of_both = merged("sce", [first, larger], f"{here}/sce")[MATRIX]
    columns = torch.stack(pair, 1)[agreed]
    weights = torch.linalg.lstsq(columns, sum_of_both[agreed, None]).solution.flatten().tolist()

    pair = [changes(folder) for folder in (first, second)]
    average = {name: (pair[0][name] + pair[1][name]) / 2 for name in pair[0]}
    stock = merged("model_stock", [first, second], f"{here}/stock")
    rows = merged("model_stock", [first, second], f"{here}/rows", filter_wise=True)
    cosine = float(torch.cosine_similarity(pair[0][VECTOR], pair[1][VECTOR], dim=0))
    print(
        f"changes of {size}: sce weighs {weights[0]:.2f} and {weights[1]:.2f}; model_stock goes "
        f"{share(stock[MATRIX], average[MATRIX]):.2f} of the way, in a vector "
        f"{share(stock[VECTOR], average[VECTOR]):.2f} of {2 * cosine / (1 + cosine):.2f}, by row "
        f"{share(rows[MATRIX], average[MATRIX]):.2f}"
    )
PY
"$work/env/bin/python" -W always "$work/changes.py" "$work/models" 2> "$work/errors" | tee "$work/seen"
if grep -Eqi 'small|cosine|equal' "$work/errors"; then echo 'mergekit speaks of it now'; exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
