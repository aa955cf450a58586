#!/usr/bin/env bash
# lighteval 0.13.0: the scores of "drop" and "copyright" are those of the best document: one right answer of 1000 is EM
# 1.
#
# Metrics.drop is DROP's exact match and F1. By its docstring the maximum is taken over the answers that a document
# allows. It is taken over the documents, too: corpus_level_fn is max where other metrics have np.mean. So each model
# that answers one question of the whole data set has EM 1 and F1 1. Metrics.copyright, by the list of metrics the
# "average length of longest common prefix", "average Levenshtein edit distance" and "similarity", gives the greatest,
# the least and the greatest. exact_match and f1_score of the same answers are averages. The task drop that is shipped
# takes exact_match.
#
# hypha_ray isn't touched: it doesn't use lighteval.
#
# Seen with lighteval 0.13.0, numpy 2.4.6, Python 3.11:
#   exact_match, 0 of 1000 right: em 0, the average is 0
#   exact_match, 1 of 1000 right: em 0.001, the average is 0.001
#   exact_match, 1000 of 1000 right: em 1, the average is 1
#   f1_score, 0 of 1000 right: f1 0, the average is 0
#   f1_score, 1 of 1000 right: f1 0.001, the average is 0.001
#   f1_score, 1000 of 1000 right: f1 1, the average is 1
#   drop, 0 of 1000 right: em 0, the average is 0
#   drop, 0 of 1000 right: f1 0, the average is 0
#   drop, 1 of 1000 right: em 1, the average is 0.001
#   drop, 1 of 1000 right: f1 1, the average is 0.001
#   drop, 1000 of 1000 right: em 1, the average is 1
#   drop, 1000 of 1000 right: f1 1, the average is 1
#   copyright, 0 of 1000 right: longest_common_prefix_length 0, the average is 0
#   copyright, 0 of 1000 right: edit_distance 11, the average is 11
#   copyright, 0 of 1000 right: edit_similarity 0, the average is 0
#   copyright, 1 of 1000 right: longest_common_prefix_length 11, the average is 0.011
#   copyright, 1 of 1000 right: edit_distance 0, the average is 10.99
#   copyright, 1 of 1000 right: edit_similarity 1, the average is 0.001
#   copyright, 1000 of 1000 right: longest_common_prefix_length 11, the average is 11
#   copyright, 1000 of 1000 right: edit_distance 0, the average is 0
#   copyright, 1000 of 1000 right: edit_similarity 1, the average is 1
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.24.0 \
    datasets==5.2.0 inspect-ai==0.3.285 scikit-learn==1.9.1 scipy==1.17.1 lighteval==0.13.0

cat > "$work/best.py" <<'PY'
from types import SimpleNamespace

from lighteval.logging.info_loggers import MetricsLogger
from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc

GOLD = "the cat sat on the mat and looked at the dog"
OTHER = "many words here that are by no means those meant"
DOCUMENTS = 1000


def scores(metric, right):
    logger = MetricsLogger()
    for number in range(DOCUMENTS):
        doc = Doc(query="", choices=[GOLD], gold_index=0, specific={"golds_no_preprocessing": [[GOLD]]})
        answer = ModelResponse(text=[GOLD if number < right else OTHER])
        logger.log("task", metric.compute_sample(doc=doc, model_response=answer))
    logger.aggregate({"task": SimpleNamespace(aggregation=metric.get_corpus_aggregations)}, bootstrap_iters=0)
    for name, values in logger.metrics_values["task"].items():
        yield name, logger.metric_aggregated["task"][name], sum(values) / len(values)


for name in ("exact_match", "f1_score", "drop", "copyright"):
    for right in (0, 1, 1000):
        for score, reported, average in scores(getattr(Metrics, name).value, right):
            print(f"{name}, {right} of {DOCUMENTS} right: {score} {reported:.4g}, the average is {average:.4g}")
PY
export HF_HUB_OFFLINE=1 LIGHTEVAL_DISABLE_TQDM=1
"$work/env/bin/python" -W ignore "$work/best.py" 2> "$work/errors" | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
