"""Length of a run that `rounds.epochs` gives: its samples, and the rounds that they take."""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config.schema import Job


def rounds_for(job: Job, samples: int, first: int = 0) -> int:
    """Number of rounds that take so many samples from round `first` on; the last one may be shorter."""
    rounds = 0
    while samples > 0 and first + rounds < job.rounds.warmup_rounds:
        samples -= job.samples(first + rounds)
        rounds += 1
    return rounds + max(0, -(-samples // job.rounds.samples_between_updates))


def largest(sizes: Sequence[int]) -> int:
    """Number of the dataset with the most samples, whose epochs count; the first of equal ones."""
    return sizes.index(max(sizes))


def beside_largest(sizes: Sequence[int], weights: Sequence[float], epochs: int) -> int:
    """Samples of a mixture's other datasets while its largest one has so many epochs.

    Args:
        sizes: train samples of each dataset.
        weights: weight of each dataset; they need not add up to 1.
        epochs: uses of each sample of the largest dataset.

    """
    number = largest(sizes)
    share = weights[number] / sum(weights)
    largest_samples = epochs * sizes[number]
    return max(0, round(largest_samples / share) - largest_samples)
