#!/usr/bin/env bash
# transformers 5.23.0 describes *others of a tool as a required parameter of one number, and no call can have it.
#
# get_json_schema, by which apply_chat_template(tools=[function]) and TRL describe functions to a model, treats *args and
# **kwargs as ordinary parameters without a default: both are in "required", with the type of a single value. A call that
# obeys the schema raises a TypeError, or arrives as an entry of **kwargs; the plain call total(1) is none by the schema.
# A function whose docstring begins with "Args:" is refused although each argument is described; with a line before, it
# isn't.
#
# Seen with transformers 5.23.0, Python 3.11:
#   required of total(first, *others): ['first', 'others'], others: {'type': 'integer', 'description': 'More numbers.'}
#   the call that the schema asks for: TypeError
#   required of look_up(word, **options): ['word', 'options']; the call has options {'options': 1}
#   described at once: refused, no description for the argument 'word'; behind a line: described
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 jinja2

cat > "$work/tools.py" <<'PY'
from transformers.utils import get_json_schema


def total(first: int, *others: int) -> int:
    """Adds numbers.

    Args:
        first: A number.
        others: More numbers.
    """
    return first + sum(others)


def look_up(word: str, **options: int) -> dict:
    """Looks a word up.

    Args:
        word: The word.
        options: Options of the search by name.
    """
    return options


def at_once(word: str) -> str:
    """
    Args:
        word: The word.
    """


def behind_a_line(word: str) -> str:
    """Looks a word up.

    Args:
        word: The word.
    """


def parameters(function):
    return get_json_schema(function)["function"]["parameters"]


assert total(1) == 1 and total(1, 2, 3) == 6
described = parameters(total)
print("total requires", described["required"], "others:", described["properties"]["others"])
try:
    total(**{"first": 1, "others": 2})
    print("the call of the schema is taken")
except TypeError:
    print("the call of the schema: TypeError")
described = parameters(look_up)
print("look_up requires", described["required"], "and gets", look_up(**{"word": "a", "options": 1}))
for function in (at_once, behind_a_line):
    try:
        print(function.__name__, "described", list(parameters(function)["properties"]))
    except Exception as error:
        print(function.__name__, "refused", str(error)[-39:])
PY
"$work/venv/bin/python" "$work/tools.py" 2> "$work/errors" | tee "$work/seen"

diff "$work/seen" - <<'SEEN'
total requires ['first', 'others'] others: {'type': 'integer', 'description': 'More numbers.'}
the call of the schema: TypeError
look_up requires ['word', 'options'] and gets {'options': 1}
at_once refused  no description for the argument 'word'
behind_a_line described ['word']
SEEN
echo 'as described'
