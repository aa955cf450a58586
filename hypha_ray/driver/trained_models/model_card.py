"""Model cards: ``README.md`` of a saved model and of its adapter, with nothing of persons, machines or folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from huggingface_hub import ModelCardData

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest
from hypha_ray.figures import METRIC
from hypha_ray.files import make_private
from hypha_ray.model.loading.hub import base_of
from hypha_ray.model.saved_model import ADAPTER
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl
from hypha_ray.texts import counted

CARD: Final = "README.md"
_FIGURES: Final = ("loss", "val_loss", "perplexity", "accuracy", "reward", "pass@1")
"""Names of figures of rounds and evaluations that a card shows."""
_PIPELINES: Final = {
    "causal-lm": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "masked-lm": "fill-mask",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "image-classification": "image-classification",
}
"""Names of tasks on a hub."""


def write_cards(folder: Path, job: Job, manifest: Manifest, directory: RunDirectory, round: int) -> None:
    """Write the card of a model that was saved after a round, and that of its adapter.

    Raises:
        OSError: the folder can't be written.

    """
    figures = _figures(directory, round)
    base = _base(job)
    for saved_folder in (folder, folder / ADAPTER):
        if saved_folder.is_dir():
            text = card(job, manifest, round, figures, base, adapter=saved_folder != folder)
            path = saved_folder / CARD
            path.write_text(text, encoding="utf-8")
            make_private(path)


def card(
    job: Job, manifest: Manifest, round: int, figures: Mapping[str, float], base: str | None, *, adapter: bool
) -> str:
    """Return the text of a card.

    Args:
        job: job file of the run.
        manifest: dataset that it was trained on.
        round: round of the weights, counted from 0.
        figures: figures after this round, by name.
        base: hub id of the model that it begins with; None: it is on no hub.
        adapter: the card is that of an adapter alone.

    """
    tags = ["hypha_ray", job.rl.algorithm or job.preference.loss or job.sync.strategy]
    if job.model.lora.rank:
        tags.append("lora")
    data = ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        license="unknown",  # A base model's licence holds for models made of it, and isn't known here.
        pipeline_tag=_PIPELINES.get(job.model.type),
        tags=tags,
    )
    sections = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {'Adapter' if adapter else 'Model'} trained on {manifest.name}\n",
        "Trained by hypha_ray. The licence of its base model and the terms of its data hold; fill in `license`.\n",
        _table("", _facts(job, manifest, round, base)),
        _table("## Settings\n\n", _settings(job)),
    ]
    if figures:
        rounded = ((name, f"{value:.6g}") for name, value in figures.items())
        sections.append(_table(f"## Figures after round {round + 1}\n\n", rounded))
    return "\n".join(sections)


def _facts(job: Job, manifest: Manifest, round: int, base: str | None) -> Iterator[tuple[str, str]]:
    is_new = job.model.factory is not None or (job.model.config and not job.model.repository)
    begins = "random weights" if is_new else "weights that are on no hub"
    yield "begins with", base or begins
    samples = format(manifest.samples("train"), ",")
    yield "dataset", f"{manifest.name}, {counted(samples, 'sample')}"
    yield "hash of the dataset", manifest.identity
    if job.rounds.counted:
        yield "rounds", f"{round + 1} of {job.rounds.update_rounds}"
    else:
        yield "rounds", str(round + 1)
    if job.rounds.epochs is not None:
        yield "epochs of the whole run", str(job.rounds.epochs)


def _settings(job: Job) -> Iterator[tuple[str, str]]:
    sync = job.sync
    rounds = job.rounds
    inner = job.inner_optimizer
    outer = job.outer_optimizer
    lora = job.model.lora
    yield "task", job.model.type
    yield "exchange", f"{sync.strategy}, {sync.codec}, {counted(job.num_workers, 'worker')}"
    yield "samples of a round", f"{rounds.samples_between_updates:,}"
    yield "largest batch", str(rounds.max_batch_size)
    yield "inner optimizer", f"{inner.name}, learning rate {inner.learning_rate:g}, {inner.schedule}"
    yield "outer optimizer", f"{outer.name}, learning rate {outer.learning_rate:g}, momentum {outer.momentum:g}"
    yield "seed", str(job.run.seed)
    if lora.rank is not None:
        yield "adapter", f"LoRA of rank {lora.rank}"
    preference = job.preference
    if preference.loss is not None:
        yield "preferences", f"{preference.loss}, beta {preference.beta:g}, reference {preference.reference}"
    rl = job.rl
    if rl.algorithm is not None:
        generation = rl.generation
        yield "reinforcement learning", f"{rl.algorithm}, {counted(rl.group_size, 'response')} to a prompt"
        yield "responses", f"up to {generation.max_response_tokens} tokens, temperature {generation.temperature:g}"


def _table(title: str, rows: Iterator[tuple[str, str]]) -> str:
    """Return a table with a title."""
    lines = [f"| {name} | {value.replace('|', ' ')} |\n" for name, value in rows]
    return f"{title}| | |\n|---|---|\n{''.join(lines)}"


def _figures(directory: RunDirectory, round: int) -> dict[str, float]:
    """Return the last figures of training and of evaluation up to a round."""
    records = read_jsonl(directory.path / METRICS, ["round", "eval"])
    figures: dict[str, float] = {}
    for record in records:
        if record.get("round", 0) > round:
            continue
        metrics = [name for name in record if name.startswith(METRIC)]
        for name in (*_FIGURES, *metrics):
            value = record.get(name)
            if isinstance(value, int | float):
                figures[name] = float(value)
    return figures


def _base(job: Job) -> str | None:
    """Return the hub id of the model that a job begins with; None if it is on no hub."""
    if not job.model.repository:
        return None
    model, _ = base_of(job.model)
    repository = str(model.repository)
    is_local = repository.startswith(("/", ".", "~")) or Path(repository).is_dir()
    return None if is_local else repository
