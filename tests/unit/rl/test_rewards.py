"""Reward functions: the scores of right, half right and wrong responses, and lookup by name."""

from __future__ import annotations

import math
import os
import select
import shutil
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.errors import ConfigError
from hypha_ray.rl.rewards import registered
from hypha_ray.rl.rewards.calls import reward_of
from hypha_ray.rl.rewards.evaluators import Processes
from hypha_ray.rl.rewards.registered import last_number
from hypha_ray.rl.rewards.response import Response


def response(text: str, answer: str, ended: bool = True) -> Response:
    return Response("?", text, tuple(range(len(text) + ended)), ended, {"task": "t", "answer": answer}, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "answer", "ended", "score"),
    [
        ("exact", "38", "38", True, 1.0),
        ("exact", " 38\n", "38", True, 1.0),
        ("exact", "38", "38", False, 0.0),
        ("exact", "038", "38", True, 0.0),
        ("exact", "", "38", True, 0.0),
        ("positions", "38", "38", True, 1.0),
        ("positions", "38", "38", False, 2 / 3),
        ("positions", "3", "38", True, 1 / 3),
        ("positions", "83", "38", True, 1 / 3),
        ("positions", "388", "38", True, 2 / 3),
        ("positions", "", "38", True, 0.0),
        ("contains", "it is 38.", "38", True, 1.0),
        ("contains", "it is 381", "38", True, 0.0),
        ("contains", "a (b) c", "(b)", False, 1.0),
        ("contains", "Paris", "paris", True, 0.0),
        ("number", "3 + 4 = 7, so 7.0 apples", "7", True, 1.0),
        ("number", "7 apples of 12", "7", True, 0.0),
        ("number", "costs $1,234.50.", "1234.5", True, 1.0),
        ("number", "−5", "-5", False, 1.0),
        ("number", "8-5", "5", True, 1.0),
        ("number", "none", "5", True, 0.0),
        ("number", r"so x\le5", r"x\le5", True, 1.0),
        ("number", "the answer is 5, see note e5x", "type5", True, 1.0),
        ("format", r"so \boxed{38}", "38", True, 1.0),
        ("format", r"so \boxed{\frac{1}{2}}", "0.5", True, 1.0),
        ("format", r"so \boxed{38}", "38", False, 0.0),
        ("format", r"\boxed{3} or \boxed{8}", "38", True, 0.0),
        ("format", r"\boxed{ }", "38", True, 0.0),
        ("format", r"so \boxed{\frac{\sqrt{3}}{2}}", "38", True, 1.0),
        ("format", r"in {x: \boxed{\left\{\frac{1}{\sqrt{1+\frac{1}{x}}}, 2\right\}}", "38", True, 1.0),
        ("format", r"\boxed{\left\{1, 2\right.}", "38", True, 1.0),
        ("format", r"a \\ \\boxed{\text{a \\ {b}}}", "38", True, 1.0),
        ("format", r"\boxed{\boxed{\frac{\sqrt{3}}{2}}}", "38", True, 1.0),
        ("format", r"\boxed{\frac{\sqrt{3}}{2}}, \boxed{\frac{\sqrt{3}}{2}}", "38", True, 0.0),
        ("format", r"\boxed{\frac{\sqrt{3}}{2}", "38", True, 0.0),
        ("format", "38", "38", True, 0.0),
        ("length", "x" * 11, "", True, 0.0),
        ("length", "x" * 12, "", True, -0.2 / 3.2),
        ("length", "x" * 15, "", True, -1.0),
        ("length", "x" * 8, "", False, -1.0),
        ("math", r"so \boxed{\frac12}", "0.5", True, 1.0),
        ("math", r"\boxed{\frac{1}{\sqrt{2}}}", r"\sqrt{2}/2", True, 1.0),
        ("math", "The answer is 72.", "72", False, 1.0),
        ("math", r"72, so \boxed{71}", "72", True, 0.0),
        ("math", "no idea", "72", True, 0.0),
        ("math", r"\boxed{3\pi}", r"3\pi", True, 1.0),
        ("math", r"\boxed{3}", r"3\pi", True, 0.0),
        ("math", r"\boxed{100000}", "10^{5}", True, 1.0),
        ("math", r"\boxed{20^{1/2}}", r"2\sqrt{5}", True, 1.0),
        ("math", r"\boxed{3i+2}", "2+3i", True, 1.0),
        ("math", r"\boxed{2}", "1, 2", True, 0.0),
        ("math", r"\boxed{1+2x}", "2x + 1", True, 1.0),
        ("math", r"\boxed{5}", r"1 \le x \le 5", True, 0.0),
        ("math", r"\boxed{5}", "x = 5", True, 1.0),
        ("math", r"\boxed{5}", "5 apples", True, 1.0),
        ("math", r"\boxed{5}", "5 m/s", True, 1.0),
        ("math", r"\boxed{5}", r"5\text{ dollars}", True, 1.0),
        ("math", r"\boxed{7}", "with $x=2$ it is $7$", True, 1.0),
        ("math", "It is 1 1/2.", "1.5", True, 1.0),
        ("math", r"\boxed{1/2}", "1 1/2", True, 0.0),
        ("math", r"\boxed{-1 1/2}", "-1.5", True, 1.0),
        ("math", r"\boxed{100000}", "1e5", True, 1.0),
        ("math", r"\boxed{5e}", "1e5", True, 0.0),
        ("math", r"\boxed{1.5e-3}", "0.0015", True, 1.0),
        ("code", "Here:\n```python\ndef f(a):\n    return a + 1\n```\nDone.", "assert f(1) == 2", True, 1.0),
        ("code", "```bash\nls\n```\n```Python3\ndef f(a): return 2\n```", "assert f(1) == 2", True, 1.0),
        ("code", "```python\nf = abs\n```\nIt prints `x` and ```y```\n```\n2\n```", "assert f(-2) == 2", True, 1.0),
        ("code", "```\nf = 1\n```\nor\n```\nf = 2\n```\n```text\n3\n```", "assert f == 2", True, 1.0),
        ("code", "1. So:\n   ```py\n   def f(a):\n       return 2\n   ```", "assert f(1) == 2", True, 1.0),
        ("code", "~~~python\nf = 1\n~~~\nprints\n```\n2\n```", "assert f == 1", True, 1.0),
        ("code", '```python\nf = """\n~~~\nx\n~~~\n"""\n```', "assert len(f) == 11", True, 1.0),
        ("code", "```text\nno program\n```", "assert True", True, 0.0),
        ("code", "def f(a):\n    return a", "assert f(1) == 2", True, 0.0),
        ("code", "def f(a): return 2\nraise SystemExit(0)", "assert f(1) == 2", True, 0.0),
        ("code", "f = lambda a: len(bytes(1 << 31))", "assert f(1)", True, 0.0),
        ("code", "def f(a", "assert f(1) == 2", True, 0.0),
        ("code", "import os\nf = lambda a: len(os.environ)", "assert f(1) <= 1", True, 1.0),
        ("code", "import os\nos._exit(0)", "assert False", True, 0.0),
        ("code", "import __main__\nprint(vars(__main__).get('proof'))\nraise SystemExit(0)", "assert False", True, 0.0),
        ("code", "print(open('program.py').read())\nraise SystemExit(0)", "assert False", True, 0.0),
        ("code", 'lost = """', "assert False", True, 0.0),
        ("code", "try:\n    f = input()\nexcept EOFError:\n    f = 1", "assert f == 1", True, 1.0),
        ("code", "\0", "assert True", True, 0.0),
        ("code", "open('a', 'wb').write(bytes(1 << 20))", "assert True", True, 1.0),
        ("code", "open('a', 'wb').write(bytes(1 << 25))", "assert True", True, 0.0),
    ],
)
def test_reward_of_a_response(name: str, text: str, answer: str, ended: bool, score: float) -> None:
    assert reward_of(name)(response(text, answer, ended)) == pytest.approx(score)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("while True:\n    print('x' * 10**6)", "assert True"),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(a): return f(a)", "f(1)"),
    ],
)
def test_program_that_never_ends_is_given_up_at_its_limit(
    text: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 2 s here, in a copy of the guard."""
    for file in (registered._GUARD, registered._GUARD.with_name("program.py")):
        shutil.copy(file, tmp_path)
    guard = tmp_path / registered._GUARD.name
    long, short = "\n_LIMIT_S = 10.0\n", "\n_LIMIT_S = 2.0\n"
    whole = guard.read_text(encoding="utf-8")
    assert long in whole
    guard.write_text(whole.replace(long, short), encoding="utf-8")
    monkeypatch.setattr(registered, "_GUARD", guard)
    assert reward_of("code")(response(text, answer)) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "42, 43, 44",
        r"\boxed{42} \boxed{41}",
        r"\boxed{41} 42",
        r"\boxed{\{41, 42\}}",
        r"\boxed{42 \text{ or } 41}",
        r"\boxed{[40,44]}",
        r"\boxed{\frac{1}{0}}",
        r"\boxed{" * 500,
        "(" * 20_000,
        "\0",
        "9^{9^{9^9}}",
    ],
)
def test_math_takes_no_several_answers_and_nothing_without_sense_for_the_right_one(text: str) -> None:
    assert reward_of("math")(response(text, "42")) == 0


@pytest.mark.slow
def test_math_that_never_ends_costs_its_response_the_reward_alone() -> None:
    endless = [response(text, "42") for text in (r"\boxed{9^{9^{9^9}}}", r"\boxed{10000000!!!}", r"\boxed{42}")]
    (first,), (second,), (third,) = Processes(["math"], 2, 4.0).rewards(endless)

    assert math.isnan(first) and math.isnan(second) and third == 1


def test_process_that_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    program = f"""
import os, time
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
open({str(tmp_path / "pid")!r}, "w").write(str(child))
"""
    assert reward_of("code")(response(program, "assert child")) == 1
    with suppress(ProcessLookupError):
        child = os.pidfd_open(int((tmp_path / "pid").read_text(encoding="utf-8")))
        ended, _, _ = select.select([child], [], [], 30.0)
        os.close(child)
        assert ended == [child]


def test_length_of_a_short_response_costs_nothing_and_has_no_sign() -> None:
    reward = registered.length(response("x", ""))

    assert reward == 0 and math.copysign(1, reward) == 1


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12))
def test_last_number_is_read_as_python_writes_it(value: Decimal) -> None:
    assert last_number(f"first 17, then {value}.") == value
    assert last_number(f"{value:,f} apples") == value


@given(st.text(max_size=20), st.text(max_size=20), st.booleans())
def test_rewards_are_between_nothing_and_one_whatever_the_response(text: str, answer: str, ended: bool) -> None:
    for name in ("exact", "positions", "contains"):
        score = reward_of(name)(response(text, answer, ended))
        assert score is not None and 0 <= score <= 1


@given(st.text(max_size=20), st.text(max_size=20), st.booleans())
def test_positions_are_full_for_exact_answers_alone(text: str, answer: str, ended: bool) -> None:
    got = response(text, answer, ended)
    assert (reward_of("positions")(got) == 1) == (reward_of("exact")(got) == 1)


def test_number_without_one_in_the_answer_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no number in the answer 'many'"):
        reward_of("number")(response("3", "many"))


def test_unknown_reward_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"RWD003.*'exakt'.*exact, positions.*did you mean 'exact'") as caught:
        reward_of("exakt")
    assert caught.value.exit_code == 2


def test_reward_of_users_is_found_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_job.py").write_text(
        "def short(response):\n    return 1.0 / (1 + len(response.ids))\nn = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert reward_of("beside_the_job:short")(response("abc", "")) == 0.2
    with pytest.raises(ConfigError, match=r"RWD004.*got int.*a function"):
        reward_of("beside_the_job:n")
    with pytest.raises(ConfigError, match=r"RWD004.*nothing of that name"):
        reward_of("beside_the_job:long")
    with pytest.raises(ConfigError, match=r"RWD004.*ModuleNotFoundError"):
        reward_of("no_such_module_here:short")
