#!/usr/bin/env bash
# sentence-transformers 6.2.0: MatryoshkaLoss scales embeddings to length 1, so losses of a teacher's scores train away from it.
#
# MatryoshkaLoss takes any loss, by its table, and applies it to the first numbers of the embeddings, for each of its dims. It
# also scales what is left to length 1, even where all numbers are kept, and its documentation doesn't say so. Losses of
# cosines don't change by that. MarginMSELoss and DistillKLDivLoss have dot products by default, which lie between -1 and 1
# then, and can't reach a teacher's scores of 3 or 10. What is saved and used afterwards isn't scaled. So a student that
# equals its teacher, at a loss of 0, is trained to be another. MSELoss learns directions alone: a student that is too long
# stays so. Its labels, embeddings of the teacher, are cut for each dim, but not scaled. No warning.
# (huggingface/sentence-transformers, pull request 3538, made MSELoss work with MatryoshkaLoss.)
#
# hypha_ray isn't touched: it trains no embeddings.
#
# Seen with sentence-transformers 6.2.0, transformers 5.23.0, torch 2.13.0, Python 3.11 (a table of 40 words, 150 steps):
#   teacher: length 3.0, margins 3.2
#   MSELoss, student begun as 1.2 times the teacher
#     alone: length 3.0, margins wrong by 0.2
#     in MatryoshkaLoss of [16]: length 3.6, margins wrong by 1.4
#     in MatryoshkaLoss of [16, 8]: length 3.6, margins wrong by 1.4
#   MarginMSELoss, student begun as 1.0 times the teacher
#     alone: length 3.0, margins wrong by 0.0
#     in MatryoshkaLoss of [16]: length 3.0, margins wrong by 5.6
#     in MatryoshkaLoss of [16, 8]: length 2.9, margins wrong by 6.4
#   DistillKLDivLoss, student begun as 1.0 times the teacher
#     alone: length 3.0, margins wrong by 0.0
#     in MatryoshkaLoss of [16]: length 3.0, margins wrong by 0.6
#     in MatryoshkaLoss of [16, 8]: length 3.0, margins wrong by 1.1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.23.0 sentence-transformers==6.2.0

cat > "$work/distill.py" <<'PY'
import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

torch.set_num_threads(1)
WORDS, WIDTH = [f"w{number}" for number in range(40)], 16
TABLE = np.random.default_rng(0).normal(scale=1.5, size=(len(WORDS), WIDTH)).astype(np.float32)
DRAW = np.random.default_rng(1)
TEXTS = [[" ".join(DRAW.choice(WORDS, 4)) for _ in range(32)] for _ in range(3)]


def student(scale=1.0):
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=TABLE * scale)], device="cpu")


def encoded(model):
    return [torch.tensor(model.encode(column)) for column in TEXTS]


def scores(embeddings):
    query, right, wrong = embeddings
    return torch.stack([(query * right).sum(-1), (query * wrong).sum(-1)], 1)


def trained(make, columns, labels, dims, scale, rate):
    model = student(scale)
    loss = make(model) if dims is None else losses.MatryoshkaLoss(model, make(model), dims)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(150):
        optimizer.zero_grad()
        loss([model.preprocess(column) for column in TEXTS[:columns]], labels).backward()
        optimizer.step()
    return model


teacher = encoded(student())
margins = scores(teacher) @ torch.tensor([1.0, -1.0])
RUNS = {
    "MSELoss": (losses.MSELoss, 1, teacher[0], 1.2, 40.0),
    "MarginMSELoss": (losses.MarginMSELoss, 3, margins, 1.0, 0.5),
    "DistillKLDivLoss": (losses.DistillKLDivLoss, 3, scores(teacher), 1.0, 0.5),
}
print(f"teacher: length {teacher[0].norm(dim=-1).mean():.1f}, margins {margins.abs().mean():.1f}")
for name, (make, columns, labels, scale, rate) in RUNS.items():
    print(f"{name}, student begun as {scale} times the teacher")
    for dims in (None, [WIDTH], [WIDTH, WIDTH // 2]):
        embeddings = encoded(trained(make, columns, labels, dims, scale, rate))
        wrong = (scores(embeddings) @ torch.tensor([1.0, -1.0]) - margins).abs().mean()
        length = embeddings[0].norm(dim=-1).mean()
        kind = "alone" if dims is None else f"in MatryoshkaLoss of {dims}"
        print(f"  {kind}: length {length:.1f}, margins wrong by {wrong:.1f}")
PY
HF_HUB_OFFLINE=1 "$work/env/bin/python" "$work/distill.py" 2> "$work/errors" | tee "$work/seen"
if grep -i 'matryoshka\|normal' "$work/errors"; then exit 1; fi
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
