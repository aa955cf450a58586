"""Spans of this process. Without the sink ``otel`` they cost nothing, and no library is loaded for them.

    round                                          scheduler
    ├── transfer                                   scheduler
    ├── training · encode · merge · evaluation     each worker
    ├── reduce                                     each parameter server
    └── commit                                     store

No message carries the ids of a round's trace and of its own span: all processes compute them from cluster, run, attempt
and round. Only the standard variables OTEL_* set the export up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from hypha_ray.errors import reason_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from hypha_ray.traces.tracer import RoundTracer

_logger = logging.getLogger(__name__)

FLUSH_S = 1.0
"""Longest wait of a process for the export of its last spans, in seconds."""
_tracer: RoundTracer | None = None


class RoundKey(NamedTuple):
    """A round of an attempt.

    The number is that of the round's plans: without a barrier the version of the weights that workers begin with.
    """

    attempt: int
    round: int


def begin(sinks: Collection[str], run: str, runtime_context: Callable[[], Any]) -> None:
    """Begin to export the spans of this process, an actor, if the job has the sink ``otel``.

    OTEL_SDK_DISABLED=true and OTEL_TRACES_EXPORTER=none turn spans off. A setting that the SDK refuses does, too.

    Args:
        sinks: names of the job's sinks.
        run: name of the run.
        runtime_context: Ray's function for the context of this actor.

    """
    global _tracer  # noqa: PLW0603  A process has one tracer.
    if "otel" not in sinks or _is_disabled():
        return
    from hypha_ray.traces.tracer import RoundTracer

    context = runtime_context()
    cluster = f"{context.get_session_name()}/{context.get_job_id()}"
    try:
        _tracer = RoundTracer(run, cluster, context.get_actor_name() or "")
    except Exception as error:  # Training goes on without spans.
        _logger.warning("there are no spans: %s", reason_of(error))


def _is_disabled() -> bool:
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return is_off or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"


@contextmanager
def traced(name: str, key: RoundKey, **attributes: int | str) -> Iterator[None]:
    """Record the block as a part of a round."""
    if _tracer is None:
        yield
        return
    with _tracer.part(name, key, attributes):
        yield


def start_round(key: RoundKey) -> Span | None:
    """Start the span of a round, which the spans of all its parts belong to; None if there are no spans."""
    if _tracer is None:
        return None
    return _tracer.start_round(key)


def now_ns() -> int:
    """Time of day as spans have it, in nanoseconds since 1970."""
    return time.time_ns()


def next_problem() -> str | None:
    """Line for the user, once, if no collector takes the spans."""
    if _tracer is None:
        return None
    return _tracer.next_problem()


def flush() -> None:
    """Export what waits, for `FLUSH_S` seconds at most."""
    if _tracer is not None:
        thread = threading.Thread(target=_tracer.flush, daemon=True)
        thread.start()
        thread.join(FLUSH_S)
