"""Lines of a summary about the model, the data and the rounds: what a job file and a manifest say of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.training import Dataset
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.storage import Place
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.driver.run_length import samples_in_epochs
from hypha_ray.scheduler.fleet.worker_state import batch_size, has_equal_batches
from hypha_ray.scheduler.planning.round_sizes import MOST
from hypha_ray.texts import counted
from hypha_ray.types import Layout, dataset_of

FEW_HELD_OUT = 100
"""Number of held-out samples below which a small difference of their mean loss is chance."""
MOST_READ_BYTES = 32 << 20
"""Most bytes of training samples that are read to count tokens without padding."""


def model_text(trained: Any, layout: Layout) -> str:
    """Describe a model by its class and its parameters.

    Args:
        trained: modules that are trained and exchanged, on any device.
        layout: their layout.

    """
    name = type(trained).__name__
    if hasattr(trained, "actor"):
        name = f"{type(trained.actor).__name__} as policy and as critic"
    count = layout.parameters()
    total = sum(parameter.numel() for parameter in trained.parameters())
    if count == total:
        return f"{name}, {total:,} parameters, all of them trained"
    return f"{name}, {count:,} of {total:,} parameters trained ({count / total:.2%})"


def data_text(job: Job, source: DataSource) -> str:
    """Describe a dataset: its samples, their tokens, how often the run uses them, and what is held out."""
    manifest = source.manifest
    samples = manifest.samples("train")
    parts = [f"{manifest.name}: {samples:,} {_noun(job)}"]
    if job.rl.algorithm is None:
        parts += _token_texts(source)
    if samples:
        parts.append(_epochs_text(job, manifest))
    held_out = manifest.samples("validation")
    if not held_out:
        return f"{', '.join(parts)}; none held out, so nothing is evaluated"
    text = f"{', '.join(parts)}; {held_out:,} held out"
    if held_out < FEW_HELD_OUT:
        text += ", too few to tell small differences from chance"
    return text


def rounds_text(job: Job, manifest: Manifest | None = None, done: int = 0) -> str:
    """Describe the rounds: their number, their samples, and a worker's batches.

    Args:
        job: the job file.
        manifest: its dataset; None: it has none.
        done: number of committed rounds of a run that goes on.

    """
    rounds = job.rounds.update_rounds
    samples = round_samples(job)
    if not job.rounds.counted:
        return f"as many of {samples:,} {_noun(job)} as {counted(job.rounds.epochs or 0, 'epoch')} take"
    if job.rounds.epochs is not None and manifest is not None:
        samples = min(samples, samples_in_epochs(job, manifest))
    text = f"{rounds:,} of {samples:,} {_noun(job)}"
    if job.rl.algorithm is not None and job.rl.group_size > 1:
        text += f" with {job.rl.group_size} responses each"
    if job.rounds.epochs is not None and rounds > 1:
        text += ", the last one with the rest"
    if job.rounds.max_exchange_share is not None:
        limit = f"{100 * job.rounds.max_exchange_share:g} %"
        text = f"at most {text}, and fewer, up to {MOST} times as long, if exchanges take over {limit} of the time"
    text += f": {_batches_text(job, samples)}"
    if job.rounds.warmup_rounds == 1:
        text += "; the first is one batch of each worker"
    elif job.rounds.warmup_rounds:
        text += f"; the first {job.rounds.warmup_rounds} are one batch of each worker"
    if job.rounds.patience is not None:
        text += f"; the run ends after {counted(job.rounds.patience, 'round')} without a better evaluation"
    if done:
        text += f"; {done:,} are done"
    return text


def round_samples(job: Job) -> int:
    """Samples of a round after the warm-up: those that the job asks for, in whole batches unless it gives epochs."""
    if job.rounds.epochs is not None:
        return job.rounds.samples_between_updates
    size = batch_size(job)
    batches = -(-job.rounds.samples_between_updates // size)
    return batches * size


def run_samples(job: Job, manifest: Manifest) -> int:
    """Samples of all rounds of a run."""
    if job.rounds.epochs is not None:
        return samples_in_epochs(job, manifest)
    rounds = job.rounds.update_rounds
    warmup = min(job.rounds.warmup_rounds, rounds)
    warmup_samples = warmup * job.samples(0)
    return warmup_samples + (rounds - warmup) * round_samples(job)


def epochs_by_dataset(job: Job, manifest: Manifest) -> list[float]:
    """Return how often a run uses each sample of its dataset, or of each dataset of a mixture, on average."""
    samples = run_samples(job, manifest)
    if not job.dataset.mix:
        return [samples / manifest.samples("train")]
    counts = [0] * len(job.dataset.mix)
    for info in manifest.of("train"):
        counts[dataset_of(info.index)] += info.samples
    weights = sum(share.weight for share in job.dataset.mix)
    epochs: list[float] = []
    for share, count in zip(job.dataset.mix, counts, strict=True):
        epochs.append(samples * share.weight / weights / count)
    return epochs


def tokens_of(source: DataSource) -> tuple[int, bool] | None:
    """Count the tokens to train on.

    Samples with padding are read if they are few and on this machine.

    Returns:
        Number of tokens, and whether padding is counted as well; None for data without tokens.

    """
    manifest = source.manifest
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    if "input_ids" not in tensors:
        return None
    positions = manifest.samples("train") * math.prod(tensors["input_ids"].shape)
    mask = tensors.get("attention_mask")
    if mask is None and "position_ids" not in tensors:
        return positions, False
    if mask is not None and mask.minimum == 1:
        return positions, False
    size = manifest.samples("train") * manifest.sample_bytes
    if source.places != (Place(str(source.folder)),) or size > MOST_READ_BYTES:
        return positions, True
    from hypha_ray.model.checks.positions import token_counts

    tokens = 0
    for info in manifest.of("train"):
        arrays = source.read(info)
        tokens += int(token_counts(arrays).sum())
    return tokens, False


def _token_texts(source: DataSource) -> list[str]:
    counted_tokens = tokens_of(source)
    if counted_tokens is None:
        return []
    tokens, has_padding = counted_tokens
    if has_padding:
        return [f"at most {tokens:,} tokens"]
    return [f"{tokens:,} tokens"]


def _epochs_text(job: Job, manifest: Manifest) -> str:
    """Say how often the run uses the samples."""
    epochs = epochs_by_dataset(job, manifest)
    about = "about "
    if job.sync.traits.has_barrier or job.rounds.epochs is not None:
        about = ""
    if not job.dataset.mix:
        uses = _number(epochs[0])
        noun = "epochs"
        if uses == "1":
            noun = "epoch"
        return f"{about}{uses} {noun} in all rounds"
    texts = []
    for part, number in zip(job.dataset.parts, epochs, strict=True):
        texts.append(f"{_part_name(part)} {_number(number)}")
    return f"epochs in all rounds: about {', '.join(texts)}"


def _part_name(part: Dataset) -> str:
    return part.name or Path(str(part.path)).name


def _number(value: float) -> str:
    """Write a number with two digits at least."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}"


def _noun(job: Job) -> str:
    return "samples" if job.rl.algorithm is None else "prompts"


def _batches_text(job: Job, samples: int) -> str:
    """Say which batches a worker takes in a round of so many samples, if all workers are equally fast."""
    size = min(batch_size(job), samples)
    batches = -(-samples // size)
    deltas = job.num_workers
    if not job.sync.traits.has_barrier:
        deltas = job.sync.period or job.num_workers
    least, more = divmod(batches, deltas)
    text = f"{least} batches"
    if more:
        text = f"{least} to {least + 1} batches"
    elif least == 1:
        text = "1 batch"
    text += f" of {size}"
    if job.num_workers == 1:
        return text
    text += f" by each of {job.num_workers} workers"
    if has_equal_batches(job):
        return text
    return f"about {text}"
