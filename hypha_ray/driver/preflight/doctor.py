"""Checks of one machine and of the credentials that it has. They need neither torch nor Ray, unless it has GPUs.

Result of a check, and the lines, the JSON and the exit code of all.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from hypha_ray.driver.credentials import HUB_TOKEN, OF_STORES
from hypha_ray.driver.run_provenance import versions
from hypha_ray.errors import AuthenticationError, ConfigError, HyphaError, TryAgainError
from hypha_ray.files import uncollected
from hypha_ray.remote_errors import cause_of
from hypha_ray.telemetry.sinks.table import si
from hypha_ray.texts import redacted

CODE = "ENV002"
_ERRORS = (ConfigError, AuthenticationError, TryAgainError)
"""Errors by which an examination ends, the most urgent kind first: 2, 4, 75."""
SHOWN_VERSIONS = ("python", "ray", "torch", "transformers", "hypha_ray")
"""Names of the versions that a line has, and that are compared between nodes."""
_NEEDED = ("ray", "torch", "transformers")
_LEAST_DISK_BYTES = 1 << 30
_ENOUGH_DISK_BYTES = 10 << 30
_STORE_SHARE = 0.3
"""Share of the memory that Ray's object store takes."""
_LEAST_FILES = 1024
_ENOUGH_FILES = 65536
"""Number of open files that Ray recommends for a head node."""
_SMI_S = 5.0
"""Longest wait for nvidia-smi, in seconds."""
_KEY_ID = "AWS_ACCESS_KEY_ID"
_SECRET = "AWS_SECRET_ACCESS_KEY"
_GOOGLE_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
PATIENCE_S = 3.0
"""Longest wait for a connection to a store or hub, and for the next bytes of its answer, in seconds."""
ANSWER_S = 10.0
"""Longest time of a question to a store or hub, also of one whose answer comes bit by bit."""
T = TypeVar("T")


class CheckState(StrEnum):
    """State of what was checked."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of one check."""

    check: str
    """Name of what was checked, such as ``disk``."""
    state: CheckState
    value: str
    """Text of what was found; never a secret."""
    remedy: str = ""
    """Remedy; empty if nothing is to be done."""
    node: str = ""
    """Address of the node; empty for this machine, or for the whole cluster."""
    error: type[HyphaError] = ConfigError
    """Error class of a failure, which determines the exit code."""

    def as_json(self) -> dict[str, Any]:
        """The fields that users get, with None for an absent remedy or node."""
        return {
            "check": self.check,
            "state": str(self.state),
            "value": redacted(self.value),
            "remedy": self.remedy or None,
            "node": self.node or None,
        }


def ok(check: str, value: str) -> CheckReport:
    """Return the report that nothing is wrong."""
    return CheckReport(check, CheckState.OK, value)


def note(check: str, value: str, remedy: str) -> CheckReport:
    """Return the report of something that costs speed or comfort, or that may become wrong."""
    return CheckReport(check, CheckState.NOTE, value, remedy)


def fail(check: str, value: str, remedy: str, error: type[HyphaError] = ConfigError) -> CheckReport:
    """Return the report of something that jobs can't run with."""
    return CheckReport(check, CheckState.FAIL, value, remedy, error=error)


def rows(reports: Sequence[CheckReport]) -> Iterator[tuple[str, ...]]:
    """Return a row of texts for each report; nodes have a column if any report has one."""
    has_nodes = any(report.node for report in reports)
    for report in reports:
        text = redacted(report.value)
        if report.remedy:
            text += f". Fix: {report.remedy}"
        node = (report.node or "-",) if has_nodes else ()
        yield (report.state, report.check, *node, text)


def error_of(reports: Sequence[CheckReport]) -> HyphaError | None:
    """Return the error that all failures amount to; None without one."""
    failures = [report for report in reports if report.state is CheckState.FAIL]
    for error_class in _ERRORS:
        if any(issubclass(report.error, error_class) for report in failures):
            names = ", ".join(dict.fromkeys(report.check for report in failures))
            problem = "jobs can't run here as they should"
            return error_class(CODE, problem, f"{names}", "no line with fail", "follow the remedies above")
    return None


def machine_reports() -> list[CheckReport]:
    """Check what jobs need on any node."""
    return [version_report(versions()), gpu_report(), memory_report(), files_report()]


def own_reports(folder: Path) -> Iterator[CheckReport]:
    """Check what a driver needs on its machine: the disk of the runs, and Ray's token.

    Args:
        folder: folder of the runs.

    """
    yield disk_report(folder)
    yield token_report(os.environ, _home() / ".ray" / "auth_token")


def version_report(installed: Mapping[str, str]) -> CheckReport:
    """Tell the versions; a missing library fails."""
    missing = [name for name in _NEEDED if name not in installed]
    text = ", ".join(f"{name} {installed.get(name, 'missing')}" for name in SHOWN_VERSIONS)
    if missing:
        return fail("versions", text, f"install {', '.join(missing)}, such as by `make setup`")
    return ok("versions", text)


def gpu_report() -> CheckReport:
    """Tell the GPUs with their driver, and check that torch can use them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ok("gpu", "none")
    command = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return fail("gpu", f"nvidia-smi fails: {type(error).__name__}", "see to the driver by `nvidia-smi`")
    lines = [line.strip() for line in process.stdout.splitlines() if line.strip()]
    if not lines:
        return ok("gpu", "none")
    text = "; ".join(f"{lines.count(line)} × {line}" for line in dict.fromkeys(lines))
    return _torch_report(text) if find_spec("torch") else ok("gpu", text)


def _torch_report(gpus: str) -> CheckReport:
    """Check that torch can use the GPUs of this machine, which a text describes."""
    with uncollected():
        import torch
    if torch.cuda.is_available():
        return ok("gpu", f"{gpus}, CUDA {torch.version.cuda}")
    if torch.version.cuda is None:
        return fail("gpu", f"{gpus}, and torch {torch.__version__} is built without CUDA", "install torch with CUDA")
    remedy = "renew the driver, or install torch for an older CUDA"
    return fail("gpu", f"{gpus}, and torch can't use it with CUDA {torch.version.cuda}", remedy)


def memory_report() -> CheckReport:
    """Compare /dev/shm, which has Ray's object store, with the share of the memory that the store takes."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir():
        return note("/dev/shm", "missing: Ray's object store is on the disk", "mount a tmpfs there")
    usage = shutil.disk_usage(shared_memory)
    text = f"{si(usage.free)}B free of {si(usage.total)}B, with {si(memory_bytes)}B of memory"
    if usage.free < _STORE_SHARE * memory_bytes:
        wanted_text = si(_STORE_SHARE * memory_bytes)
        remedy = (
            f"have {wanted_text}B free there, in a container by --shm-size; otherwise Ray's object store is on the disk"
        )
        return note("/dev/shm", text, remedy)
    return ok("/dev/shm", text)


def files_report() -> CheckReport:
    """Check the most open files of a process; Ray raises the soft limit to the hard one by itself."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit == resource.RLIM_INFINITY:
        return ok("open files", "unlimited")
    text = f"{hard_limit} at most"
    remedy = f"raise `ulimit -Hn` to {_ENOUGH_FILES}"
    if hard_limit < _LEAST_FILES:
        return fail("open files", text, remedy)
    if hard_limit < _ENOUGH_FILES:
        return note("open files", text, f"{remedy} on the head of a large cluster")
    return ok("open files", text)


def disk_report(folder: Path) -> CheckReport:
    """Check that the folder of the runs can be written, and its free space."""
    existing = folder
    while not existing.exists() and existing.parent != existing:
        existing = existing.parent
    remedy = "set HYPHA_RAY_HOME or run.dir to a folder that can be written"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        usage = shutil.disk_usage(existing)
    except OSError as error:
        return fail("disk", f"{folder} can't be written: {error.strerror or error}", remedy)
    text = f"{si(usage.free)}B free of {si(usage.total)}B at {folder}"
    remedy = "make room: a run keeps checkpoint.keep + 1 snapshots of 8 bytes for each parameter"
    if usage.free < _LEAST_DISK_BYTES:
        return fail("disk", text, remedy, TryAgainError)
    if usage.free < _ENOUGH_DISK_BYTES:
        return note("disk", text, remedy)
    return ok("disk", text)


def token_report(environment: Mapping[str, str], file: Path) -> CheckReport:
    """Check Ray's token: whether it is asked for, is there, and is its owner's alone. It is never read.

    Args:
        environment: variables of this process.
        file: Ray's own file for the token.

    """
    joins_cluster = bool(environment.get("RAY_ADDRESS"))
    mode = environment.get("RAY_AUTH_MODE")
    if mode == "disabled" or (joins_cluster and mode != "token"):
        remedy = "export RAY_AUTH_MODE=token, and give the cluster's token"
        return note("token", f"RAY_AUTH_MODE is {mode or 'not set'}: this client sends no token", remedy)
    if environment.get("RAY_AUTH_TOKEN"):
        return ok("token", "in RAY_AUTH_TOKEN")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or file)
    if path.exists():
        return _token_file_report(path)
    if not joins_cluster:
        return ok("token", f"none yet: the first start makes {path}")
    remedy = f"copy the cluster's token to {path}, with mode 0600"
    return fail("token", f"there is none at {path}", remedy, AuthenticationError)


def _token_file_report(path: Path) -> CheckReport:
    """Check that a token's file can be read by its owner alone."""
    bits = stat.S_IMODE(path.stat().st_mode)
    if bits & (stat.S_IRWXG | stat.S_IRWXO):
        remedy = f"chmod 600 {path}; if others may have read it, make a new token"
        return fail("token", f"others may use {path}, with mode {bits:04o}", remedy, AuthenticationError)
    if not os.access(path, os.R_OK):
        return fail("token", f"{path} can't be read", "see to its owner", AuthenticationError)
    return ok("token", f"{path}, mode {bits:04o}")


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def in_time(ask: Callable[[], T]) -> T:
    """Return the answer of a function, which is left to itself after `ANSWER_S`.

    Raises:
        TimeoutError: it hasn't answered by then.

    """
    answer: Future[T] = Future()

    def fill() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # Raised where the answer is awaited.
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
    listed_names = ", ".join(names)
    if _KEY_ID in names and _SECRET not in names:
        return fail("s3", f"{_KEY_ID} is set, and {_SECRET} isn't", f"set {_SECRET}", AuthenticationError)
    if find_spec("s3fs") is None:
        return note(
            "s3", f"{listed_names}; s3fs isn't installed", "pip install s3fs on the machine of the run directory"
        )
    try:
        in_time(_ask_s3)
    except Exception as error:  # The client raises errors of its own, of HTTP and of the system.
        cause = cause_of(error)
        if cause is not None:
            return fail("s3", f"{listed_names}: {cause.problem}", cause.fix, AuthenticationError)
        if _is_refusal(error):
            return ok("s3", f"{listed_names}: known to the store, which doesn't list its buckets for them")
        reason = type(error).__name__
        return note("s3", f"{listed_names}: not tried, since the store can't be asked ({reason})", "see to the network")
    return ok("s3", f"{listed_names}: the store accepts them")


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
