"""Any job file comes back from TOML as it was, and any other bytes or words are refused politely."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from hypha_ray.config import Job
from hypha_ray.config.assignments import nested
from hypha_ray.config.checks import in_groups
from hypha_ray.config.keys import EACH, Key, arrays, keys
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.errors import ConfigError

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
_INTEGERS = st.integers(-(2**63), 2**63 - 1)
_FREE = st.recursive(
    st.booleans() | _INTEGERS | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=10,
)
_SPECIAL = {
    "run.name": st.from_regex(r"\A[a-z0-9][a-zA-Z0-9_.-]{0,20}\Z"),
    "run.tags": st.lists(st.from_regex(r"\A[a-z0-9.:/ -]{0,20}[a-z]\Z").map(str.strip), max_size=3, unique=True),
    "telemetry.status_bridge": st.sampled_from(["127.0.0.1:61000", "[::1]:1", "host:80"]),
    "model.config": st.dictionaries(_TEXT, _FREE, max_size=3),
    "inner_optimizer.name": st.from_regex(r"\A[A-Za-z]\w{0,20}\Z", fullmatch=True),
    "inner_optimizer.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    "outer_optimizer.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    "testing.slowdown": st.lists(st.floats(1, 9), max_size=3),
    "testing.batch_times_s": st.lists(st.floats(0.01, 9), max_size=3),
    "testing.failpoints": st.lists(_TEXT),
    "sync.trim": st.floats(0.01, 0.49),
    "worker.autocast": st.sampled_from(["auto", "none", "bf16"]),
    "worker.attention": st.sampled_from(["auto", "none", "eager", "sdpa"]),
    "workers.N.count": st.integers(1, 50_000),  # Two groups are a fleet of the largest size.
    "checkpoint.push": st.none() | st.sampled_from(["owner/name", "a.b/c-d"]),
    "telemetry.sinks": st.lists(st.sampled_from(["console", "jsonl", "aim"])),
    "model.input_names": st.lists(_TEXT, min_size=1),
    "model.lora.targets": st.lists(_TEXT),
    "model.lora.modules_to_save": st.lists(_TEXT),
    "rl.group_size": st.integers(2, 99),
    "rl.dual_clip": st.none() | st.floats(1.01, 9),
    "rl.reward.functions": st.lists(_TEXT, min_size=1, max_size=3, unique=True),
    "rl.generation.server.urls": st.lists(st.sampled_from(["http://a:1", "https://b/c"])),
    "preference.label_smoothing": st.floats(0, 0.49),
    "inner_optimizer.clip_norm": st.none() | st.floats(0.1, 1e300),
}
_DEPENDENT = {
    "command",
    "commands",
    "kind",
    "num_workers",
    "min_workers",
    "quorum",
    "strategy",
    "warmup_steps",
    "total_steps",
    "rank",
    "fused_loss",
    "gradient_checkpointing",
}
_DEPENDENT |= {"repository", "token", "mode", "warmup_rounds", "in_flight", "k_aware", "kl", "minibatches", "weights"}
_DEPENDENT |= {
    "at_most",
    "bid",
    "by",
    "data_parallel",
    "engine",
    "environment",
    "epochs",
    "factory",
    "generators",
    "key_variable",
    "locality",
    "max_exchange_share",
    "loss",
    "mask_truncated",
    "merge",
    "metrics",
    "pattern",
    "probe_batch_size",
    "processes",
    "quantization",
    "refill",
    "sharding",
    "staleness",
    "template",
    "url",
}


_NEEDING_EACH_OTHER = (("rl", "reward", "tasks"), ("telemetry", "alerts"))
"""Arrays of tables whose keys need each other."""
OF_ALERTS = Job.model_validate(
    {
        "telemetry": {
            "alerts": [
                {"metric": "commit_age_s", "op": ">", "value": 9.5, "for_s": 0, "url_env": "A_B", "message": "é"},
                {"metric": "round/loss", "op": "below_median_times", "value": 0.5, "for_rounds": 3, "name": "é\n"},
                {"metric": "workers", "op": "<=", "value": -1e300, "for_s": 1e9, "command": ["a b", "", "é"]},
            ]
        }
    }
)
OF_TASKS = Job.model_validate(
    {
        "rl": {
            "algorithm": "grpo",
            "reward": {
                "functions": ["a", "b"],
                "tasks": [{"name": "é", "functions": ["b"]}, {"name": "c", "functions": ["b", "a"]}],
            },
        }
    }
)


def _values(key: Key) -> st.SearchStrategy[Any]:
    if key.name in _SPECIAL:
        return _SPECIAL[key.name]
    if key.kind.startswith("integer"):
        most = re.search(r"≤ (\d+)", key.kind)
        return st.integers(1, int(most[1]) if most else 2**63 - 1)
    if key.kind.startswith("number"):
        return st.floats(0.001, 0.999) | st.just(0.5)
    if key.kind == "true | false":
        return st.booleans()
    if key.kind == "table":
        return st.dictionaries(_TEXT, _FREE, max_size=3)
    words = {"true": True, "false": False}
    texts = _TEXT.filter(lambda text: text != "none") if key.can_be_none else _TEXT  # In a job file it is no value.
    return texts if key.kind == "text" else st.sampled_from([words.get(word, word) for word in key.kind.split(" | ")])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    lengths = {array: 0 if array in _NEEDING_EACH_OTHER else draw(st.integers(0, 2)) for array in arrays()}
    found: list[tuple[tuple[str, ...], Any]] = []
    for key in keys().values():
        array = key.path[: key.path.index(EACH)] if EACH in key.path else None
        paths = [key.path] if array is None else [(*array, str(n), key.path[-1]) for n in range(lengths[array])]
        replaced = lengths["workers",] and in_groups(key.path)
        replaced = replaced or (lengths["dataset", "mix"] and key.path in (("dataset", "path"), ("dataset", "name")))
        for path in paths:
            if key.path[-1] not in _DEPENDENT and not replaced and draw(st.booleans()):
                found.append((path, draw(_values(key))))
    empty = [((*array, str(n)), {}) for array, length in lengths.items() for n in range(length)]
    return Job.model_validate(nested([*empty, *found]))


# A failure names its keys. To make its job smaller takes Hypothesis five minutes, and five more at the second try.
@pytest.mark.slow
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@example(OF_TASKS)
@example(OF_ALERTS)
@given(jobs())
def test_resolved_toml_any_job_loads_to_an_equal_job(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(resolved_toml(job), encoding="utf-8", newline="")
        loaded = load(["@", str(file)])
    assert loaded.job == job
    assert all(note.startswith("CFG103") for note in loaded.notes)
    assert resolved_toml(loaded.job) == resolved_toml(job)


_NAMES = st.sampled_from(
    sorted({part for key in keys() for part in key} | {"scheduler", "job", "executors", "x-y", "0", "1"})
)
_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=5) | st.dates() | st.just("none"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)
_SOUP = st.lists(
    st.sampled_from(
        ["[", "]", "{", "}", "=", ".", ",", '"', "'", "\n", "\\", "#", " ", "model", "run", "seed", "1", "\x00"]
    ),
    max_size=40,
).map("".join)
_DOCUMENTS = st.dictionaries(_NAMES, _VALUES, max_size=5).map(tomli_w.dumps)
_BYTES = st.binary(max_size=60) | (_SOUP | _DOCUMENTS).map(lambda text: text.encode(errors="surrogatepass"))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(_BYTES, st.integers(0, 200), st.binary(max_size=3))
@example(b"[model.config]\na = 1", 0, b"")
@example(b"[model.config.a]\nb = nan", 24, b"")
def test_load_any_bytes_give_a_job_or_a_config_error(content: bytes, place: int, inserted: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_bytes(content[:place] + inserted + content[place:])
        try:
            loaded = load(["@", str(file)])
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            resolved = resolved_toml(loaded.job)
            file.write_text(resolved, encoding="utf-8", newline="")
            assert resolved_toml(load(["@", str(file)]).job) == resolved


_FLAGS = st.sampled_from([f"--{'.'.join(key.path).replace(EACH, n)}" for key in keys().values() for n in "01"])
_WORDS = (
    _FLAGS
    | st.text(max_size=6)
    | st.sampled_from(["@", "--resume", "--dry-run", "--model.config.a", "none", "1", "[1"])
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_WORDS | st.tuples(_FLAGS, st.text(max_size=6)).map("=".join), max_size=5))
def test_load_any_command_line_gives_a_job_or_a_config_error(arguments: list[str]) -> None:
    try:
        loaded = load(arguments)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert loaded.files == ()
