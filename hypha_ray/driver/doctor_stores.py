"""Checks of the credentials of object stores and of the hub that the environment has; no secret is shown."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from hypha_ray.driver.credentials import HUB_TOKEN, OF_STORES
from hypha_ray.driver.doctor import CheckReport, fail, note, ok
from hypha_ray.errors import AuthenticationError
from hypha_ray.remote_errors import cause_of

_KEY_ID = "AWS_ACCESS_KEY_ID"
_SECRET = "AWS_SECRET_ACCESS_KEY"
_GOOGLE_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
PATIENCE_S = 3.0
"""Longest wait for a connection to a store or hub, and for the next bytes of its answer, in seconds."""
ANSWER_S = 10.0
"""Longest time of a question to a store or hub, also of one whose answer comes bit by bit."""

T = TypeVar("T")


def in_time(ask: Callable[[], T]) -> T:
    """Return the answer of a function, which is left to itself after `ANSWER_S`.

    Raises:
        TimeoutError: it hasn't answered by then.

    """
    answer: Future[T] = Future()

    def fill() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # It is raised where the answer is awaited.
            answer.set_exception(error)

    threading.Thread(target=fill, name="doctor-question", daemon=True).start()
    return answer.result(ANSWER_S)


def store_reports(environment: Mapping[str, str] = os.environ) -> Iterator[CheckReport]:
    """Check the credentials of each store that the environment names."""
    names = [name for name in OF_STORES["s3"] if environment.get(name)]
    if names:
        yield s3_report(environment, names)
    if environment.get(_GOOGLE_FILE):
        yield google_report(Path(environment[_GOOGLE_FILE]))
    if environment.get(HUB_TOKEN):
        yield hub_report(environment[HUB_TOKEN])


def s3_report(environment: Mapping[str, str], names: list[str]) -> CheckReport:
    """Check that keys of S3 are complete, and that the store knows them.

    Args:
        environment: variables of this process.
        names: names of the variables that are set.

    """
    listed = ", ".join(names)
    if _KEY_ID in names and _SECRET not in names:
        return fail("s3", f"{_KEY_ID} is set, and {_SECRET} isn't", f"set {_SECRET}", AuthenticationError)
    if find_spec("s3fs") is None:
        return note("s3", f"{listed}; s3fs isn't installed", "pip install s3fs on the machine of the run directory")
    try:
        in_time(_ask_s3)
    except Exception as error:  # The client raises errors of its own, of HTTP and of the system.
        cause = cause_of(error)
        if cause is not None:
            return fail("s3", f"{listed}: {cause.problem}", cause.fix, AuthenticationError)
        if _is_refusal(error):
            return ok("s3", f"{listed}: known to the store, which doesn't list its buckets for them")
        reason = type(error).__name__
        return note("s3", f"{listed}: not tried, since the store can't be asked ({reason})", "see to the network")
    return ok("s3", f"{listed}: the store accepts them")


def _ask_s3() -> None:
    """List the buckets, with the settings of the environment.

    Raises:
        Exception: the store refuses, or can't be reached.

    """
    from botocore.config import Config
    from botocore.session import Session

    config = Config(connect_timeout=PATIENCE_S, read_timeout=PATIENCE_S, retries={"total_max_attempts": 1})
    region = os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    client: Any = Session().create_client("s3", config=config, region_name=region)
    client.list_buckets()


def _is_refusal(error: Exception) -> bool:
    """Whether a store knows the keys, and doesn't allow them this call."""
    response = getattr(error, "response", None)
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "AccessDenied"


def google_report(file: Path) -> CheckReport:
    """Check that the file with Google's credentials can be read and is of their form."""
    remedy = f"let {_GOOGLE_FILE} name a file with credentials"
    try:
        kind = json.loads(file.read_text(encoding="utf-8"))["type"]
    except OSError as error:
        return fail("gs", f"{file} can't be read: {error.strerror or error}", remedy, AuthenticationError)
    except (ValueError, LookupError, TypeError):
        return fail("gs", f"{file} has no credentials", remedy, AuthenticationError)
    if find_spec("gcsfs") is None:
        remedy = "pip install gcsfs on the machine of the run directory"
        return note("gs", f"{file}, of type {kind}; gcsfs isn't installed", remedy)
    return ok("gs", f"{file}, of type {kind}; not tried")


def hub_report(token: str) -> CheckReport:
    """Check that the hub knows the token of the environment."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return ok("hub", f"{HUB_TOKEN} is set; not tried, since HF_HUB_OFFLINE is")
    try:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        headers = {"authorization": f"Bearer {token}"}
        response = in_time(lambda: get_session().get(url, headers=headers, timeout=PATIENCE_S))
        status = int(response.status_code)
    except Exception as error:  # Errors of any HTTP library.
        reason = type(error).__name__
        return note("hub", f"{HUB_TOKEN} is set; the hub can't be reached ({reason})", "see to the network")
    if status in (401, 403):
        remedy = f"export a valid {HUB_TOKEN}, or unset it"
        return fail("hub", f"the hub refuses {HUB_TOKEN}: HTTP {status}", remedy, AuthenticationError)
    if status != 200:
        return note("hub", f"{HUB_TOKEN} is set; the hub answers HTTP {status}", "try again later")
    return ok("hub", f"the hub accepts {HUB_TOKEN}")
