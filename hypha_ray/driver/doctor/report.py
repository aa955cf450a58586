"""Result of a check, and the lines, the JSON and the exit code of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hypha_ray.errors import AuthenticationError, ConfigError, HyphaError, TryAgainError
from hypha_ray.texts import redacted

CODE = "ENV002"
_ERRORS = (ConfigError, AuthenticationError, TryAgainError)
"""Errors by which an examination ends, the most urgent kind first: 2, 4, 75."""


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
