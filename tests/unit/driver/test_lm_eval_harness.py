import importlib.util
import math
from pathlib import Path

import pytest

from hypha_ray.driver.saved_models import figures_of, refuse_unknown, score_tasks
from hypha_ray.errors import ConfigError


def test_tasks_without_the_package_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = r"EVL001.*--lm-eval needs the package lm-eval — got it isn't installed.*pip install 'hypha_ray\[eval\]'"
    with pytest.raises(ConfigError, match=words) as caught:
        score_tasks(tmp_path, ["x"], None, 1, 0)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "fix"), [("hellaswog", "did you mean 'hellaswag'?"), ("mine", "name the folder of its YAML file by --")]
)
def test_unknown_task_is_refused_with_the_nearest_one(name: str, fix: str) -> None:
    refuse_unknown(["hellaswag"], ["arc_easy", "hellaswag"])
    with pytest.raises(ConfigError, match="lm-eval has no such task") as caught:
        refuse_unknown(["hellaswag", name], ["arc_easy", "hellaswag"])
    assert fix in str(caught.value) and repr(name) in str(caught.value)


def test_figures_without_a_finite_value_are_left_out() -> None:
    values = {"alias": "sums", "acc,none": 0.5, "acc_stderr,none": "N/A", "f1,none": math.nan, "bleu,strict": math.inf}
    counted = {"sample_len": 3, "exact,strict": 1, "is_ok,none": True}
    assert dict(figures_of({"sums": values | counted})) == {"sums/acc": 0.5, "sums/exact/strict": 1.0}
