"""The frozen records that travel between scheduler, workers, server and store.

A *span* is a run of samples of one slice in one epoch. Every trained sample is in exactly one span of one committed
delta. Every event from a worker carries its `Source`, so late, repeated and foreign ones are recognised.
"""

from hypha_ray.types.commits import Commit, Contribution, Rejection, Saved, Verdict
from hypha_ray.types.data import (
    SLICES_PER_DATASET,
    SLICES_PER_PART,
    Arrays,
    Samples,
    SliceInfo,
    Span,
    dataset_of,
    joined,
    window,
)
from hypha_ray.types.events import (
    Alive,
    Damaged,
    Delta,
    Evaluated,
    Event,
    Failed,
    Leaving,
    Left,
    Merged,
    ModelWorkersRevived,
    Ready,
    Report,
    RolloutReport,
    RoundEvent,
    WorkerWarned,
)
from hypha_ray.types.layout import Entry, Flat, Layout
from hypha_ray.types.plans import FragmentUpdate, Plan, RoundProgress, Source, WeightsVersion
from hypha_ray.types.sums import Sums, added, means
from hypha_ray.types.tokens import TokenRules

__all__ = [
    "SLICES_PER_DATASET",
    "SLICES_PER_PART",
    "Alive",
    "Arrays",
    "Commit",
    "Contribution",
    "Damaged",
    "Delta",
    "Entry",
    "Evaluated",
    "Event",
    "Failed",
    "Flat",
    "FragmentUpdate",
    "Layout",
    "Leaving",
    "Left",
    "Merged",
    "ModelWorkersRevived",
    "Plan",
    "Ready",
    "Rejection",
    "Report",
    "RolloutReport",
    "RoundEvent",
    "RoundProgress",
    "Samples",
    "Saved",
    "SliceInfo",
    "Source",
    "Span",
    "Sums",
    "TokenRules",
    "Verdict",
    "WeightsVersion",
    "WorkerWarned",
    "added",
    "dataset_of",
    "joined",
    "means",
    "window",
]
