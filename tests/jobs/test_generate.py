"""`jobs/generate.py`: what it prints is what transformers generates by itself."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BartConfig, BartForConditionalGeneration, ByT5Tokenizer

from hypha_ray.config.schema import Model
from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.build import build_model
from hypha_ray.model.writer import Writer
from tests.support.job_scripts import Done, Jobs, said

MODEL = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 64,
    "vocab_size": 384,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TURNS = "{% for turn in messages %}{{ turn.role[0] }}:{{ turn.content }};{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture
def generate(run_job: Jobs) -> Callable[..., Done]:
    return partial(run_job, script="generate")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that has learned a sentence by heart; with a tokenizer, and with one for chats."""
    network, tokenizer = build_model(Model(config=MODEL), seed=0), ByT5Tokenizer()
    ids = torch.tensor([tokenizer("one two three four five six seven").input_ids])
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        network(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    found = {}
    for name, template in (("plain", None), ("chat", TEMPLATE)):
        found[name] = tmp_path_factory.mktemp(name)
        tokenizer.chat_template = template
        network.save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def expected(folder: Path, text: str, tokens: int) -> str:
    """Answer by transformers alone, with the most probable token each time."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = ByT5Tokenizer()
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    output = network.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_prompt_is_gone_on_from_up_to_the_end_that_was_learned(generate: Any, folders: dict[str, Path]) -> None:
    done = generate("--model", folders["plain"], "--prompt", "one two", "--temperature", "0", "--max-new-tokens", "50")
    assert (done.returncode, done.stdout, said(done.stderr)) == (0, " three four five six seven\n", "")


def test_chat_is_put_in_its_template_unless_it_is_to_be_raw(generate: Any, folders: dict[str, Path]) -> None:
    flags = ["--model", folders["chat"], "--prompt", "one", "--temperature", "0", "--max-new-tokens", "9"]
    assert generate(*flags).stdout == expected(folders["chat"], "u:one;a:", 9) + "\n"
    told = generate(*flags, "--system", "be brief")
    assert told.stdout == expected(folders["chat"], "s:be brief;u:one;a:", 9) + "\n"
    assert generate(*flags, "--raw").stdout == expected(folders["chat"], "one", 9) + "\n"


def test_prompt_of_a_model_that_was_trained_without_its_template_is_gone_on_from(
    generate: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["chat"], tmp_path / "model")
    file = folder / "tokenizer_config.json"
    rules = {"begin": [], "ends": [1], "vocab_size": 384, "template_sha256": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"token_rules": rules}))
    flags = ["--model", folder, "--prompt", "one", "--temperature", "0", "--max-new-tokens", "9"]
    done = generate(*flags)
    assert done.stdout == expected(folder, "one", 9) + "\n"
    assert said(done.stderr).startswith("note: the model was trained on texts without its chat template")
    assert generate(*flags, "--raw", "false").stdout == expected(folder, "u:one;a:", 9) + "\n"
    refused = generate(*flags, "--system", "be brief")
    assert refused.returncode == 2 and "add --raw false" in refused.stderr
    for known in ({"template_sha256": "0" * 64}, {"vocab_size": None}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"token_rules": rules | known}))
        assert Writer(folder).chats, "trained with the template, or on data of an earlier release"


def test_system_message_of_the_preparation_is_used_unless_another_is_given(
    generate: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["chat"], tmp_path / "model")
    file = folder / "tokenizer_config.json"
    rules = {"begin": [], "ends": [1], "vocab_size": 384, "template_sha256": "0" * 64, "system": "be brief"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"token_rules": rules}))
    done = generate("--model", folder, "--prompt", "one", "--temperature", "0", "--max-new-tokens", "9")
    assert done.stdout == expected(folder, "s:be brief;u:one;a:", 9) + "\n"
    assert said(done.stderr) == "note: the system message is that of the preparation, 'be brief'; see --system\n"
    for system, text in (("", "u:one;a:"), ("be long", "s:be long;u:one;a:")):
        answer = Writer(folder, system=system).write("one", max_new_tokens=9, temperature=0.0)
        assert answer == expected(folder, text, 9)


def test_conversation_that_the_template_refuses_is_one_error(
    generate: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["chat"], tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    done = generate("--model", folder, "--prompt", "one", "--system", "be brief")
    assert (done.returncode, done.stdout) == (2, "")
    assert said(done.stderr) == (
        "error[GEN005]: the model's chat template refuses the conversation — got TemplateError: System role not "
        "supported. Fix: leave --system out, or add --raw to go on from the text itself\n"
    )


def test_conversation_goes_on_with_what_was_said(folders: dict[str, Path]) -> None:
    writer = Writer(folders["chat"])
    settings = {"max_new_tokens": 5, "temperature": 0.0, "top_p": 1.0}
    first = writer.write("one", **settings)
    assert writer.write("two", **settings) == expected(folders["chat"], f"u:one;a:{first};u:two;a:", 5)
    writer.forget()
    assert writer.write("two", **settings) == expected(folders["chat"], "u:two;a:", 5)


def test_settings_of_sampling_are_those_saved_with_the_model_unless_they_are_given(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["plain"], tmp_path / "model")
    file = folder / "generation_config.json"
    plain = json.loads(file.read_text())
    limit = {"max_new_tokens": 20}
    greedy = Writer(folder).write("six", temperature=0.0, **limit)
    hot = Writer(folder).write("six", temperature=9.0, **limit)
    assert Writer(folder).write("six", temperature=9.0, top_k=1, **limit) == greedy != hot

    file.write_text(json.dumps(plain | {"do_sample": True, "temperature": 9.0, "top_k": 1}))
    assert Writer(folder).write("six", **limit) == greedy
    assert Writer(folder).write("six", top_k=384, **limit) == hot
    file.write_text(json.dumps(plain | {"do_sample": True, "temperature": 9.0, "top_p": 1e-6}))
    assert Writer(folder).write("six", **limit) == greedy != Writer(folder).write("six", top_p=1.0, **limit)
    file.write_text(json.dumps(plain | {"repetition_penalty": 50.0}))
    penalized = Writer(folder).write("six", temperature=0.0, **limit)
    assert penalized == expected(folder, "six", 20) != greedy


@pytest.mark.parametrize(("system", "prompt"), [(None, "a\udcff"), ("be \udcff", "a")])
def test_bytes_that_are_no_utf8_are_refused(folders: dict[str, Path], system: str | None, prompt: str) -> None:
    writer = Writer(folders["chat"], system=system)
    with pytest.raises(DataError, match=r"GEN004.*isn't UTF-8"):
        writer.write(prompt, max_new_tokens=1)


def test_choices_depend_on_the_seed(folders: dict[str, Path]) -> None:
    settings = {"max_new_tokens": 20, "temperature": 2.0, "top_p": 0.9}
    one, same, other = (Writer(folders["plain"], seed=seed).write("six", **settings) for seed in (3, 3, 4))
    assert one == same != other


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--prompt", "x", "--system", "s"], "error[GEN001]: only a chat has a system message"),
        (["--prompt", ""], "error[GEN003]: the prompt is empty"),
        (["--prompt", "x" * 64], "error[GEN003]: the conversation is too long for the model — got 64 tokens"),
        (["--prompt", "x", "--temperature", "1e-40"], "error[CFG003]: --temperature is out of range"),
        (["--prompt", "x", "--top-k", "0"], "error[CFG003]: --top-k is out of range — got 0, allowed 1 or more"),
        (["--prompt", "x", "--round", "1"], "error[CFG011]: --round and the folder of a model exclude each other"),
    ],
)
def test_what_no_text_can_come_of_is_refused(
    generate: Any, folders: dict[str, Path], arguments: list[str], error: str
) -> None:
    done = generate("--model", folders["plain"], *arguments)
    assert (done.returncode, done.stdout) == (2, "") and said(done.stderr).startswith(error)


def test_text_that_is_longer_than_what_the_model_was_made_for_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rotary positions have no end, but the model has learned none behind its last one."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 384, "max_position_embeddings": 12, "eos_token_id": 383, **sizes}
    build_model(Model(config=config), seed=0).save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    writer = Writer(tmp_path)
    writer.write("abcd", max_new_tokens=8, temperature=0)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        writer.write("abcd", max_new_tokens=9, temperature=0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: the text has 13 tokens, and the model was made for 12: ")


def test_translation_ends_where_the_decoders_positions_do(tmp_path: Path) -> None:
    """A source has the encoder's positions, an answer those of the decoder; beams of the saved model aren't used."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 12}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    torch.manual_seed(0)
    network: Any = BartForConditionalGeneration(BartConfig(vocab_size=384, bos_token_id=2, **sizes, **heads, **tokens))
    network.final_logits_bias[:, 1] = -100.0  # So that only positions end an answer.
    network.generation_config.num_beams = 2
    network.eval().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = {"max_new_tokens": 50, "temperature": 0.0, "top_p": 1.0}
    ids = torch.tensor([[ord("x") + 3] * 11 + [1]])
    output = network.generate(ids, max_new_tokens=12, do_sample=False, num_beams=1)
    found = byte_tokenizer().decode(output[0], skip_special_tokens=True)
    writer = Writer(tmp_path)
    assert writer.write("x" * 11, **settings) == found
    with pytest.raises(ConfigError, match=r"GEN003.*13 tokens, allowed 12"):
        writer.write("x" * 12, **settings)


def test_model_that_writes_nothing_is_refused(generate: Any, tmp_path: Path) -> None:
    config = {"model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    build_model(Model(config=config | {"intermediate_size": 8}, type="masked-lm"), seed=0).save_pretrained(
        tmp_path / "m"
    )
    done = generate("--model", tmp_path / "m", "--prompt", "x")
    assert done.returncode == 2 and said(done.stderr).startswith("error[GEN002]: this model generates no text")


@pytest.mark.parametrize("content", [b"one\ntwo", b"\xef\xbb\xbfone\r\n\r\ntwo\r\n"])
def test_prompts_of_a_file_are_its_lines_whatever_system_has_written_it(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    assert prompts_of(content, monkeypatch) == ["one", "two"]


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_prompts_in_another_encoding_are_refused_with_the_way_to_convert_them(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    with pytest.raises(DataError, match=r"GEN004.*standard input isn't UTF-8.*iconv"):
        prompts_of("café\n".encode(encoding), monkeypatch)


def prompts_of(content: bytes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts of a file with that content."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    script = runpy.run_path("jobs/generate.py")
    return list(script["prompts"](SimpleNamespace(prompt=None), SimpleNamespace(forget=list)))


def test_model_that_is_not_there_is_told_as_a_model_and_not_as_a_run_to_resume(generate: Any) -> None:
    done = generate("--model", "gpt2", "--prompt", "x")
    assert done.returncode == 5 and "Fix: give the folder of a model, or the name or folder of a run" in done.stderr
