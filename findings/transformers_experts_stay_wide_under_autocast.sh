#!/usr/bin/env bash
# transformers 5.23.0 and torch 2.13.0: under autocast to bfloat16 the experts of Mixtral and Qwen3-MoE stay in float32.
#
# A model with experts multiplies them by one of three interchangeable implementations. The default, grouped_mm, calls
# torch.nn.functional.grouped_mm, which isn't among the functions that autocast casts, with float32 weights and inputs
# that the library converts to the weights' dtype. So every layer of the model multiplies bfloat16 but the experts, which
# are most of its parameters and operations: mixed precision gives such a model hardly any of its speed and memory, and
# nothing is said. "eager" and "batched_mm", the other two, multiply experts in bfloat16, as other layers are.
#
# hypha_ray leaves it so (worker.autocast): weights of 16 bits (model.config.dtype = "bfloat16") have experts of 16 bits.
#
# Seen with transformers 5.23.0, torch 2.13.0, Python 3.11, on a CPU (dtypes of the products in a forward pass):
#   Mixtral, Qwen3Moe: attention float32 without, bfloat16 with autocast
#   Mixtral, Qwen3Moe: experts with autocast: default float32, eager bfloat16, batched_mm bfloat16
#   Mixtral, Qwen3Moe: 85 % of the products' operations stay in float32
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0

cat > "$work/experts.py" <<'PY'
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

sizes = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
models = {
    "Mixtral": dict(intermediate_size=224, num_local_experts=8, num_experts_per_tok=2),
    "Qwen3Moe": dict(
        intermediate_size=224, moe_intermediate_size=112, num_experts=16, num_experts_per_tok=4, head_dim=16
    ),
}
products = {"aten.mm", "aten.bmm", "aten.addmm", "aten._grouped_mm"}
ids = torch.arange(64).view(2, 32)


class Products(TorchDispatchMode):
    """Operations of products by their dtype."""

    def __init__(self):
        super().__init__()
        self.operations = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if str(function).rsplit(".", 1)[0] in products:
            inner = args[-2 if "addmm" in str(function) else 0].shape[-1]
            dtype = str(result.dtype).removeprefix("torch.")
            self.operations[dtype] = self.operations.get(dtype, 0) + 2 * inner * result.numel()
        return result


def run(name, implementation, autocast):
    """Operations of the whole model, and of its experts."""
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**sizes, **models[name])
    chosen = {} if implementation is None else {"experts_implementation": implementation}
    model = getattr(transformers, name + "ForCausalLM")._from_config(config, **chosen).eval()
    experts = [part for part in model.modules() if type(part).__name__.endswith("Experts")]
    assert len(experts) == 2
    of_experts = Products()
    for part in experts:
        def forward(*arguments, own=part.forward, **named):
            with of_experts:
                return own(*arguments, **named)
        part.forward = forward
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), Products() as of_all:
        model(input_ids=ids, use_cache=False)
    return of_all.operations, of_experts.operations


for name in models:
    plain, _ = run(name, None, False)
    assert set(plain) == {"float32"}, plain
    of_all, of_experts = run(name, None, True)
    assert set(of_experts) == {"float32"}, of_experts
    others = {dtype: count - of_experts.get(dtype, 0) for dtype, count in of_all.items()}
    assert others["bfloat16"] > 0 and others.get("float32", 0) == 0, others
    wide = of_all["float32"] / sum(of_all.values())
    print(f"{name}: default: experts float32, all else bfloat16; {wide:.0%} of the operations stay in float32")
    assert wide > 0.8
    for implementation in ("eager", "batched_mm"):
        _, narrow = run(name, implementation, True)
        print(f"{name}: {implementation}: experts {', '.join(narrow)}")
        assert set(narrow) == {"bfloat16"}, narrow
PY
"$work/env/bin/python" "$work/experts.py" 2>/dev/null
echo "as described"
