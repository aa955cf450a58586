#!/usr/bin/env bash
# lm-eval 0.4.13: with several right answers a document, each score above 0 counts as 1, whatever metric gave it.
#
# A task of generated answers may name a column of lists as doc_to_target, the right answers of each document. A metric of
# the user's own (metric: !function …) is then asked once for each right answer, and the document's score is 1.0 if any of
# them is not 0. That is right for exact_match and wrong for shares, such as F1 of words, ROUGE or a similarity: their means
# become the share of documents that have anything in common with an answer. With one answer that is no list, the same
# function gives its own numbers. Nothing is printed, and the results name the metric as ever. Metrics of which
# less is better turn round: a distance of 0 to one of two answers and 3 to the other gives 1.
#
# hypha_ray passes users' tasks to lm-eval (evaluate.py --lm-eval … --include-path) and prints what it returns;
# docs/operations.md says so. What helps is process_results in the YAML file, or doc_to_target with one answer.
#
# Seen with lm_eval 0.4.13, Python 3.11 (two documents, answered "lol", means of F1 and of the difference of lengths):
#   by hand, best of the answers: F1 0.236, distance 6.5
#   answers in a list: F1 1.000, distance 1.0
#   the first answer alone: F1 0.236, distance 6.5
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --disable-pip-version-check lm_eval==0.4.13 datasets==5.2.0

cat > "$work/own.py" <<'PY'
from collections import Counter


def f1_of_words(references, predictions):
    right, given = Counter(references[0].split()), Counter(predictions[0].split())
    return 2 * (right & given).total() / (right.total() + given.total())


def distance(references, predictions):
    return abs(len(references[0].split()) - len(predictions[0].split()))
PY
cat > "$work/score.py" <<'PY'
import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[1])
import own

answers = [
    ["lol said the cat to the mat", "one two three four five six seven eight nine ten eleven"],
    ["no lol for you or me today sir", "a b c d e f g h i j k l m"],
]
rows = [{"question": "what?", "answers": right} for right in answers]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
for name, target in {"listed": "answers", "first": '"{{answers[0]}}"'}.items():
    (folder / f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: {target}
generation_kwargs: {{until: ["\\n"]}}
metric_list:
  - {{metric: !function own.f1_of_words, aggregation: mean, higher_is_better: true}}
  - {{metric: !function own.distance, aggregation: mean, higher_is_better: false}}
""")
best = [max(own.f1_of_words([right], ["lol"]) for right in both) for both in answers]
nearest = [min(own.distance([right], ["lol"]) for right in both) for both in answers]
print(f"by hand, best of the answers: F1 {sum(best) / 2:.3f}, distance {sum(nearest) / 2:.1f}")
manager = TaskManager(include_path=str(folder), include_defaults=False)
results = simple_evaluate(model="dummy", tasks=["listed", "first"], task_manager=manager)["results"]
for name, said in {"listed": "answers in a list", "first": "the first answer alone"}.items():
    figures = {key.split(",")[0]: value for key, value in results[name].items()}
    print(f"{said}: F1 {figures['f1_of_words']:.3f}, distance {figures['distance']:.1f}")
PY
HF_HOME="$work/cache" HF_HUB_OFFLINE=1 "$work/env/bin/python" "$work/score.py" "$work" 2> "$work/errors" | grep -E '^(by hand|answers|the first)' | tee "$work/seen"
diff "$work/seen" <(sed -n '/^# Seen/,/^set/s/^#   //p' "$0")
echo 'as described'
