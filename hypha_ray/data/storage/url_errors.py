"""Translation of file systems' errors: each kind has its own, and users need one remedy for each cause."""

from __future__ import annotations

import errno
import socket

from hypha_ray.data.slices import UNREADABLE
from hypha_ray.errors import AuthenticationError, ConfigError, DataError, ExpiredError, HubError, HyphaError, line_of
from hypha_ray.redaction import redacted
from hypha_ray.store.remote.s3_errors import Cause, chain
from hypha_ray.store.remote.url_refusals import refusal_of_url

_AGAIN = (408, 425, 429)
"""Statuses of HTTP below 500 after which another try may succeed."""
_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
}
"""Classes of errors of botocore and google.auth."""


class MissingError(DataError):
    """There is nothing at a place."""


def explain(error: Exception, url: str, what: str, cause: Cause | None = None) -> HyphaError:
    """The error to raise in place of one of a file system; its causes are looked at too.

    Args:
        error: error that the file system raised.
        url: folder of the dataset.
        what: name of the file in it.
        cause: cause that an object store has told.

    """
    place = redacted(f"{url}/{what}")
    got = line_of(error, url)
    links = list(chain(error))
    if cause is not None:
        return _of_store(cause, place, got)
    if (refusal := refusal_of_url(error, url)) is not None:
        return refusal
    return _of_answer(links, place, got)


def _of_answer(links: list[BaseException], place: str, got: str) -> HyphaError:
    """Error of a place that has answered, or that can't be reached."""
    status = status_of(links)
    if _is_refused(links, status):
        fix = "give this machine access, such as AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS or HF_TOKEN"
        return AuthenticationError("AUTH004", f"access to {place} is refused", got, fix=fix)
    if isinstance(links[0], FileNotFoundError) or status in (404, 410):
        return MissingError(UNREADABLE, f"there is nothing at {place}", got, fix="check the URL")
    if any(isinstance(link, socket.gaierror) and link.errno == socket.EAI_NONAME for link in links):
        return MissingError(UNREADABLE, f"the host of {place} doesn't exist", got, fix="check the URL and the network")
    if _may_pass(links, status):
        return HubError("DATA065", f"{place} can't be reached now", got, fix="try again; the run goes on from there")
    return DataError(UNREADABLE, f"{place} can't be read", got, fix="check the URL, and the settings for its kind")


def _of_store(cause: Cause, place: str, got: str) -> HyphaError:
    """Error of an object store that has told its cause."""
    what = f"{place}: {cause.what}"
    match cause.kind:
        case "expired":
            return ExpiredError("AUTH004", what, got, fix=f"{cause.fix}; the same command goes on from there")
        case "credentials":
            return AuthenticationError("AUTH004", what, got, fix=cause.fix)
        case "settings":
            return ConfigError("DATA066", what, got, fix=cause.fix)


def _is_refused(links: list[BaseException], status: int | None) -> bool:
    """Whether access needs credentials, or others."""
    names = {type(link).__name__ for link in links}
    return status in (401, 403, 407) or isinstance(links[0], PermissionError) or bool(names & _CREDENTIALS)


def _may_pass(links: list[BaseException], status: int | None) -> bool:
    """Whether another try may succeed."""
    if status is not None:
        return (status >= 500 and status != 501) or status in _AGAIN
    transient = (ConnectionError, TimeoutError, socket.gaierror)
    numbers = (errno.EBUSY, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
    names = ("ConnectionError", "Timeout", "TimeoutError", "ConnectorError", "Disconnected", "PayloadError")
    return any(
        isinstance(link, transient) or getattr(link, "errno", None) in numbers or type(link).__name__.endswith(names)
        for link in links
    )


def status_of(links: list[BaseException]) -> int | None:
    """Status of HTTP in an error and its causes."""
    return next((status for link in links if (status := _status(link)) is not None), None)


def _status(error: BaseException) -> int | None:
    """Status of HTTP in an error of aiohttp, of huggingface_hub or of botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(error, "status", None) or getattr(response, "status_code", None)
    return found if isinstance(found, int) else None
