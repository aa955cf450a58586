"""From preferences to a prepared dataset: two sequences a sample, whose answers are scored.

 preferences ─► chats ─► tokens ─► cut off ─┬─► held out, with their repetitions ─► validation slices
                                            └─► the rest, shuffled ───────────────► training slices

Tensors: ``input_ids``, ``attention_mask`` and ``labels``, int32 [N, 2, L], padded on the right to the longest sequence.
A label is the token itself in an answer, otherwise -100. The chosen answer comes first:

    [0]  prompt, chosen answer       or of a judged answer:   prompt, answer
    [1]  prompt, rejected answer                              prompt, answer of another sample

``desirable``, int32 [N], is 1 for a judged answer that is desirable, otherwise 0. The other sample is the one before in
the order of the split; such sequences estimate the divergence in KTO (arXiv 2402.01306, §4.1), as TRL makes them.
``margins``, float32 [N], are numbers of the source. ``reference_logprobs``, float32 [N, 2], are sums over the tokens of
an answer by the model of --reference. Preferences are held in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.encoders import dataset_tokenizer
from hypha_ray.data.kinds.chats import answer_rules, encoded_chats
from hypha_ray.data.kinds.kind import Kind, Report, Rows, SliceWriter, no_samples, split, write_split
from hypha_ray.data.kinds.scored_tokens import ScoredTokens
from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.mixture import same_tokens
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, amount_text
from hypha_ray.data.slices import Arrays
from hypha_ray.data.sources.chats import Chat
from hypha_ray.data.sources.judged import PreferenceRow, preferences
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.task import IGNORE_INDEX

Load: TypeAlias = Callable[[Rows], Arrays]
"""Function that makes the tensors of rows."""
_TOKENS_AT_ONCE = 1 << 14
"""Most tokens that are computed at once, of two sequences at least."""


class Sample(NamedTuple):
    """Tokens of a preference."""

    answer: ScoredTokens
    rejected: ScoredTokens | None
    """Tokens with the rejected answer; None if the answer was judged."""
    desirable: bool
    margin: float | None


def write_preferences(
    options: PrepareOptions, writer: SliceWriter, report: Report, account: Account
) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: there are no preferences, or the template can't be used.
        HyphaError: source, tokenizer or reference can't be had.

    """
    preference_rows = _with_margins(list(_answered(preferences(options, account), account)), options, account)
    tokenizer = dataset_tokenizer(options, _texts(preference_rows, options.is_templated))
    tokenizer.require_fast()
    all_chats = list(_chats(preference_rows))
    encoded = list(encoded_chats(tokenizer, all_chats, options, report, account))
    samples = list(_fitting(_samples(preference_rows, encoded), options.seq_len, account))
    if not samples:
        fix = "raise --seq-len" if preference_rows else "name another --source, or other columns"
        raise no_samples("preferences", options, account, fix)
    writer.tokens = answer_rules(tokenizer, encoded, options, account)
    splits = split([_key(sample) for sample in samples], options, account, "preferences")
    if samples[0].rejected is None:
        _require_both_judgements([samples[row] for row in splits[0]], options)
    sequences = _sequences(samples, splits, options.seq_len)
    longest = 0
    for first, second in sequences.values():
        longest = max(longest, len(first.ids), len(second.ids))

    def load(rows: Rows) -> Arrays:
        return _arrays(rows, samples, sequences, longest, tokenizer.padding)

    preprocessor = tokenizer.save(writer.folder)
    loader: Load = load
    if options.reference is not None:
        folder = writer.folder / str(preprocessor.folder)
        reference = ReferenceModel(options.reference, options.reference_revision, folder)
        sha256 = reference.hashes["reference_sha256"]
        account.note(f"reference log-probabilities are by {options.reference}, sha256 {sha256[:12]}")
        writer.hashes.update(reference.hashes)
        loader = _with_reference(load, reference, report)
    write_split(splits, loader, options.samples_per_slice, writer)
    return preprocessor


def _with_reference(load: Load, reference: ReferenceModel, report: Report) -> Load:
    """A function that loads rows with the log-probabilities of a reference."""

    def load_scored(rows: Rows) -> Arrays:
        arrays = load(rows)
        report("reference log-probabilities", 2 * len(rows))
        return {**arrays, "reference_logprobs": reference.logprobs(arrays)}

    return load_scored


def _answered(rows: Iterator[PreferenceRow], account: Account) -> Iterator[PreferenceRow]:
    """Preferences whose answers are of the assistant; the others are put into the account."""
    for preference in rows:
        if all(map(_has_answer, _sides(preference))):
            yield preference
        else:
            account.leave_out("rows", "whose answer has no message of the assistant that is scored")


def _with_margins(rows: list[PreferenceRow], options: PrepareOptions, account: Account) -> list[PreferenceRow]:
    """Preferences that have a margin, if any has one; the others are put into the account.

    Raises:
        DataError: DATA032, no row has the margin that was asked for.

    """
    with_margin = [preference for preference in rows if preference.margin is not None]
    if rows and not with_margin and options.margin_column is not None:
        problem = f"no row of {options.source} has a number in column {options.margin_column!r}"
        raise DataError("DATA032", problem, fix="name one with --margin-column, or leave that out")
    if not with_margin:
        return rows
    account.leave_out("rows", "without a margin, which others have", len(rows) - len(with_margin))
    return with_margin


def _has_answer(chat: Chat) -> bool:
    return any(message["role"] == "assistant" and message.get("weight") != 0 for message in chat.messages)


def _sides(preference: PreferenceRow) -> list[Chat]:
    if preference.rejected is None:
        return [preference.answer]
    return [preference.answer, preference.rejected]


def _chats(preference_rows: Sequence[PreferenceRow]) -> Iterator[Chat]:
    for preference in preference_rows:
        yield from _sides(preference)


def _texts(preference_rows: Sequence[PreferenceRow], templated: bool) -> Iterator[str]:
    for chat in _chats(preference_rows):
        for message in chat.messages:
            if templated:
                yield message["role"]
            yield message["content"]


def _samples(preference_rows: Sequence[PreferenceRow], encoded: Sequence[ScoredTokens]) -> Iterator[Sample]:
    tokens = iter(encoded)
    for preference in preference_rows:
        answer = next(tokens)
        rejected = None if preference.rejected is None else next(tokens)
        yield Sample(answer, rejected, preference.desirable, preference.margin)


def _fitting(samples: Iterator[Sample], most_tokens: int, account: Account) -> Iterator[Sample]:
    """Samples cut off at a length; those that are left without two different answers are put into the account."""
    cut_answers = 0
    for sample in samples:
        answer = _cut(sample.answer, most_tokens)
        rejected = None if sample.rejected is None else _cut(sample.rejected, most_tokens)
        sequences = [answer] if rejected is None else [answer, rejected]
        # The first token has none before it, so that nothing can predict it.
        if not all(sequence.scored[1:].any() for sequence in sequences):
            account.leave_out("preferences", f"without an answer in the first {most_tokens} tokens, see --seq-len")
            continue
        if rejected is not None and np.array_equal(answer.ids, rejected.ids):
            account.leave_out("preferences", f"whose first {most_tokens} tokens are the same, see --seq-len")
            continue
        originals = [sample.answer] if sample.rejected is None else [sample.answer, sample.rejected]
        for original in originals:
            excess_tokens = max(0, len(original.ids) - most_tokens)
            account.leave_out("tokens", f"behind the first {most_tokens} of an answer, see --seq-len", excess_tokens)
            cut_answers += excess_tokens > 0
        yield sample._replace(answer=answer, rejected=rejected)
    if cut_answers:
        account.note(f"{amount_text(cut_answers, 'answers')} cut off at --seq-len {most_tokens}")


def _cut(tokens: ScoredTokens, most_tokens: int) -> ScoredTokens:
    return ScoredTokens(tokens.ids[:most_tokens], tokens.scored[:most_tokens])


def _require_both_judgements(samples: Sequence[Sample], options: PrepareOptions) -> None:
    """Refuse training samples whose answers are all desirable, or all undesirable.

    Raises:
        DataError: DATA067.

    """
    judgements = {sample.desirable for sample in samples}
    if len(judgements) == 1:
        got = "desirable alone" if judgements == {True} else "undesirable alone"
        problem = f"the answers of the training samples in {options.source} are all judged alike"
        fix = "give some of both, or train on answers that are all good as on chats: --completion-column"
        raise DataError("DATA067", problem, got, "desirable and undesirable ones", fix)


def _key(sample: Sample) -> bytes:
    rejected = b"" if sample.rejected is None else sample.rejected.ids.tobytes()
    return b"|".join([sample.answer.ids.tobytes(), rejected, str((sample.desirable, sample.margin)).encode()])


def _sequences(
    samples: Sequence[Sample], splits: tuple[Rows, Rows], most_tokens: int
) -> dict[int, tuple[ScoredTokens, ScoredTokens]]:
    """Both sequences of each row; the second one has the rejected answer, or that of the row before in the split."""
    sequences = {}
    for rows in splits:
        for row, previous_row in zip(rows.tolist(), np.roll(rows, 1).tolist(), strict=True):
            answer = samples[row].answer
            rejected = samples[row].rejected
            if rejected is None:
                rejected = _mismatched(answer, samples[previous_row].answer, most_tokens)
            sequences[row] = answer, rejected
    return sequences


def _mismatched(prompted: ScoredTokens, answered: ScoredTokens, longest: int) -> ScoredTokens:
    """The prompt of a sequence with the answer of another one."""
    prompt_length = int(prompted.scored.argmax())
    answer_start = int(answered.scored.argmax())
    ids = np.concatenate([prompted.ids[:prompt_length], answered.ids[answer_start:]])
    scored = np.concatenate([prompted.scored[:prompt_length], answered.scored[answer_start:]])
    return _cut(ScoredTokens(ids, scored), longest)


def _arrays(
    rows: Rows,
    samples: Sequence[Sample],
    sequences: Mapping[int, tuple[ScoredTokens, ScoredTokens]],
    length: int,
    padding: int,
) -> Arrays:
    """Tensors of some rows."""
    tokens = np.full((len(rows), 2, length), padding, np.int32)
    mask = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORE_INDEX)
    desirable = np.zeros(len(rows), np.int32)
    margins = np.zeros(len(rows), np.float32)
    for index, row in enumerate(rows.tolist()):
        desirable[index] = samples[row].desirable
        margins[index] = samples[row].margin or 0.0
        for side, (ids, scored) in enumerate(sequences[row]):
            tokens[index, side, : len(ids)] = ids
            mask[index, side, : len(ids)] = 1
            labels[index, side, : len(ids)] = np.where(scored, ids, IGNORE_INDEX)
    arrays: Arrays = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if samples[0].rejected is None:
        arrays["desirable"] = desirable
    if samples[0].margin is not None:
        arrays["margins"] = margins
    return arrays


KIND: Final = Kind(write_preferences, "preferences", "those of the preferences are")


class ReferenceModel:
    """Language model whose log-probabilities are stored beside preferences.

    Args:
        name: Hugging Face name or local folder.
        revision: its revision on the hub; None: the default branch.
        tokenizer: folder of the tokenizer of the preferences.

    Raises:
        HyphaError: the model can't be had, is no causal language model, or has another tokenizer.

    """

    def __init__(self, name: str, revision: str | None, tokenizer: Path) -> None:
        from hypha_ray.model.environment import device_of  # These load torch.
        from hypha_ray.model.saved_model import open_saved
        from hypha_ray.model.sources import fetch, folder_hash, snapshot_commit

        folder = fetch(name, revision, token=None, needs_weights=True)
        if not same_tokens(folder, tokenizer):
            raise _foreign_tokens(name, "another tokenizer", f"that of {name}")
        self.hashes = {"reference_sha256": folder_hash(folder)}
        """Hash of the model's files, and the commit of a repository of the hub, by their names in manifests."""
        commit = snapshot_commit(folder)
        if commit is not None:
            self.hashes["reference_commit"] = commit
        network, self._task = open_saved(folder)
        if self._task.name != "causal-lm":
            fix = "name a language model"
            raise ConfigError("PREP015", f"--reference {name} can't score answers", self._task.name, "causal-lm", fix)
        self._name = name
        self._device = device_of("auto")
        self._network = network.to(self._device).eval()

    def logprobs(self, arrays: Arrays) -> npt.NDArray[np.float32]:
        """Return the sums of the log-probabilities of answers, float32 [N, 2].

        Args:
            arrays: ``input_ids``, ``attention_mask`` and ``labels``, each [N, 2, L].

        Raises:
            DataError: DATA024, the sequences are too long for the model; DATA023, it lacks some of their tokens.

        """
        from hypha_ray.model.checks import require_positions

        ids = arrays["input_ids"]
        require_positions(self._network, self._task, {"input_ids": ids.shape[1:]}, "the preferences")
        rows = self._network.get_input_embeddings().weight.shape[0]
        if int(ids.max()) >= rows:
            raise _foreign_tokens(self._name, f"token {ids.max()}", f"0 … {rows - 1}")
        rows_at_once = max(1, _TOKENS_AT_ONCE // (2 * ids.shape[-1]))
        parts = [self._part(arrays, slice(start, start + rows_at_once)) for start in range(0, len(ids), rows_at_once)]
        return np.concatenate(parts)

    def _part(self, arrays: Arrays, rows: slice) -> Any:
        import torch

        from hypha_ray.model.preferences.losses import score_sequences

        inputs = {}
        for name in ("input_ids", "attention_mask", "labels"):
            inputs[name] = torch.from_numpy(np.asarray(arrays[name][rows], np.int64)).to(self._device)
        with torch.inference_mode():
            return score_sequences(self._task, self._network, inputs).logprobs.float().cpu().numpy()


def _foreign_tokens(name: str, got: str, allowed: str) -> DataError:
    problem = f"--reference {name} has other tokens than the preferences"
    return DataError("DATA023", problem, got, allowed, f"prepare them with --tokenizer {name}")
