"""List of the damaged slices that a run leaves out: ``quarantine.json`` in the run directory."""

from __future__ import annotations

from pathlib import Path

from hypha_ray.errors import CheckpointError
from hypha_ray.store.disk import publish, room_for, sealed, unsealed, write_file

QUARANTINE = "quarantine.json"


def quarantined(directory: Path) -> dict[int, str]:
    """Reasons of quarantined slices, by index.

    Raises:
        CheckpointError: the list is damaged.

    """
    path = directory / QUARANTINE
    try:
        slices = unsealed(path.read_bytes())["slices"]
        return {int(index): str(reason) for index, reason in slices.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, AttributeError) as error:
        fix = "remove it: what is damaged will be found again"
        raise CheckpointError("STORE014", f"{path} is damaged", str(error), fix=fix) from None


def quarantine(directory: Path, index: int, reason: str) -> None:
    """Leave a slice out for the rest of the run. Idempotent.

    Raises:
        CheckpointError: the list is damaged.
        TryAgainError: the disk is full or can't be written.

    """
    slices = {str(known): why for known, why in sorted(({index: reason} | quarantined(directory)).items())}
    path = directory / QUARANTINE
    data = sealed({"slices": slices})
    temporary = path.with_suffix(".tmp")
    with room_for(path, len(data)):
        write_file(temporary, data)
        publish(temporary, path)
