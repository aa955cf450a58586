#!/usr/bin/env bash
# lighteval 0.13.0: F1 of SuperGLUE's CB is 1/3 if all answers are wrong, and F1 of GLUE's MRPC and QQP is the better
# label's.
#
# CB has three labels, and its F1 is the mean of the labels' F1. multi_f1_numeric asks for each label "is it this one,
# is it not", and takes the micro average over yes and no. That is the accuracy of the question: who takes a wrong label
# is still right about the third one. All answers wrong give 0.33, and always the same label 0.62. loglikelihood_f1,
# which MRPC and QQP have, computes the F1 of both labels and reports the greater. F1 is meant for "yes, a paraphrase":
# a model that never says yes gets 0.78 for 0. By the list of metrics they are "Loglikelihood F1 score for multiple gold
# targets" and "Corpus level F1 score of the multichoice selection"; the docstring says micro, but not of what.
#
# hypha_ray isn't touched: it doesn't use lighteval.
#
# Seen with lighteval 0.13.0, scikit-learn 1.9.1, Python 3.11 (labels as frequent as in CB, and as in QQP):
#   CB, all wrong: accuracy 0.00, reported F1 0.33, mean of the labels' 0.00
#   CB, always the first label: accuracy 0.44, reported F1 0.62, mean of the labels' 0.20
#   CB, at random: accuracy 0.34, reported F1 0.56, mean of the labels' 0.29
#   CB, all right: accuracy 1.00, reported F1 1.00, mean of the labels' 1.00
#   QQP, always no: accuracy 0.63, reported F1 0.78, of yes 0.00
#   QQP, one yes in ten found: accuracy 0.67, reported F1 0.80, of yes 0.20
#   QQP, always yes: accuracy 0.37, reported F1 0.54, of yes 0.54
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0 \
    datasets==5.2.0 inspect-ai==0.3.285 scikit-learn==1.9.1 scipy==1.17.1 lighteval==0.13.0

cat > "$work/f1.py" <<'PY'
import random

from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc


def f1(answers, label):
    hits = sum(gold == given == label for gold, given in answers)
    named = sum((gold == label) + (given == label) for gold, given in answers)
    return 2 * hits / named if named else 0.0


def reported(name, labels, answers):
    metric = getattr(Metrics, name).value
    samples = []
    for gold, given in answers:
        doc = Doc(query="", choices=labels, gold_index=gold)
        answer = ModelResponse(logprobs=[-1.0 if number == given else -2.0 for number in range(len(labels))])
        samples.append(metric.compute_sample(doc=doc, model_response=answer)[metric.metric_name])
    return metric.get_corpus_aggregations()[metric.metric_name](samples)


def accuracy(answers):
    return sum(gold == given for gold, given in answers) / len(answers)


draw = random.Random(0)
golds = draw.choices(range(3), [115, 119, 16], k=250)
for name, given in (
    ("all wrong", [(gold + 1) % 3 for gold in golds]),
    ("always the first label", [0] * 250),
    ("at random", draw.choices(range(3), k=250)),
    ("all right", golds),
):
    answers = list(zip(golds, given))
    mean = sum(f1(answers, label) for label in range(3)) / 3
    score = reported("multi_f1_numeric", [" True", " False", " Neither"], answers)
    print(f"CB, {name}: accuracy {accuracy(answers):.2f}, reported F1 {score:.2f}, mean of the labels' {mean:.2f}")
golds = draw.choices(range(2), [63, 37], k=1000)
for name, given in (
    ("always no", [0] * 1000),
    ("one yes in ten found", [gold if draw.random() < 0.1 else 0 for gold in golds]),
    ("always yes", [1] * 1000),
):
    answers = list(zip(golds, given))
    score = reported("loglikelihood_f1", [" no", " yes"], answers)
    print(f"QQP, {name}: accuracy {accuracy(answers):.2f}, reported F1 {score:.2f}, of yes {f1(answers, 1):.2f}")
PY
export HF_HUB_OFFLINE=1 LIGHTEVAL_DISABLE_TQDM=1
"$work/env/bin/python" -W ignore "$work/f1.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
