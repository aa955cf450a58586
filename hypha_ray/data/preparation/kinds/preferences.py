"""From preferences to a prepared dataset: two sequences a sample, whose answers are scored.

 preferences ─► chats ─► tokens ─► cut off ─┬─► held out, with their repetitions ─► validation slices
                                            └─► the rest, shuffled ───────────────► training slices

Tensors: ``input_ids``, ``attention_mask`` and ``labels``, int32 [N, 2, L], padded on the right to the longest sequence.
A label is the token itself in an answer, otherwise -100. Of two answers the chosen one is first:

    [0]  prompt, chosen answer       or of a judged answer:   prompt, answer
    [1]  prompt, rejected answer                              prompt, answer of another sample

``desirable``, int32 [N], is 1 for a judged answer that is desirable, otherwise 0. The other sample is the one before in
the order of the split; such sequences estimate the divergence in KTO (arXiv 2402.01306, §4.1), as TRL makes them.
``margins``, float32 [N], are numbers of the source. ``reference_logprobs``, float32 [N, 2], are sums over the tokens of
an answer by the model of --reference. Preferences are held in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.preparation.encoders import padding_of, require_fast, save_tokenizer, tokenizer_of
from hypha_ray.data.preparation.kinds.chats import answer_rules, encoded_chats
from hypha_ray.data.preparation.kinds.kind import Kind, no_samples
from hypha_ray.data.preparation.kinds.scored_tokens import ScoredTokens
from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.preparation.slice_writer import Report, Rows, SliceWriter, split, write_split
from hypha_ray.data.preparation.sources.chats import Chat
from hypha_ray.data.preparation.sources.preferences import PreferenceRow, preferences
from hypha_ray.data.provenance import Account, counted
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError
from hypha_ray.model.task import IGNORE_INDEX

if TYPE_CHECKING:
    from hypha_ray.data.preparation.reference import ReferenceModel

Load: TypeAlias = Callable[[Rows], Arrays]
"""Function that makes the tensors of rows."""


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
    answered = _with_margins(list(_answered(preferences(options, account), account)), options, account)
    tokenizer = tokenizer_of(options, _texts(answered, options.is_templated))
    require_fast(tokenizer, options.tokenizer)
    all_chats = list(_chats(answered))
    encoded = list(encoded_chats(tokenizer, all_chats, options, report, account))
    samples = list(_fitting(_samples(answered, encoded), options.seq_len, account))
    if not samples:
        fix = "raise --seq-len" if answered else "name another --source, or other columns"
        raise no_samples("preferences", options, account, fix)
    writer.tokens = answer_rules(tokenizer, encoded, options, account)
    padding = padding_of(tokenizer, options.tokenizer)
    splits = split([_key(sample) for sample in samples], options, account, "preferences")
    if samples[0].rejected is None:
        _require_both_judgements([samples[row] for row in splits[0]], options)
    sequences = _sequences(samples, splits, options.seq_len)
    longest = 0
    for first, second in sequences.values():
        longest = max(longest, len(first.ids), len(second.ids))

    def load(rows: Rows) -> Arrays:
        return _arrays(rows, samples, sequences, longest, padding)

    preprocessor = save_tokenizer(tokenizer, writer.folder, options.tokenizer, options.tokenizer_revision)
    loader: Load = load
    if options.reference is not None:
        from hypha_ray.data.preparation.reference import ReferenceModel  # It loads torch.

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


def _chats(answered: Sequence[PreferenceRow]) -> Iterator[Chat]:
    for preference in answered:
        yield from _sides(preference)


def _texts(answered: Sequence[PreferenceRow], templated: bool) -> Iterator[str]:
    for chat in _chats(answered):
        for message in chat.messages:
            if templated:
                yield message["role"]
            yield message["content"]


def _samples(answered: Sequence[PreferenceRow], encoded: Sequence[ScoredTokens]) -> Iterator[Sample]:
    tokens = iter(encoded)
    for preference in answered:
        answer = next(tokens)
        rejected = None if preference.rejected is None else next(tokens)
        yield Sample(answer, rejected, preference.desirable, preference.margin)


def _fitting(samples: Iterator[Sample], most: int, account: Account) -> Iterator[Sample]:
    """Samples cut off at a length; those that are left without two different answers are put into the account."""
    cut_answers = 0
    for sample in samples:
        answer = _cut(sample.answer, most)
        rejected = None if sample.rejected is None else _cut(sample.rejected, most)
        sequences = [answer] if rejected is None else [answer, rejected]
        # The first token has none before it, so that nothing can predict it.
        if not all(sequence.scored[1:].any() for sequence in sequences):
            account.leave_out("preferences", f"without an answer in the first {most} tokens, see --seq-len")
            continue
        if rejected is not None and np.array_equal(answer.ids, rejected.ids):
            account.leave_out("preferences", f"whose first {most} tokens are the same, see --seq-len")
            continue
        originals = [sample.answer] if sample.rejected is None else [sample.answer, sample.rejected]
        for original in originals:
            excess = max(0, len(original.ids) - most)
            account.leave_out("tokens", f"behind the first {most} of an answer, see --seq-len", excess)
            cut_answers += excess > 0
        yield sample._replace(answer=answer, rejected=rejected)
    if cut_answers:
        account.note(f"{counted(cut_answers, 'answers')} cut off at --seq-len {most}")


def _cut(tokens: ScoredTokens, most: int) -> ScoredTokens:
    return ScoredTokens(tokens.ids[:most], tokens.scored[:most])


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
    samples: Sequence[Sample], splits: tuple[Rows, Rows], most: int
) -> dict[int, tuple[ScoredTokens, ScoredTokens]]:
    """Both sequences of each row; the second one has the rejected answer, or that of the row before in the split."""
    sequences = {}
    for rows in splits:
        for row, before in zip(rows.tolist(), np.roll(rows, 1).tolist(), strict=True):
            answer = samples[row].answer
            rejected = samples[row].rejected
            if rejected is None:
                rejected = _mismatched(answer, samples[before].answer, most)
            sequences[row] = answer, rejected
    return sequences


def _mismatched(prompted: ScoredTokens, answered: ScoredTokens, most: int) -> ScoredTokens:
    """The prompt of a sequence with the answer of another one."""
    prompt_length = int(prompted.scored.argmax())
    answer_start = int(answered.scored.argmax())
    ids = np.concatenate([prompted.ids[:prompt_length], answered.ids[answer_start:]])
    scored = np.concatenate([prompted.scored[:prompt_length], answered.scored[answer_start:]])
    return _cut(ScoredTokens(ids, scored), most)


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
