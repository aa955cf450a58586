#!/usr/bin/env bash
# lighteval 0.13.0: standard errors that are bootstrapped are divided by the root of the number of draws: 32 times too
# small.
#
# Beside each score lighteval reports its standard error. For a mean it is computed by formula; for any other
# aggregation, such as MCC, macro F1, BLEU or a function of one's own, the score is drawn again 1000 times with
# replacement. The spread of these scores is the standard error. It is then divided by the root of their number, as if
# the score were their mean: so it falls with bootstrap_iters, a matter of patience, and 1000 draws make an MCC of 0.4
# with an error of 0.05 one of 0.0015. Two models then differ "significantly" whatever they are. bootstrap_iters is
# documented as the "number of runs used to run the statistical bootstrap", and no page says that the number isn't a
# standard error. Whether an aggregation is a mean is told by its __name__.
#
# hypha_ray isn't touched: it doesn't use lighteval.
#
# Seen with lighteval 0.13.0, numpy 2.4.6, Python 3.11 (400 answers, seven in ten of them right):
#   accuracy as np.mean: standard error 0.0232, by the formula 0.0232
#   accuracy as a function of one's own: standard error 0.0008, by the formula 0.0232
#   accuracy as a function of one's own, 100 draws: standard error 0.0027, by the formula 0.0232
#   mcc: standard error 0.0015, 500 other samples of answers differ by 0.046
#   f1: standard error 0.0007, 500 other samples of answers differ by 0.023
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0 \
    datasets==5.2.0 inspect-ai==0.3.285 scikit-learn==1.9.1 scipy==1.17.1 lighteval==0.13.0

cat > "$work/stderr.py" <<'PY'
import random
import statistics
from types import SimpleNamespace

import numpy as np
from lighteval.logging.info_loggers import MetricsLogger
from lighteval.metrics.metrics import Metrics
from lighteval.metrics.metrics_corpus import CorpusLevelF1Score
from lighteval.metrics.sample_preparator import LogprobCorpusMetricInput

ANSWERS = 400
METRICS = {"mcc": Metrics.mcc.value.corpus_level_fn, "f1": CorpusLevelF1Score(average="macro")}


def average(values):
    return sum(values) / len(values)


def answers(draw):
    golds = [0, 1] * (ANSWERS // 2)
    return [LogprobCorpusMetricInput(golds=gold, preds=gold ^ (draw.random() < 0.3)) for gold in golds]


def reported(name, aggregation, values, iterations=1000):
    logger = MetricsLogger()
    for value in values:
        logger.log("task", {name: value})
    logger.aggregate({"task": SimpleNamespace(aggregation=lambda: {name: aggregation})}, bootstrap_iters=iterations)
    return logger.metric_aggregated["task"][name], logger.metric_aggregated["task"][f"{name}_stderr"]


if __name__ == "__main__":
    draw = random.Random(0)
    scores = [float(draw.random() < 0.7) for _ in range(ANSWERS)]
    by_formula = statistics.stdev(scores) / len(scores) ** 0.5
    for name, aggregation, iterations in (
        ("accuracy as np.mean", np.mean, 1000),
        ("accuracy as a function of one's own", average, 1000),
        ("accuracy as a function of one's own, 100 draws", average, 100),
    ):
        _, error = reported("acc", aggregation, scores, iterations)
        print(f"{name}: standard error {error:.4f}, by the formula {by_formula:.4f}")
    for name, metric in METRICS.items():
        _, error = reported(name, metric.compute_corpus, answers(draw))
        spread = statistics.stdev(metric.compute_corpus(answers(draw)) for _ in range(500))
        print(f"{name}: standard error {error:.4f}, 500 other samples of answers differ by {spread:.3f}")
PY
export HF_HUB_OFFLINE=1 LIGHTEVAL_DISABLE_TQDM=1
"$work/env/bin/python" -W ignore "$work/stderr.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
