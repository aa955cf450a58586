"""Records of metrics as a scheduler makes them, for tests of where they go."""

from __future__ import annotations

from typing import Any

from tests.support.virtual_fleet import VirtualFleet, job_of, slices_of


def fleet_records() -> list[dict[str, Any]]:
    """All records of a small run of two workers, one of which is half as fast."""
    rounds = {"update_rounds": 4, "samples_between_updates": 240, "max_batch_size": 4}
    return VirtualFleet(job_of(rounds=rounds), [0.1, 0.2], slices_of()).run().records
