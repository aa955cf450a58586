"""Translation of the `datasets` library's errors into errors with a remedy."""

from __future__ import annotations

from collections.abc import Iterator

from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import constants, errors
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # From httpx or httpx2, by its version.

from hypha_ray.errors import AuthenticationError, DataError, HubError, HyphaError

_MISSING = (
    DatasetNotFoundError,
    errors.RepositoryNotFoundError,
    errors.RevisionNotFoundError,
    errors.HFValidationError,
)
_UNREACHABLE = (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError, HTTPError)


def explain(error: Exception, name: str, hint: str) -> HyphaError:
    """The error to raise in place of an error of reading a dataset, by that error and its causes.

    Args:
        error: error that the library raised.
        name: name of a dataset on the hub, or a local folder.
        hint: remedy if there is no such dataset.

    """
    chain = list(_chain(error))
    text = " ".join(str(error).split())[:300]
    if "gated" in text or any(_status(link) in (401, 403) for link in chain):
        fix = "check the name; if it is private or gated, ask for access and set HF_TOKEN"
        return AuthenticationError("HUB002", f"the hub refuses access to dataset {name!r}", text, fix=fix)
    if any(isinstance(link, _MISSING) for link in chain):
        return DataError("HUB001", f"there is no dataset {name!r}", text, fix=hint)
    if any(isinstance(link, _UNREACHABLE) for link in chain):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else text
        problem = f"dataset {name!r} is neither a path nor in the cache, and can't be fetched: offline ({why})"
        fix = f"check the network and HF_HUB_OFFLINE, or fill the cache {constants.HF_HOME}"
        return HubError("HUB003", problem, fix=fix)
    return DataError("HUB004", f"dataset {name!r} can't be read", text, fix="check --subset, --split and --revision")


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
