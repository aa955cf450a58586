"""Errors of other machines' file systems: causes and remedies of S3's codes, times to wait, and refused URLs.

The answer to a HEAD has no body, so it has no code of S3. The request is then repeated as a GET.
"""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeAlias

from hypha_ray.config.value_types import is_malformed, malformed
from hypha_ray.errors import AuthenticationError, ConfigError, ExpiredError, HyphaError, line_of

Kind: TypeAlias = Literal["expired", "credentials", "settings"]

_ACCESS = "give this machine access, such as AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS or HF_TOKEN"
"""Remedy of a refusal without a cause of its own."""
_RENEW = "renew them on all machines, such as by `aws sso login` or in ~/.aws/credentials"
_KEYS = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and that AWS_ENDPOINT_URL is their store"
_REGION = "set AWS_DEFAULT_REGION to the region of the bucket, or AWS_ENDPOINT_URL to its endpoint"
_CHECKSUMS = "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required on all machines, which sends them only where needed"
_REFUSES = ("NotImplemented", "InvalidRequest", "InvalidArgument", "501")
"""Codes of stores that refuse headers of checksums, among other things."""
_SIGNS = ("checksum", "content-md5", "trailer", "aws-chunked", "functionality that is not implemented")
_WITHOUT_BODY = ("301", "302", "307", "400", "403")
"""Codes of an answer without a body."""
_AGAIN = (408, 425, 429)
"""Statuses of HTTP below 500 after which another try may succeed."""
_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
}
"""Classes of errors of botocore and google.auth."""
KINDS = "s3, gs, http, https, hf or file"
"""Kinds of URLs that are documented; any other one that fsspec knows works, too."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extra of hypha_ray that has the package for a kind of URL."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a refusal by an object store: the problem, and its remedy."""

    kind: Kind
    problem: str
    fix: str


_EXPIRED = Cause("expired", "the credentials have expired", _RENEW)
_CLOCK = Cause("credentials", "this machine's clock differs too much from the store's", "set this machine's clock")
_UNKNOWN = Cause("credentials", "the store doesn't know the access key", _KEYS)
_SIGNATURE = Cause("credentials", "the secret key doesn't belong to the access key", _KEYS)
_ELSEWHERE = Cause("settings", "the bucket is in another region, or at another endpoint", _REGION)
_OLDER = Cause("settings", "the store refuses checksums of newer clients", _CHECKSUMS)

CAUSES = {
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "InvalidToken": Cause("credentials", "the session token isn't valid", _KEYS),
    "InvalidClientTokenId": _UNKNOWN,
    "InvalidAccessKeyId": _UNKNOWN,
    "SignatureDoesNotMatch": _SIGNATURE,
    "RequestTimeTooSkewed": _CLOCK,
    "AuthorizationHeaderMalformed": _ELSEWHERE,
    "PermanentRedirect": _ELSEWHERE,
    "TemporaryRedirect": _ELSEWHERE,
    "Redirect": _ELSEWHERE,
    "IllegalLocationConstraintException": _ELSEWHERE,
    "XAmzContentSHA256Mismatch": _OLDER,
    "MissingContentLength": _OLDER,
}
"""Causes by S3's code of an error."""
_OF_CLIENT = {
    "TokenRetrievalError": _EXPIRED,
    "UnauthorizedSSOTokenError": _EXPIRED,
    "SSOTokenLoadError": _EXPIRED,
    "CredentialRetrievalError": _EXPIRED,
}
"""Causes by class of an error of botocore."""


def cause_of(error: BaseException, fs: Any = None, path: str = "") -> Cause | None:
    """Cause of an error of S3; None if it is none, or has no remedy of its own.

    Args:
        error: error of the file system.
        fs: the file system, which is asked again if the error has no code.
        path: path of the file, or of its folder.

    """
    cause = None
    has_no_body = False
    for link in chain(error):
        code, message = _code(link)
        cause = cause or _OF_CLIENT.get(type(link).__name__) or _cause_of_code(code, message)
        has_no_body |= code in _WITHOUT_BODY or isinstance(link, RecursionError)
    if cause is None and has_no_body and fs is not None:
        return _cause_of_get(fs, path)
    return cause


def error_of_cause(cause: Cause, address: str, got: str) -> HyphaError:
    """Error to raise for a refusal by an object store.

    Args:
        cause: cause that the store has reported.
        address: address of the file, without secrets.
        got: one line of the error of the file system.

    """
    problem = f"{address}: {cause.problem}"
    match cause.kind:
        case "expired":
            return ExpiredError("AUTH004", problem, got, fix=f"{cause.fix}; the same command goes on from there")
        case "credentials":
            return AuthenticationError("AUTH004", problem, got, fix=cause.fix)
        case "settings":
            return ConfigError("DATA066", problem, got, fix=cause.fix)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    ids = set[int]()
    while error is not None and id(error) not in ids:
        ids.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _cause_of_code(code: str, message: str) -> Cause | None:
    if code in _REFUSES and any(sign in message.lower() for sign in _SIGNS):
        return _OLDER
    return CAUSES.get(code)


def _cause_of_get(fs: Any, path: str) -> Cause | None:
    """Cause that the store gives for a GET of the file; None if it gives none."""
    with suppress(Exception):
        bucket, key, _ = fs.split_path(path)
        try:
            if key:
                fs.call_s3("get_object", Bucket=bucket, Key=key, Range="bytes=0-0")
            else:
                fs.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
        except Exception as error:
            return cause_of(error) or _cause_of_redirect(error)
    return None


def _cause_of_redirect(error: BaseException) -> Cause | None:
    """Cause of a redirect that the client follows in circles, or doesn't follow."""
    for link in chain(error):
        code, _ = _code(link)
        if isinstance(link, RecursionError) or code in ("301", "302", "307"):
            return _ELSEWHERE
    return None


def _code(error: BaseException) -> tuple[str, str]:
    """Code and message of an error of botocore; empty without."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return "", ""
    details = response.get("Error", {})
    return str(details.get("Code", "")), str(details.get("Message", ""))


def retry_after_s(error: BaseException, most_s: float) -> float:
    """Seconds for which a server asks to be left alone, `most_s` at most; 0 if it doesn't ask."""
    for link in chain(error):
        header = _headers(link).get("retry-after", "").strip()
        if header:
            return min(most_s, max(0.0, _seconds(header)))
    return 0.0


def _seconds(header: str) -> float:
    """Parse a header that gives seconds or a date; returns seconds from now."""
    try:
        seconds = float(header)
        return seconds if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0


def _headers(error: BaseException) -> dict[str, str]:
    """Headers of an answer of HTTP, by name in small letters."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    else:
        headers = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in dict(headers).items()}


def refusal_of_url(error: Exception, url: str) -> ConfigError | None:
    """Return the refusal of a URL that is malformed, of an unknown kind, or of a kind that needs a missing package.

    Args:
        error: error that fsspec, or the file system, raised for the URL.
        url: the URL.

    Returns:
        The refusal; None if the error has another cause.

    """
    if is_malformed(url):
        return malformed(url)
    scheme = url.partition("://")[0]
    got = line_of(error, url)
    if isinstance(error, ImportError):
        fix = f"pip install 'hypha_ray[{EXTRAS[scheme]}]'" if scheme in EXTRAS else "install it on all machines"
        return ConfigError("DATA064", f"{scheme}:// needs a package that isn't installed here", got, fix=fix)
    if isinstance(error, ValueError):
        return ConfigError("CFG003", f"a URL of the kind {scheme}:// can't be read", got, KINDS, "use another one")
    return None


def error_of_refusal(links: list[BaseException], address: str, got: str) -> AuthenticationError | None:
    """Error of access that needs credentials, or other ones; None if neither the error nor a cause is a refusal."""
    names = {type(link).__name__ for link in links}
    is_status_of_refusal = status_of(links) in (401, 403, 407)
    if is_status_of_refusal or isinstance(links[0], PermissionError) or names & _CREDENTIALS:
        return AuthenticationError("AUTH004", f"access to {address} is refused", got, fix=_ACCESS)
    return None


def may_pass(links: list[BaseException], status: int | None) -> bool:
    """Whether another try may succeed."""
    if status is not None:
        return (status >= 500 and status != 501) or status in _AGAIN
    return any(map(_is_transient, links))


def _is_transient(error: BaseException) -> bool:
    """Whether an error is of a connection, which may succeed later."""
    numbers = (errno.EBUSY, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or getattr(error, "errno", None) in numbers:
        return True
    names = ("ConnectionError", "Timeout", "TimeoutError", "ConnectorError", "Disconnected", "PayloadError")
    return type(error).__name__.endswith(names)


def is_unknown_host(error: BaseException) -> bool:
    """Whether the network knows no host of that name."""
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME


def status_of(links: list[BaseException]) -> int | None:
    """Status of HTTP in an error and its causes."""
    for link in links:
        status = _status(link)
        if status is not None:
            return status
    return None


def _status(error: BaseException) -> int | None:
    """Status of HTTP in an error of aiohttp, of huggingface_hub or of botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        metadata = response.get("ResponseMetadata", {})
        status = metadata.get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return status if isinstance(status, int) else None
