"""Command lines of jobs with options of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from hypha_ray.config.options import REPEATED, parse_options, refuse_strays
from hypha_ray.data.options import PrepareOptions
from hypha_ray.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """Cut something."""

    source: Path
    """the thing to cut"""
    pieces: int = 4
    """number of pieces,
    all of one size"""
    share: float | None = None
    """part that is kept"""
    shape: Literal["round", "square"] = "round"
    """shape of a piece"""
    label: str | None = None
    """text on it"""
    only: list[str] = field(default_factory=list)
    """pieces to keep"""
    try_run: bool = False
    """cut nothing"""


def cut(*arguments: str) -> Cut:
    return parse_options(Cut, "A job.", arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--source a", Cut(Path("a"))),
        ("--source=a --pieces=7 --share 1", Cut(Path("a"), 7, 1.0)),
        ("--pieces -7 --source a --share none", Cut(Path("a"), -7)),
        ("--source 7 --label 7 --try-run", Cut(Path("7"), label="7", try_run=True)),
        ("--source a --try_run false --shape square", Cut(Path("a"), shape="square")),
        ("--source a --only x y --pieces 2", Cut(Path("a"), 2, only=["x", "y"])),
        ("--source a --only x,y --only z", Cut(Path("a"), only=["z"])),
        ("--source=--a=b --label=", Cut(Path("--a=b"), label="")),
        ("--source a --try-run=true --source b", Cut(Path("b"), try_run=True)),
    ],
)
def test_options_are_read_off_flags(arguments: str, expected: Cut) -> None:
    assert cut(*arguments.split(" ")) == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--sorce a", "error[CFG001]: unknown flag --sorce. Fix: did you mean --source?"),
        ("--tryrun", "error[CFG001]: unknown flag --tryrun. Fix: did you mean --try-run?"),
        ("--hlep", "error[CFG001]: unknown flag --hlep. Fix: did you mean --help?"),
        ("--source a --pieces many", "error[CFG002]: --pieces has the wrong type — got 'many', allowed integer. "),
        ("--source a --pieces 2.5", "error[CFG002]: --pieces has the wrong type — got 2.5, allowed integer. "),
        ("--source a --pieces true", "error[CFG002]: --pieces has the wrong type — got true, allowed integer. "),
        ("--source a --try-run twice", "error[CFG002]: --try-run has the wrong type — got 'twice', allowed true"),
        ("--source a --shape oval", "error[CFG003]: --shape is out of range — got 'oval', allowed round | square. "),
        ("--source=", "error[CFG003]: --source is out of range — got nothing, allowed path. "),
        ("--pieces 3", "error[CFG012]: --source is missing — allowed path. Fix: give the thing to cut"),
        ("", "error[CFG012]: --source is missing"),
        ("--source", "error[CFG015]: --source needs a value — allowed path. "),
        ("--source --pieces 3", "error[CFG015]: --source needs a value"),
        ("--source a b", "error[CFG015]: unexpected argument 'b'. Fix: one --source; quotes around a pattern"),
        ("-s a", "error[CFG015]: unexpected argument '-s'. Fix: -- before an option"),
        ("a", "error[CFG015]: unexpected argument 'a'. Fix: did you mean --source 'a'?"),
    ],
)
def test_mistake_is_one_error_that_names_the_flag(arguments: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cut(*arguments.split())
    assert str(caught.value).startswith(error)
    assert "Fix: " in str(caught.value) and caught.value.exit_code == 2


@dataclass(frozen=True)
class Play:
    """Play something."""

    model: str
    """what plays"""
    loud: bool = False
    """not quietly"""


@pytest.mark.parametrize(
    "arguments", ["--model a --loud", "--run a --loud", "a --loud", "--loud true a", "--loud --run=a"]
)
def test_model_may_be_a_run_by_position_or_flag(arguments: str) -> None:
    assert parse_options(Play, "A job.", arguments.split(), position="model") == Play("a", loud=True)


def test_two_values_by_position_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"CFG015.*unexpected argument 'b'. Fix: give one value for --model"):
        parse_options(Play, "A job.", ["a", "b"], position="model")


@dataclass(frozen=True)
class Pause:
    """Wait."""

    seconds: float
    """length of the wait"""


def test_wrong_type_of_an_option_that_is_needed_is_an_error() -> None:
    """There is no default to name."""
    with pytest.raises(ConfigError) as caught:
        parse_options(Pause, "A job.", ["--seconds", "x"])
    problem = "error[CFG002]: --seconds has the wrong type — got 'x', allowed number. Fix: write a number"
    assert str(caught.value) == problem


def test_flag_like_no_other_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"CFG001.*--zzz.*--source, --pieces, .*--try-run.*see --help"):
        cut("--zzz")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_option_its_default_meaning_and_kind(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cut("--pieces", "3", flag)
    assert caught.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "A job."
    assert "--source (needed) the thing to cut (path)" in lines
    assert "--pieces 4 number of pieces, all of one size (integer)" in lines
    assert '--shape "round" shape of a piece (round | square)' in lines
    assert "--only pieces to keep (list of text)" in lines
    assert "--try-run cut nothing (true | false)" in lines


@dataclass(frozen=True)
class Move:
    """Move something."""

    from_: str | None = None
    """place to begin at"""
    by: list[str] | None = field(default=None, metadata=REPEATED)
    """ways to go"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--from here", Move("here")),
        ("--by a=1,b=2 --from here --by c=[3,4]", Move("here", ["a=1,b=2", "c=[3,4]"])),
        ("--by a b --by=c", Move(None, ["a", "b", "c"])),
        ("--from a --from b", Move("b")),
        ("--run a --by b", Move("a", ["b"])),
    ],
)
def test_options_named_as_words_of_python_and_repeated_ones_are_read(arguments: str, expected: Move) -> None:
    assert parse_options(Move, "A job.", arguments.split(" ")) == expected


def test_option_named_as_a_word_of_python_is_named_without_the_underscore(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"did you mean --from\?"):
        parse_options(Move, "A job.", ["--form", "here"])
    with pytest.raises(ConfigError, match="--by is for --from alone"):
        refuse_strays(Move(by=["a"]), {"by": ("from_",)})
    with pytest.raises(SystemExit):
        parse_options(Move, "A job.", ["--help"])
    assert "--from " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--dataset a", "--source"),
        ("--output_dir a", "--out"),
        ("--max_length 5", "--seq-len"),
        ("--packing", "--pack"),
        ("--test-size 0.1", "--validation-fraction"),
    ],
)
def test_option_of_another_tool_is_answered_with_the_one_that_it_means(words: str, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(PrepareOptions, None, words.split())
    assert caught.value.fix == f"did you mean {option}?"
