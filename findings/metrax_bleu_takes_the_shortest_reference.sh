#!/usr/bin/env bash
# google-metrax 0.2.4: BLEU's brevity penalty goes by the shortest reference, and not by the closest, as documented.
#
# BLEU has no recall; its penalty for brevity is what keeps a cut-off answer from a full score. The paper compares an
# answer's length with that of the reference which is closest in length, and the docstring says so: "total 'effective'
# reference length (closest length match for each prediction)". The code adds up the shortest ones. So one short
# reference among the given ones switches the penalty off: the first words of a translation count as a perfect one. With
# one reference each the scores agree with those of sacrebleu, and with several the longer an answer's other references
# are, the more they are too high. Nothing is said.
#
# hypha_ray isn't touched: it computes no BLEU.
#
# Seen with google-metrax 0.2.4, sacrebleu 2.6.0, jax 0.10.2, Python 3.11 (words are split at spaces in both):
#   the cat sat on | 6 words: metrax 60.7, sacrebleu 60.7
#   the cat sat on | 6 and 1 words: metrax 100.0, sacrebleu 60.7
#   the cat sat on the mat | 8 words: metrax 71.7, sacrebleu 71.7
#   the cat sat on the mat | 8 and 3 words: metrax 100.0, sacrebleu 71.7
#   the cat sat on the mat | 8 and 5 words: metrax 100.0, sacrebleu 100.0
#   all of them: metrax 100.0, sacrebleu 76.4
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
pip=("$work/env/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" jax==0.10.2 flax==0.12.8 numpy==2.4.6 sacrebleu==2.6.0 google-metrax==0.2.4

cat > "$work/references.py" <<'PY'
import metrax
import sacrebleu

LONG = "the cat sat on the mat this morning"
CASES = [
    ("the cat sat on", ["the cat sat on the mat"]),
    ("the cat sat on", ["the cat sat on the mat", "sitting"]),
    ("the cat sat on the mat", [LONG]),
    ("the cat sat on the mat", [LONG, "it sat there"]),
    ("the cat sat on the mat", [LONG, "it sat on that mat"]),
]


def by_metrax(cases):
    answers, references = zip(*cases, strict=True)
    return 100 * float(metrax.BLEU.from_model_output(list(answers), list(references)).compute())


def by_sacrebleu(cases):
    most = max(len(references) for _, references in cases)
    streams = [[dict(enumerate(references)).get(place) for _, references in cases] for place in range(most)]
    return sacrebleu.corpus_bleu([answer for answer, _ in cases], streams, tokenize="none", smooth_method="none").score


for answer, references in CASES:
    lengths = " and ".join(str(len(reference.split())) for reference in references)
    found, other = by_metrax([(answer, references)]), by_sacrebleu([(answer, references)])
    print(f"{answer} | {lengths} words: metrax {found:.1f}, sacrebleu {other:.1f}")
print(f"all of them: metrax {by_metrax(CASES):.1f}, sacrebleu {by_sacrebleu(CASES):.1f}")
PY
"$work/env/bin/python" -W ignore "$work/references.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
