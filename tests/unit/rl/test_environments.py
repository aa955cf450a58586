"""Environments: turns and masks of episodes, failures that cost one episode, and the two of the package."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.rl import RL
from hypha_ray.driver.preflight.trials import try_environment
from hypha_ray.errors import ConfigError
from hypha_ray.rl.engines.native import Completion, Responses, Sampling, responses_of, training_sampling
from hypha_ray.rl.environments.calculator import Calculator, called_expressions, result_of
from hypha_ray.rl.environments.number_game import NumberGame
from hypha_ray.rl.environments.pool import EnvironmentPool, Episode
from hypha_ray.rl.environments.rollouts import EnvironmentRollouts, Integers, Renderer, RenderingError, Trajectory
from hypha_ray.rl.island import Island
from hypha_ray.rl.policy import packed_episodes, sample_of, sampled_mask
from hypha_ray.rl.policy import responses_of as unpacked
from hypha_ray.rl.rewards.response import Response, records_of
from tests.support.rl import CHARACTERS, END, job, prompts, tokenizer

MODULE = '''
import os, time

class Echo:
    """Says the response doubled, until it is 0; the reward of a turn is the number of its digits."""

    def reset(self, record):
        self.turns = 0
        return [{"role": "user", "content": record["opening"]}] if "opening" in record else None

    def step(self, response):
        match response.text:
            case "7":
                while True:
                    time.sleep(0.1)
            case "8":
                os._exit(3)
            case "9":
                raise RuntimeError("no nines")
        self.turns += 1
        if response.text == "0":
            return None, float(self.turns)
        return [{"role": "user", "content": response.text * 2}], 0.1 * len(response.text)

class Wrong:
    def reset(self, record):
        return None

    def step(self, response):
        return [{"role": "user"}], 1.0

class Silent(Echo):
    def step(self, response):
        return None, None

class Steady:
    def reset(self, record):
        return None

    def step(self, response):
        return [{"role": "user", "content": "=="}], float(len(response.ids))

class Coroutines(Steady):
    async def reset(self, record):
        return None

    async def step(self, response):
        return None, 2.0

class Forks(Steady):
    def step(self, response):
        if os.fork() == 0:
            return None, 7.0
        print("a parent")
        return None, float(response.text)

class FirstToEnd(Steady):
    def step(self, response):
        with open("/proc/self/oom_score_adj") as file:
            return None, float(file.read())

class Takes(Steady):
    """Takes the answer out of what it is given."""

    def reset(self, record):
        self.answer = record.pop("answer")
        self.turns = 0

    def step(self, response):
        self.turns += 1
        reward = float(response.data.pop("answer") == self.answer == "4")
        return None if self.turns == 2 else [{"role": "user", "content": "="}], reward

class Needs(Steady):
    def __init__(self, path):
        pass

class Undocumented(Steady):
    tools = [lambda number: number]

class Chosen(Steady):
    """Replies with whatever the response asks for."""

    def step(self, response):
        class Text(str):
            pass

        contents = {"1": "0" * 2_000_000, "2": chr(0xD800), "3": Text("4")}
        message = {"role": "user", "content": contents.get(response.text, "5")}
        if response.text == "10":
            message["extra"] = "0" * 2_000_000
        if response.text == "11":
            return [{"role": "user", "content": ""}] * 100_000, 1.0
        match response.text:
            case "4":
                message["extra"] = os
            case "5":
                return [message], 1.0, True
            case "6":
                return [message], {"reward": 1.0}
            case "7":
                return (one for one in [message]), 1.0
            case "8":
                return None, 1e300
            case "9":
                return None, -2
        return [message], 1.0

class Leaky:
    """Leaves a file open in each episode, in a process that may have few."""
    def __init__(self):
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))

    def reset(self, record):
        left_open.append(open(__file__))
        return [{"role": "user", "content": "4"}]

    def step(self, response):
        return None, 1.0

left_open = []

class Pid:
    def reset(self, record):
        return [{"role": "user", "content": str(os.getpid())}]

    def step(self, response):
        return None, 1.0
'''


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environments of a user, beside the job."""
    (tmp_path / "worlds.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield


def rl(environment: str, **episode: Any) -> RL:
    table = {"environment": environment, "group_size": 2, "generation": {"max_response_tokens": 12}}
    return RL.model_validate(
        {**table, "episode": {"deadline_s": 3.0, **episode}, "reward": {"functions": ["environment"]}}
    )


def ids_of(text: str) -> list[int]:
    """Token ids of a text; "." is the end token."""
    return [END if one == "." else 2 + CHARACTERS.index(one) for one in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join("." if one == END else CHARACTERS[one - 2] for one in ids)


def played(settings: RL, scripts: dict[int, list[str]], prompt: str = "1=") -> list[Trajectory]:
    """Episodes of one prompt whose responses in each turn are those of a script, by the number in the group."""

    def respond(ids: Integers, mask: Integers, keys: Integers, sampling: Sampling) -> Responses:
        completions = []
        for *_, number, turn in keys.tolist():
            response = ids_of(scripts[number][turn])[: sampling.max_tokens]
            completions.append(Completion(tuple(response), tuple(-0.5 - place for place in range(len(response))), None))
        return responses_of(torch.from_numpy(ids), torch.from_numpy(mask), completions, [END])

    batch = prompts([prompt], ["4"])
    rollouts = EnvironmentRollouts(settings, tokenizer(), [END], None)
    try:
        sampling = replace(training_sampling(settings), samples=len(scripts))
        return rollouts.play([ids_of(prompt)], batch.keys, records_of(batch.arrays["reward_data"]), sampling, respond)
    finally:
        rollouts.close()


def test_turns_and_masks_are_those_of_a_hand_count() -> None:
    first, second = played(rl("worlds:Echo"), {0: ["12.", "0."], 1: ["0."]})

    assert text_of(first.tokens) == "12.12120."
    assert first.sampled == [True] * 3 + [False] * 4 + [True] * 2
    assert first.logprobs == [-0.5, -1.5, -2.5, 0, 0, 0, 0, -0.5, -1.5]
    assert text_of(first.opening) == text_of(second.opening) == "1="
    assert first.done and first.reward == pytest.approx(0.2 + 2)
    assert text_of(second.tokens) == "0." and second.sampled == [True, True] and second.reward == 1


def test_packed_conversations_are_trained_on_where_the_policy_has_spoken() -> None:
    trajectories = played(rl("worlds:Echo"), {0: ["12.", "0."], 1: ["0."]})
    packed = sample_of(prompts(["1="], ["4"])).update(packed_episodes(["0-0-0"], trajectories, 2))
    responses = unpacked(packed, torch.device("cpu"))

    assert sampled_mask(packed).tolist() == [[1, 1, 1, 0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert torch.equal(responses.mask, sampled_mask(packed))
    assert responses.attention_mask.tolist() == [[1] * 11, [1] * 4 + [0] * 7]
    assert text_of(responses.ids[0].tolist()) == "1=12.12120."
    assert responses.ended.tolist() == [True, True]
    assert packed.data["turns"].tolist() == [2, 1]
    assert packed.data["episode_rewards"].tolist() == pytest.approx([2.2, 1])


def test_limits_of_tokens_and_turns_end_an_episode() -> None:
    long, many, cut = played(rl("worlds:Echo", turns=3), {0: ["1234.", "0."], 1: ["1."] * 3, 2: ["123456789123"]})

    assert text_of(long.tokens) == "1234." and not long.done  # 8 tokens of the environment leave no room in 12.
    assert text_of(many.tokens) == "1.111.111." and not many.done and many.reward == pytest.approx(0.3)
    assert len(cut.tokens) == 12 and not cut.done and cut.reward == pytest.approx(1.2)


def test_a_turn_is_cut_off_at_its_own_limit() -> None:
    (cut,) = played(rl("worlds:Echo", turn_tokens=2), {0: ["123."]})

    assert text_of(cut.tokens) == "12" and not cut.done


def test_a_response_that_is_cut_off_is_truncated_though_the_environment_ends_the_episode() -> None:
    cut, whole = trajectories = played(rl("worlds:Coroutines"), {0: ["123456789123"], 1: ["1."]})
    packed = sample_of(prompts(["1="], ["4"])).update(packed_episodes(["0-0-0"], trajectories, 2))

    assert cut.reward == whole.reward == 2
    assert unpacked(packed, torch.device("cpu")).ended.tolist() == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_turn_that_hangs_dies_or_fails_costs_its_own_episode_alone(processes: int) -> None:
    scripts = {0: ["1.", "7."], 1: ["2.", "3.", "0."], 2: ["1.", "8."], 3: ["1.", "9."], 4: ["1.", "1.", "0."]}
    found = played(rl("worlds:Echo", processes=processes, deadline_s=2.0), scripts)

    assert [math.isnan(episode.reward) for episode in found] == [True, False, True, True, False]
    assert text_of(found[1].tokens) == "2.223.330." and found[1].reward == pytest.approx(3.2)
    assert "took longer than 2 s" in found[0].episode.failure
    assert found[2].episode.failure == "its process died"
    assert "no nines" in found[3].episode.failure
    assert text_of(found[3].tokens) == "1.119."


def test_all_episodes_that_fail_end_the_run_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"RL032.*fails in all episodes.*no nines"):
        played(rl("worlds:Echo"), {0: ["9."], 1: ["9."]})
    assert not caplog.messages


def test_the_first_failure_of_a_run_is_told_once_with_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = EnvironmentRollouts(rl("worlds:Echo"), tokenizer(), [END], None)
    try:
        for number in (2, 3):
            failed = Trajectory(Episode(0, {"prompt": f"{number}="}, failure="no nines"), (0,), [])
            rollouts.warn_of_failures([Trajectory(Episode(1, {"prompt": "1="}), (0,), []), failed])
    finally:
        rollouts.close()
    told = "environment worlds:Echo failed in an episode, which is told once: no nines; the prompt was '2='"
    assert caplog.messages == [told]


def test_messages_without_content_fail_with_their_reason() -> None:
    with pytest.raises(ConfigError, match=r"RL032.*without the texts role and content"):
        played(rl("worlds:Wrong"), {0: ["1."]})


def test_an_absent_reward_of_a_turn_is_absent() -> None:
    first, second = played(rl("worlds:Silent"), {0: ["1."], 1: ["2."]})

    assert math.isnan(first.reward) and first.done and not second.episode.failure


def test_whatever_a_user_returns_is_right_or_costs_its_episode_with_a_reason() -> None:
    found = played(rl("worlds:Chosen", turns=1), {number: [f"{number}."] for number in range(12)})

    reasons = [episode.episode.failure for episode in found]
    too_long = "more than 1000000 characters"
    told = ["", too_long, "", "", "JSON can't express", "no pair of messages"]
    told += ["a dictionary as the reward", "in the place of messages", "", "", too_long, too_long]
    assert [text in reason for text, reason in zip(told, reasons, strict=True)] == [True] * 12
    assert [bool(reason) for reason in reasons] == [bool(text) for text in told]
    assert [found[number].reward for number in (0, 3, 9)] == [1, 1, -2] and math.isnan(found[8].reward)


def test_messages_that_are_no_characters_cost_their_episode() -> None:
    found = played(rl("worlds:Chosen", turns=2), {0: ["2."], 1: ["3.", "9."]})

    assert "the tokenizer doesn't take its messages" in found[0].episode.failure
    assert text_of(found[1].tokens) == "3.49." and found[1].reward == -1


def test_methods_may_be_coroutines() -> None:
    assert [episode.reward for episode in played(rl("worlds:Coroutines"), {0: ["1."], 1: ["2."]})] == [2, 2]


def test_an_environment_may_change_its_record_and_other_episodes_of_the_prompt_see_nothing_of_it() -> None:
    found = played(rl("worlds:Takes"), {0: ["1.", "2."], 1: ["2.", "3."], 2: ["3.", "4."]})
    assert [(episode.reward, episode.episode.failure) for episode in found] == [(2.0, "")] * 3
    assert found[0].episode.record["answer"] == "4"


def test_a_process_without_memory_ends_before_its_worker() -> None:
    (episode,) = played(rl("worlds:FirstToEnd"), {0: ["1."]})
    assert episode.reward == 1000


def test_a_process_that_an_environment_forks_answers_nothing() -> None:
    found = played(rl("worlds:Forks"), {number: [f"{number}."] for number in range(4)})
    assert [episode.reward for episode in found] == [0, 1, 2, 3]


def test_a_prompt_alone_that_fails_ends_no_run_in_which_others_went_well() -> None:
    rollouts = EnvironmentRollouts(rl("worlds:Echo"), tokenizer(), [END], None)
    for text, failures in (("0.", 0), ("9.", 2)):
        batch = prompts(["1="], ["4"])

        def respond(ids: Integers, mask: Integers, keys: Integers, sampling: Sampling, text: str = text) -> Responses:
            completions = [Completion(tuple(ids_of(text)), (-0.5, -0.5), None)] * len(ids)
            return responses_of(torch.from_numpy(ids), torch.from_numpy(mask), completions, [END])

        sampling = replace(training_sampling(rl("worlds:Echo")), samples=2)
        records = records_of(batch.arrays["reward_data"])
        found = rollouts.play([ids_of("1=")], batch.keys, records, sampling, respond)
        assert sum(bool(episode.episode.failure) for episode in found) == failures
    rollouts.close()


def test_a_process_that_is_killed_as_it_begins_is_started_again(tmp_path: Path) -> None:
    code = f"""
import os, signal
if not os.path.exists({str(tmp_path / "killed")!r}):
    open({str(tmp_path / "killed")!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
class Late:
    def reset(self, record): ...
    def step(self, response): return None, 1.0
"""
    (tmp_path / "late.py").write_text(code, encoding="utf-8")
    assert [episode.reward for episode in played(rl("late:Late"), {0: ["1."]})] == [1]


def test_a_killed_process_is_replaced_and_takes_in_the_responses_again() -> None:
    pool = EnvironmentPool(rl("worlds:Echo"))
    episodes = [Episode(number, {"answer": "4"}) for number in range(3)]
    pool.advance(episodes)
    for episode in episodes:
        episode.responses.append(Response("?", "5", (1,), True, {}, 8))
    pool.advance(episodes)
    process = episodes[0].process
    assert process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    for episode in episodes:
        episode.responses.append(Response("?", "0", (1,), True, {}, 8))
    pool.advance(episodes)

    assert [episode.failure for episode in episodes] == ["", "", ""]
    assert all(episode.reply is not None and episode.reply.reward == 2 for episode in episodes)
    pool.close()


@pytest.mark.slow
def test_episodes_behind_one_that_hangs_or_dies_go_on_in_the_next_process() -> None:
    pool = EnvironmentPool(rl("worlds:Echo", deadline_s=2.0))
    episodes = [Episode(number, {"answer": "4"}) for number in range(70)]
    for texts in ({}, {3: "7", 34: "8", 35: "9"}):
        for episode in episodes:
            text = texts.get(episode.number, "5")
            episode.responses.append(Response("?", text, (1,), True, {}, 8))
        pool.advance(episodes)
    pool.close()

    assert [episode.number for episode in episodes if episode.failure] == [3, 34, 35]
    assert "took longer" in episodes[3].failure and "died" in episodes[34].failure and "nines" in episodes[35].failure
    assert all(episode.reply is not None for episode in episodes)


@pytest.mark.slow
def test_calls_that_are_all_lost_are_not_made_for_every_episode_of_a_batch() -> None:
    first, second = ({"answer": "4"}, {"answer": "5"})
    pool = EnvironmentPool(rl("worlds:Echo", deadline_s=60.0))
    episodes = [Episode(number, first if number < 10 else second) for number in range(40)]
    for episode in episodes:
        episode.responses.append(Response("?", "8" if episode.number < 39 else "5", (1,), True, {}, 8))
    pool.advance(episodes)
    pool.close()

    failures = [episode.failure for episode in episodes]
    assert failures[:11] == ["its process died"] * 11, "those of one prompt alone don't tell on others"
    assert set(failures[11:]) == {"it wasn't tried, since no call before it was answered: its process died"}


def test_files_that_an_environment_leaves_open_cost_an_episode_and_not_all_later_ones() -> None:
    pool = EnvironmentPool(rl("worlds:Leaky"))
    failures: list[str] = []
    for _ in range(4):
        episodes = [Episode(number, {"answer": "4"}) for number in range(40)]
        pool.advance(episodes)
        failures += [episode.failure for episode in episodes if episode.failure]
        pool.end()
    pool.close()

    assert 1 <= len(failures) <= 3
    assert all("Too many open files" in failure for failure in failures)


def test_processes_stay_for_the_next_batch_and_are_not_the_workers() -> None:
    settings = rl("worlds:Pid")
    (first,) = played(settings, {0: ["1."]})

    assert text_of(first.opening) != str(os.getpid())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("worlds:Absent", r"PLG002.*nothing of that name"),
        ("calculater", r"PLG001.*did you mean 'calculator'"),
        ("no_such_world:Echo", r"PLG002.*no_such_world"),
        ("json:dumps", r"PLG002.*no class"),
        (
            "worlds:Needs",
            r"PLG002.*can't be made.*missing 1 required positional argument: 'path'.*Options",
        ),
        ("worlds:Undocumented", r"PLG002.*one of its tools has no schema.*no docstring"),
    ],
)
def test_an_environment_that_there_is_not_is_named(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EnvironmentPool(rl(name)).tools()


def test_the_trial_tells_what_happened_and_refuses_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    batch = prompts(["1=", "2="], ["3", "4"])
    (note,) = try_environment(rl("calculator"), tokenizer(), [END], None, batch)
    assert note == (
        "environment calculator was tried with the right answer to '1=': "
        "the episode was ended by it after 1 response, with a reward of 1"
    )
    with pytest.raises(ConfigError, match=r"RL032.*whose responses are the right answer.*no nines"):
        try_environment(rl("worlds:Echo"), tokenizer(), [END], None, prompts(["1=", "2="], ["0", "9"]))
    assert not caplog.messages


TEMPLATE = (
    "{% if tools %}<tools>{{ tools[0].function.name }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Texts:
    """Tokenizer whose tokens are characters, and ``<end>``, which is 0."""

    def __init__(self, template: str) -> None:
        from jinja2 import Template

        self._template = Template(template)
        self.init_kwargs: dict[str, Any] = {
            "token_rules": {"begin": [], "ends": [0], "vocab_size": None, "template_sha256": "a"}
        }

    def apply_chat_template(self, messages: Any, tools: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def decode(self, ids: list[int]) -> str:
        return shown(ids)

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        assert options == {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
        return {"input_ids": [ord(one) for one in text.replace("<end>", "\0")]}


def shown(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids)).replace("\0", "<end>")


def test_messages_of_a_chat_are_in_the_template_and_go_on_behind_the_end_of_the_response() -> None:
    renderer = Renderer(Texts(TEMPLATE), [0], Calculator.tools)

    assert shown(renderer.opening([{"role": "user", "content": "hi"}])) == (
        "<tools>calculator</tools><user>hi<end>\n<assistant>"
    )
    assert shown(renderer.following([{"role": "tool", "content": "42"}])) == "\n<tool>42<end>\n<assistant>"


def test_tools_that_an_opening_does_not_name_are_found() -> None:
    chat = [{"role": "user", "content": "hi"}]
    renderer = Renderer(Texts(TEMPLATE), [0], Calculator.tools)

    assert renderer.missing_tools(renderer.opening(chat)) == []
    assert renderer.missing_tools(Renderer(Texts(TEMPLATE), [0]).opening(chat)) == ["calculator"]
    assert Renderer(tokenizer(), [END], Calculator.tools).missing_tools([1]) == [], "without a template"


def test_a_template_that_changes_earlier_messages_is_refused() -> None:
    with pytest.raises(RenderingError, match="changes earlier messages"):
        Renderer(Texts("{{ messages[-1].content }}"), [0]).following([{"role": "user", "content": "42"}])


def step(environment: Any, text: str, ended: bool = True) -> Any:
    return environment.step(Response("?", text, (1,), ended, {}, 8))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("38+4", "42"),
        ("7*(2-3)/4", "-1.75"),
        ("0.1+0.2", "0.3"),
        ("-3*-3", "9"),
        ("1/0", "error"),
        ("2**9999", "error"),
        ("9" * 500, "error"),
        ("__import__('os')", "error"),
        ("1e300*1e300", "error"),
        ("True+1", "error"),
        ("(" * 150, "error"),
        ("", "error"),
    ],
)
def test_the_calculator_computes_arithmetic_alone(expression: str, result: str) -> None:
    assert result_of(expression) == result


def call_of(expression: str) -> str:
    """A call as chat models write it."""
    return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("38+4", ["38+4"]),
        ("7+5=", ["7+5="]),
        ("42", []),
        ("-5", []),
        ("it is 4+4", []),
        (f"so {call_of('38*4')} and {call_of('2*3')}", ["38*4", "2*3"]),
        ("<tool_call>{}</tool_call>", [""]),
    ],
)
def test_calls_of_the_calculator(text: str, expressions: list[str]) -> None:
    assert called_expressions(text) == expressions


def test_a_call_of_deep_json_has_no_expression() -> None:
    assert called_expressions('<tool_call>{"arguments": ' + "[" * 100_000 + "}</tool_call>") == [""]


def test_each_call_of_a_turn_has_its_own_result() -> None:
    messages, reward = step(Calculator(), call_of("38*4") + call_of("2*"))
    assert messages is not None and reward == 0
    assert [message["content"] for message in messages] == ["152", "error"]


def test_the_calculator_rewards_the_answer_and_no_call() -> None:
    calculator = Calculator()
    calculator.reset({"answer": "42"})

    messages, reward = step(calculator, "38+4")
    assert messages == [{"role": "tool", "name": "calculator", "content": "42"}] and reward == 0
    assert step(calculator, "it is 42") == (None, 1)
    assert step(calculator, "42", ended=False) == (None, 0)
    assert step(calculator, "41") == (None, 0) and step(calculator, "") == (None, 0)


def test_the_number_game_tells_the_way() -> None:
    game = NumberGame()

    assert game.reset({"answer": "62"}) == [{"role": "user", "content": "0-99?"}]
    assert step(game, "50") == ([{"role": "user", "content": "+"}], 0)
    assert step(game, "75") == ([{"role": "user", "content": "-"}], 0)
    assert step(game, "62") == (None, 1)
    assert step(game, "?") == (None, 0)
    with pytest.raises(ValueError, match="whole number"):
        game.reset({"answer": "1.5"})


def test_keys_of_a_turn_are_the_prompts_and_the_places_in_group_and_conversation() -> None:
    seen: list[list[int]] = []

    def respond(ids: Integers, mask: Integers, keys: Integers, sampling: Sampling) -> Responses:
        seen.extend(keys.tolist())
        rows = [Completion(tuple(ids_of("0.")), (0.0, 0.0), None)] * len(ids)
        return responses_of(torch.from_numpy(ids), torch.from_numpy(mask), rows, [END])

    settings = rl("worlds:Echo")
    rollouts = EnvironmentRollouts(settings, tokenizer(), [END], None)
    batch = prompts(["1=", "2="], ["4", "5"], epoch=3)
    records = records_of(batch.arrays["reward_data"])
    rollouts.play([ids_of("1="), ids_of("2=")], np.array(batch.keys), records, training_sampling(settings), respond)
    rollouts.close()

    assert seen == [[3, 0, 0, 0, 0], [3, 0, 0, 1, 0], [3, 0, 1, 0, 0], [3, 0, 1, 1, 0]]


def block_of(first_line: str) -> str:
    document = (Path(__file__).parents[3] / "docs" / "rl.md").read_text(encoding="utf-8")
    (block,) = (block for block in document.split("```") if block.startswith(f"\n# {first_line}"))
    return block


def test_the_environment_of_the_documentation_is_one(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(block_of("words.py"), encoding="utf-8")
    right, late, wrong = played(rl("words:Riddle"), {0: ["4."], 1: ["1.", "2.", "4."], 2: ["1.", "2.", "3."]})

    assert (right.reward, late.reward, wrong.reward) == (1, 0, 0)
    assert right.done and not late.done  # Its messages leave no room in 12 tokens.


def test_a_step_with_an_environment_trains_on_the_policys_tokens_alone() -> None:
    """A step of an island against plain torch: the loss is over the tokens of the policy's turns."""
    flags = ["--rl.environment=worlds:Steady", "--rl.episode.turns=2", '--rl.reward.functions=["environment"]']
    limits = {"generation.max_response_tokens": 24, "aggregation": "token", "group_size": 6}
    settings = job(*flags, **{**limits, "episode.turn_tokens": 9})
    ours, plain = Island(settings, tokenizer()), Island(settings, tokenizer())
    batch = prompts(["12=", "5="], ["21", "5"])
    sample = sample_of(batch)
    generated = plain._roles["actor"].generate(sample, {}).sample
    assert generated is not None
    packed = sample.update(generated)
    responses, own = unpacked(packed, torch.device("cpu")), sampled_mask(packed)
    assert 0 < float(own.sum()) < float(responses.attention_mask[:, responses.prompt_width :].sum())
    rewards = torch.tensor(packed.data["episode_rewards"]).view(2, 6)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    loss = torch.zeros(())
    for row in range(12):
        kept = responses.attention_mask[row].bool()
        logprobs = plain.model(input_ids=responses.ids[row][kept][None]).logits[0, :-1].log_softmax(-1)
        all_own = torch.cat([torch.zeros(responses.prompt_width), own[row]])[kept].bool()
        tokens = responses.ids[row][kept]
        places = all_own.nonzero().flatten()
        loss = loss - advantages[row] * logprobs[places - 1, tokens[places]].sum()
    (loss / own.sum()).backward()
    expected = {name: parameter.grad for name, parameter in plain.model.named_parameters()}

    result = ours.backward(batch)

    assert result.scored == int(own.sum())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=2e-4, rtol=1e-3)
    assert result.sums["turns"][1] == 12
    assert result.shown[0]["conversation"][0]["role"] == "assistant"
    ours.close()
    plain.close()
