#!/usr/bin/env bash
# ragas 0.4.3: BLEU scores the first sentence of a response alone, and takes any sentence of the reference for it.
#
# BleuScore splits both texts at ". ", and gives sacrebleu the sentences of the response as a corpus, and each
# sentence of the reference as a list of references of its own. sacrebleu's lists are alternatives, one entry for each
# sentence of the corpus: with one entry they end after the first, and so does the corpus. All that follows the first
# ". " of a response is never read, and a sentence that stands anywhere in the reference is worth 1. A response that
# is the reference with one word before it can get 0. Both the metric of ragas.metrics and the newer one of
# ragas.metrics.collections do it. Texts without ". " are right, as in the docstring's example, and a perfect response
# is 1. Nothing is said.
#
# hypha_ray isn't touched: it has no BLEU.
#
# Seen with ragas 0.4.3, sacrebleu 2.6.0, Python 3.11 (a reference of three sentences):
#   the reference: 1.00 and 1.00, of the whole texts 1.00
#   its first sentence: 1.00 and 1.00, of the whole texts 0.11
#   its second sentence: 1.00 and 1.00, of the whole texts 0.06
#   its first sentence and nonsense: 1.00 and 1.00, of the whole texts 0.35
#   'Well. ' and the reference: 0.00 and 0.00, of the whole texts 0.90
#   one sentence that isn't in it: 0.60 and 0.60, of the whole texts 0.29
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" numpy==2.4.6 sacrebleu==2.6.0 langchain-community==0.4.1 ragas==0.4.3

cat > "$work/bleu.py" <<'PY'
import asyncio

from ragas.dataset_schema import SingleTurnSample
from ragas.metrics import BleuScore as OldScore
from ragas.metrics.collections import BleuScore
from sacrebleu import corpus_bleu

REFERENCE = "The capital of France is Paris. It lies on the Seine. It has two million inhabitants."
RESPONSES = {
    "the reference": REFERENCE,
    "its first sentence": "The capital of France is Paris",
    "its second sentence": "It lies on the Seine",
    "its first sentence and nonsense": (
        "The capital of France is Paris. Bananas grow on green cats. Two and two are nine."
    ),
    "'Well. ' and the reference": "Well. " + REFERENCE,
    "one sentence that isn't in it": "Paris lies on the Seine and has two million inhabitants.",
}


async def main():
    for name, response in RESPONSES.items():
        new = (await BleuScore().ascore(reference=REFERENCE, response=response)).value
        sample = SingleTurnSample(reference=REFERENCE, response=response)
        old = await OldScore().single_turn_ascore(sample)
        right = corpus_bleu([response], [[REFERENCE]]).score / 100
        print(f"{name}: {new:.2f} and {old:.2f}, of the whole texts {right:.2f}")


asyncio.run(main())
PY
(cd "$work" && RAGAS_DO_NOT_TRACK=true env/bin/python -W ignore bleu.py 2> errors | tee seen)
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
