#!/usr/bin/env bash
# opacus 1.6.0: per-sample gradients are wrong for convolutions that pad without zeros, padded words and repeated words.
#
# DP-SGD clips the gradient of each sample and adds them up, and opacus computes those by formulas of its own for each kind of
# layer (grad_sample_mode="hooks", the default). Without clipping and noise their sum must be what backward() gives. It isn't
# - for convolutions with padding_mode circular, reflect or replicate: the formula pads with zeros;
# - for Embedding with padding_idx: that row has a gradient, so it is trained, and it counts in the norm that is clipped, which
#   grows with the length a text is padded to (layers after it that mask padding hide this);
# - for EmbeddingBag with a word twice in a bag: it is counted once. With mode max there is no gradient at all.
# The validator accepts these modules, and nothing warns. The parameter's .grad is right beside it, but DPOptimizer steps by
# the sum. grad_sample_mode="functorch" is right for convolutions and Embedding, and refuses EmbeddingBag; "ew", torch's own
# way, is right for convolutions. The noise is that of the method in all cases: the privacy holds, the weights are others.
#
# hypha_ray isn't touched: it has no per-sample gradients.
#
# Seen with opacus 1.6.0, torch 2.13.0, Python 3.11 (distance of the sum of per-sample gradients to .grad, as a part of it):
#   Conv2d, padding_mode zeros: hooks 0.00, functorch 0.00, ew 0.00
#   Conv2d, padding_mode circular: hooks 0.74, functorch 0.00, ew 0.00
#   Conv2d, padding_mode reflect: hooks 0.55, functorch 0.00, ew 0.00
#   Conv2d, padding_mode replicate: hooks 0.59, functorch 0.00, ew 0.00
#   Embedding, padding_idx None: hooks 0.00, functorch 0.00, ew 0.00
#   Embedding, padding_idx 0: hooks 1.28, functorch 0.00, ew 1.28
#   EmbeddingBag, sum, words once: hooks 0.00
#   EmbeddingBag, sum, words twice: hooks 0.45
#   EmbeddingBag, mean, words once: hooks 0.00
#   EmbeddingBag, mean, words twice: hooks 0.45
#   EmbeddingBag, max, words once: hooks 1.00
#   EmbeddingBag, max, words twice: hooks 1.00
#   padding's row after SGD: [0.0, 0.0, 0.0, 0.0]
#   padding's row after DP-SGD without noise: [-0.092, 0.127, 0.132, 0.067]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 opacus==1.6.0

cat > "$work/samples.py" <<'PY'
import warnings
from copy import deepcopy

import torch
from opacus import PrivacyEngine
from opacus.grad_sample import wrap_model
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", "Secure RNG|Full backward hook|Using a non-full")
torch.manual_seed(0)
IMAGES = torch.randn(8, 3, 6, 6, dtype=torch.float64)
TEXTS = torch.tensor([[1, 2, 3, 4, 0, 0], [5, 6, 7, 0, 0, 0], [2, 4, 6, 1, 3, 5]])
STARTS = torch.tensor([0, 3])
WORDS = {"once": torch.tensor([1, 2, 3, 4, 5, 6]), "twice": torch.tensor([1, 1, 3, 4, 6, 4])}


def distance(layer, mode, inputs):
    assert not ModuleValidator.validate(layer)
    wrapped = deepcopy(layer)
    wrap_model(wrapped, grad_sample_mode=mode, loss_reduction="sum")(*inputs).sin().sum().backward()
    layer.zero_grad()
    layer(*inputs).sin().sum().backward()
    summed, gradient = wrapped.weight.grad_sample.sum(0), layer.weight.grad
    return float((summed - gradient).norm() / gradient.norm())


def report(name, layer, modes, *inputs):
    print(f"{name}: " + ", ".join(f"{mode} {distance(layer.double(), mode, inputs):.2f}" for mode in modes))


class Mean(nn.Module):
    def forward(self, vectors):
        return vectors.mean(1)


def texts_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(8, 4, padding_idx=0), Mean(), nn.Linear(4, 1))


def row_after_a_step(private):
    model, data = texts_model(), DataLoader(TensorDataset(TEXTS), batch_size=len(TEXTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if private:
        made = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=data, noise_multiplier=0.0, max_grad_norm=1e6, poisson_sampling=False
        )
        wrapped, optimizer, _ = made
        wrapped(TEXTS).mean().backward()
    else:
        model(TEXTS).mean().backward()
    optimizer.step()
    return [round(number, 3) + 0.0 for number in model[0].weight[0].tolist()]


MODES = ("hooks", "functorch", "ew")
for padding_mode in ("zeros", "circular", "reflect", "replicate"):
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode)
    report(f"Conv2d, padding_mode {padding_mode}", layer, MODES, IMAGES)
for row in (None, 0):
    report(f"Embedding, padding_idx {row}", nn.Embedding(8, 4, padding_idx=row), MODES, TEXTS)
for mode in ("sum", "mean", "max"):
    for count, words in WORDS.items():
        report(f"EmbeddingBag, {mode}, words {count}", nn.EmbeddingBag(8, 4, mode=mode), MODES[:1], words, STARTS)
for private in (False, True):
    print(f"padding's row after {'DP-SGD without noise' if private else 'SGD'}: {row_after_a_step(private)}")
PY
"$work/env/bin/python" "$work/samples.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
