"""Lists of a run's page that may be long: events by kind, and responses with their rewards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hypha_ray.history.report_timeline import Hide
from hypha_ray.history.thinning import spread
from hypha_ray.telemetry.news import KINDS, line_about
from hypha_ray.telemetry.sinks.files import ROLLOUTS, Record, read_jsonl, read_tail
from hypha_ray.texts import counted

EVENTS_OF_A_KIND = 120
MOST_EVENTS = 1000
"""Most events of one kind, and of all kinds together."""
LONGEST_EVENT = 300
"""Most characters of an event's text."""
ROUTINE = frozenset({"plan", "commit", "correction", "hire", "lease", "arrival", "stale"})
"""Kinds of events that every round has, which are hidden at first."""
_EVENT_TITLES = ("time, UTC", "kind", "round", "worker", "what happened")
_STAMPS = frozenset({"kind", "wall_time", "monotonic_s", "worker", "round", "incarnation"})
"""Fields of events with columns of their own, or that say nothing to people."""

MOST_ROLLOUTS = 40
ROLLOUTS_OF_A_ROUND = 4
LONGEST_TEXT = 800
"""Most characters of a prompt or response."""
WHOLE_BYTES = 4 << 20
"""Size of a file of responses that is read as a whole; of a larger one the ends are, of half this size each."""
_OF_A_RESPONSE = frozenset({"kind", "wall_time", "monotonic_s", "round", "worker", "prompt", "response", "reward"})
"""Fields of responses that are shown in places of their own."""


def event_list(events: Sequence[Record], hide: Hide) -> Iterator[str]:
    """Lines of HTML with the events of a run, and boxes that choose their kinds; none without events."""
    kinds = Counter(str(event.get("kind")) for event in events)
    shown = _shown_events(events, kinds)
    if not shown:
        return
    yield '<fieldset class="kinds"><legend>Kinds of events</legend>'
    for kind, count in sorted(kinds.items()):
        checked = "" if kind in ROUTINE else " checked"
        name = escape(kind)
        yield f'<label><input type="checkbox" value="{name}"{checked}> {name} <small>{count}</small></label>'
    yield "</fieldset>"
    if len(shown) < len(events):
        number = counted(len(events), "event")
        yield f'<p class="note">{len(shown)} of {number}: the first and the last of each kind.</p>'
    yield '<div class="scroll tall" tabindex="0" role="region" aria-label="events"><table class="events">'
    titles = "".join(
        f'<th scope="col">{title}</th>' for title in ("time, UTC", "kind", "round", "worker", "what happened")
    )
    yield f"<thead><tr>{titles}</tr></thead>\n<tbody>"
    for event in shown:
        yield _event_row(event, hide)
    yield "</tbody></table></div>"


def _shown_events(events: Sequence[Record], kinds: Mapping[str, int]) -> list[Record]:
    """Events of a page, in order: of each kind the first and the last ones."""
    of_a_kind = min(EVENTS_OF_A_KIND, MOST_EVENTS // max(1, len(kinds)))
    seen: Counter[str] = Counter()
    shown = []
    for event in events:
        kind = str(event.get("kind"))
        seen[kind] += 1
        is_last = seen[kind] > kinds[kind] - of_a_kind * 2 // 3
        if seen[kind] <= of_a_kind // 3 or is_last:
            shown.append(event)
    return shown


def _event_row(event: Record, hide: Hide) -> str:
    kind = str(event.get("kind"))
    time = str(event.get("wall_time", ""))[:19].replace("T", " ")
    number = event.get("round")
    round_text = str(number + 1) if isinstance(number, int) else ""
    worker = str(event.get("worker", ""))
    text = _cut(hide(_event_text(event)), LONGEST_EVENT)
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in (time, kind, round_text, worker, text))
    return f'<tr data-kind="{escape(kind)}">{cells}</tr>'


def _event_text(event: Record) -> str:
    """Text about an event: the console's if that tells of such events, otherwise its fields."""
    kind = str(event.get("kind"))
    if kind == "problem" and "text" in event:
        return str(event["text"])
    if kind in KINDS:
        try:
            return line_about(kind, [event])
        except (KeyError, TypeError):
            pass  # It isn't one of ours.
    parts = []
    for name, value in event.items():
        if name not in _STAMPS and value not in (None, "", {}, []):
            parts.append(f"{name} {_plain_text(value)}")
    return ", ".join(parts)


def rollout_list(folder: Path) -> Iterator[str]:
    """Lines of HTML with responses of a run and their rewards; none without responses."""
    path = folder / ROLLOUTS
    if not path.exists():
        return
    if path.stat().st_size <= WHOLE_BYTES:
        rollouts = read_jsonl(path, ("rollout",))
        number = counted(len(rollouts), "response")
    else:
        rollouts = read_jsonl(path, ("rollout",), WHOLE_BYTES // 2) + read_tail(path, WHOLE_BYTES // 2)
        number = f"the responses at the beginning and the end of {ROLLOUTS}"
    by_round: dict[int, list[Record]] = {}
    for rollout in rollouts:
        if isinstance(rollout.get("round"), int):
            by_round.setdefault(rollout["round"], []).append(rollout)
    if not by_round:
        return
    numbers = sorted(by_round)
    shown = {numbers[place] for place in spread(len(numbers), MOST_ROLLOUTS // ROLLOUTS_OF_A_ROUND)}
    parts = {number: _of_round(by_round[number]) for number in sorted(shown)}
    yield f'<p class="note">{sum(map(len, parts.values()))} of {number}.</p>'
    for round_number, responses in parts.items():
        is_last = round_number == numbers[-1]
        yield f"<details{' open' if is_last else ''}><summary>Round {round_number + 1}</summary>"
        yield from map(_rollout, responses)
        yield "</details>"


def _of_round(rollouts: Sequence[Record]) -> list[Record]:
    """Some responses of a round, from the lowest reward to the highest one."""
    by_reward = sorted(rollouts, key=_reward)
    return [by_reward[place] for place in spread(len(by_reward), ROLLOUTS_OF_A_ROUND)]


def _reward(rollout: Record) -> float:
    reward = rollout.get("reward")
    return float(reward) if isinstance(reward, int | float) else float("-inf")


def _rollout(rollout: Record) -> str:
    facts = [f"worker {_plain_text(rollout.get('worker', '?'))}"]
    if rollout.get("reward") is not None:
        facts.insert(0, f"reward {_plain_text(rollout['reward'])}")
    for name, value in rollout.items():
        if name not in _OF_A_RESPONSE and value not in (None, "", {}, []):
            facts.append(f"{name} {_cut(_plain_text(value), LONGEST_EVENT)}")
    chips = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    prompt = escape(_cut(_plain_text(rollout.get("prompt", "")), LONGEST_TEXT))
    response = escape(_cut(_plain_text(rollout.get("response", "")), LONGEST_TEXT))
    texts = f'<pre class="prompt">{prompt}</pre><pre class="response">{response}</pre>'
    return f'<article class="rollout"><p class="chips">{chips}</p>{texts}</article>'


def _plain_text(value: Any) -> str:
    """A value of a record as text: texts as they are, numbers with six digits, anything else as JSON."""
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str, most: int) -> str:
    """A text, or its beginning with the number of characters that are left out."""
    if len(text) <= most:
        return text
    return f"{text[:most]} … {len(text) - most} more characters"
