#!/usr/bin/env bash
# sentence-transformers 6.2.0: evaluators of rankings count what a retriever didn't find as its next hits.
#
# ReciprocalRankFusionEvaluator appends the positives that a list of documents lacks to its end, and computes MAP and
# NDCG of that. A document that isn't retrieved is worth 0 by definition; here a retriever with one hit of ten in a
# list of two has nine more from rank 3 on. The shorter its list, the better it is, and the fusion of two lists that
# have found one each scores less than either, with twice the hits. A list without a hit gets 0. base_map and
# base_ndcg of CrossEncoderRerankingEvaluator are made in the same way. With always_rerank_positives=False its
# reranked scores leave missing positives out, so that one hit of ten at the top is 1.0; the docstring says that this
# setting takes the maximum below 1.0. Nothing is said.
#
# hypha_ray isn't touched: it doesn't use these evaluators.
#
# Seen with sentence-transformers 6.2.0, torch 2.13.0, Python 3.11 (10 positives; those that are found come first):
#   1 found, 1 others: MAP and NDCG@10 0.10 and 0.22, fusion 0.85 and 0.86, base 0.85 and 0.86, reranked 1.00 and 1.00
#   1 found, 5 others: MAP and NDCG@10 0.10 and 0.22, fusion 0.57 and 0.49, base 0.57 and 0.49, reranked 1.00 and 1.00
#   1 found, 20 others: MAP and NDCG@10 0.10 and 0.22, fusion 0.30 and 0.22, base 0.30 and 0.22, reranked 1.00 and 1.00
#   1 found, 90 others: MAP and NDCG@10 0.10 and 0.22, fusion 0.16 and 0.22, base 0.16 and 0.22, reranked 1.00 and 1.00
#   5 found, 5 others: MAP and NDCG@10 0.50 and 0.65, fusion 0.81 and 0.65, base 0.81 and 0.65, reranked 1.00 and 1.00
#   10 found, 20 others: MAP and NDCG@10 1.00 and 1.00, fusion 1.00 and 1.00, base 1.00 and 1.00, reranked 1.00 and 1.00
#   each retriever finds another one: dense_map 0.85, sparse_map 0.85, map 0.80
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 transformers==5.23.0 scikit-learn==1.9.1 sentence-transformers==6.2.0

cat > "$work/ranks.py" <<'PY'
import math
from unittest.mock import MagicMock

import numpy as np
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.sparse_encoder.evaluation import ReciprocalRankFusionEvaluator

POSITIVES = [f"positive {number}" for number in range(10)]


class Reranker:
    """Leaves the order of the documents as it is."""

    model_card_data = MagicMock()

    def predict(self, pairs, **settings):
        return np.linspace(1, 0.1, len(pairs))


def by_definition(documents):
    hits = [document in POSITIVES for document in documents]
    precisions = [sum(hits[: rank + 1]) / (rank + 1) for rank, hit in enumerate(hits) if hit]
    gains = [1 / math.log2(rank + 2) for rank in range(10)]
    return sum(precisions) / len(POSITIVES), sum(gain for gain, hit in zip(gains, hits) if hit) / sum(gains)


def shown(name, pair):
    return f"{name} {pair[0]:.2f} and {pair[1]:.2f}"


for found, others in ((1, 1), (1, 5), (1, 20), (1, 90), (5, 5), (10, 20)):
    documents = POSITIVES[:found] + [f"other {number}" for number in range(others)]
    sample = {"query": "query", "query_id": "0", "positive": POSITIVES, "documents": documents}
    fusion = ReciprocalRankFusionEvaluator([sample], [sample], write_csv=False)()
    rerank = CrossEncoderRerankingEvaluator([sample], always_rerank_positives=False, write_csv=False)(Reranker())
    pairs = {
        "MAP and NDCG@10": by_definition(documents),
        "fusion": (fusion["dense_map"], fusion["dense_ndcg@10"]),
        "base": (rerank["base_map"], rerank["base_ndcg@10"]),
        "reranked": (rerank["map"], rerank["ndcg@10"]),
    }
    print(f"{found} found, {others} others: " + ", ".join(shown(*pair) for pair in pairs.items()))
dense, sparse = (
    {"query": "query", "query_id": "0", "positive": POSITIVES, "documents": [hit, f"other than {hit}"]}
    for hit in POSITIVES[:2]
)
fusion = ReciprocalRankFusionEvaluator([dense], [sparse], write_csv=False)()
scores = ", ".join(f"{name} {fusion[name]:.2f}" for name in ("dense_map", "sparse_map", "map"))
print(f"each retriever finds another one: {scores}")
PY
"$work/env/bin/python" -W ignore "$work/ranks.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
