"""Let a saved model write: an answer to a prompt, to each line of standard input, or in a conversation.

    python jobs/generate.py --model RUN/model --prompt 'def main('
    python jobs/generate.py RUN --round 12 --temperature 0 < prompts.txt
    python jobs/generate.py --model RUN/model                  # a conversation, in a terminal

A tokenizer with a chat template makes a prompt the user's turn, unless the model was trained on texts without it. Then,
without a template, or with --raw, the model goes on from the prompt. The text appears as it is generated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypha_ray.config.entry_point import Phases, print_notes, run
from hypha_ray.config.options import Sampling, parse_options, require_round, require_sampling
from hypha_ray.driver.evaluation import find_model
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.files import uncollected

if TYPE_CHECKING:
    from hypha_ray.model.writer import Writer

_WITHOUT_TEMPLATE = "the model was trained on texts without its chat template, so it goes on from a prompt; see --raw"


@dataclass(frozen=True)
class Generate:
    """Let a saved model write: an answer to a prompt, to each line of standard input, or in a conversation."""

    model: str
    """folder from save_pretrained or PEFT, or a run by its name or directory"""
    prompt: str | None = None
    """text to answer; default: each line of standard input"""
    system: str | None = None
    """system message of a chat; default: that of the preparation, if there was one; empty: none"""
    round: int | None = None
    """round of a run, counted from 1, that has a snapshot; default: the saved model, otherwise the newest snapshot"""
    max_new_tokens: int = 256
    """tokens after which an answer is cut off"""
    temperature: float | None = None
    """divisor of logits; 0: the most probable token each time; default: as saved with the model, otherwise 0.7"""
    top_p: float | None = None
    """probability mass of the tokens to choose from; default: as saved with the model, otherwise 1"""
    top_k: int | None = None
    """number of most probable tokens to choose from; default: as saved with the model, otherwise all"""
    seed: int = 0
    """seed of the choices"""
    raw: bool | None = None
    """go on from the text itself, without a chat template; false: with it; default: as the model was trained"""


def main() -> None:
    """Parse first, import later: `--help` and a mistyped flag answer at once."""
    arguments = parse_options(Generate, __doc__, sys.argv[1:], position="model")
    _check(arguments)
    number = None if arguments.round is None else arguments.round - 1
    phases = Phases()
    phases.begin("looking for the model")
    model = find_model(arguments.model, number)
    print_notes(model.notes())
    phases.begin("loading libraries")
    with uncollected():
        from hypha_ray.model.writer import Writer

    phases.begin("loading the model")
    with model.opened() as folder:
        writer = Writer(folder, raw=arguments.raw, system=arguments.system, seed=arguments.seed)
    phases.end()
    if writer.leaves_template and arguments.system is None:
        print_notes([_WITHOUT_TEMPLATE])
    if writer.default_system:
        print_notes([f"the system message is that of the preparation, {writer.default_system!r}; see --system"])
    if arguments.system is not None and not writer.chats:
        fix = "leave --system out, or name a model that was trained on chats"
        if writer.leaves_template:
            fix = "leave --system out; or add --raw false, though the model was trained on texts without its template"
        raise ConfigError("GEN001", "only a chat has a system message", "--system", "a tokenizer with a template", fix)
    for prompt in prompts(arguments, writer):
        writer.write(prompt, max_new_tokens=arguments.max_new_tokens, **sampling_of(arguments))


def _check(arguments: Generate) -> None:
    """Refuse values that are out of range."""
    require_round(arguments.round)
    require_sampling(arguments.max_new_tokens, arguments.seed, sampling_of(arguments))


def sampling_of(arguments: Generate) -> Sampling:
    """Return the settings by which tokens are chosen."""
    return Sampling(temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k)


def prompts(arguments: Generate, writer: Writer) -> Iterator[str]:
    """Return the prompts; those of a terminal belong to one conversation, those of a file to one each."""
    if arguments.prompt is not None:
        yield arguments.prompt
        return
    talks = sys.stdin.isatty()
    while True:
        if talks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = next_line()
        if not line:
            return
        if not talks:
            writer.forget()
        if line.strip():
            yield line.rstrip("\r\n")


def next_line() -> str:
    """Return the next line of standard input; an empty text at its end.

    Raises:
        DataError: GEN004, it isn't UTF-8.

    """
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        fix = "convert the prompts to UTF-8, such as by `iconv -f UTF-16 -t UTF-8`"
        raise DataError("GEN004", "standard input isn't UTF-8", str(error), "UTF-8", fix) from None


if __name__ == "__main__":
    run(main)
