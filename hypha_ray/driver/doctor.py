"""Checks of one machine. They need neither torch nor Ray, unless it has GPUs.

Result of a check, and the lines, the JSON and the exit code of all.
"""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hypha_ray.driver.run_provenance import versions
from hypha_ray.errors import AuthenticationError, ConfigError, HyphaError, TryAgainError
from hypha_ray.heavy_imports import uncollected
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
    """Class of the error that a failure amounts to, which has the exit code."""

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
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return note("/dev/shm", "missing: Ray's object store is on the disk", "mount a tmpfs there")
    usage = shutil.disk_usage(shared)
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
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok("open files", "unlimited")
    text = f"{hard} at most"
    remedy = f"raise `ulimit -Hn` to {_ENOUGH_FILES}"
    if hard < _LEAST_FILES:
        return fail("open files", text, remedy)
    if hard < _ENOUGH_FILES:
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
    joins = bool(environment.get("RAY_ADDRESS"))
    mode = environment.get("RAY_AUTH_MODE")
    if mode == "disabled" or (joins and mode != "token"):
        remedy = "export RAY_AUTH_MODE=token, and give the cluster's token"
        return note("token", f"RAY_AUTH_MODE is {mode or 'not set'}: this client sends no token", remedy)
    if environment.get("RAY_AUTH_TOKEN"):
        return ok("token", "in RAY_AUTH_TOKEN")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or file)
    if path.exists():
        return _token_file_report(path)
    if not joins:
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
