"""Webhooks and programs that are told of alerts, each in a thread of its own.

An address is a secret: no message has any part of it, only the name of its variable.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import aiohttp

from hypha_ray.config.training import Alert
from hypha_ray.telemetry.alerts import ALERT
from hypha_ray.telemetry.sinks.base import Isolated, Tally
from hypha_ray.telemetry.sinks.files import Record, plain

CAPACITY = 64
"""Alerts that wait for one slow webhook or program."""
PAUSES_S = (1.0, 5.0)
"""Pauses before further attempts to reach a webhook."""
_LAST_BYTES = 2000
"""Bytes from the end of a program's error output, of which the last line is shown."""
_ERRORS_S = 1.0
"""Longest wait for the rest of that output after the program's end, in seconds."""
PREFIX = "HYPHA_RAY_ALERT_"
"""Beginning of the names of a program's variables, such as HYPHA_RAY_ALERT_VALUE."""


class NotificationFailed(Exception):
    """A webhook or a program was not told of an alert."""


class Destination(Protocol):
    """Sink of one alert's events, which may be ended while it works."""

    def start(self, config: Record) -> None:
        """Open it."""

    def record(self, record: Record) -> None:
        """Metrics aren't sent."""

    def event(self, event: Record) -> None:
        """Send an alert."""

    def summary(self, figures: Record) -> None:
        """Figures of a whole run aren't sent."""

    def close(self) -> None:
        """Release all resources."""

    def abandon(self) -> None:
        """End what still runs; called from another thread."""


class Notifications(Isolated):
    """A destination in a thread of its own, which gets the events of its alert and nothing else."""

    def __init__(self, destination: Destination, tally: Tally, title: str) -> None:
        super().__init__(destination, tally, CAPACITY)
        self._destination = destination
        self._title = title

    def record(self, record: Record) -> None:
        """Pass a record over."""

    def event(self, event: Record) -> None:
        """Queue an event of the alert."""
        if event["kind"] == ALERT and event["alert"] == self._title:
            super().event(event)

    def summary(self, figures: Record) -> None:
        """Pass the figures over."""

    def join(self, patience_s: float) -> None:
        """Wait for the thread; after that time end what it waits for."""
        super().join(patience_s)
        self._destination.abandon()


def notifications(alerts: Sequence[Alert], run: str) -> Iterator[Notifications]:
    """Sinks for all webhooks and programs of a job's alerts."""
    for alert in alerts:
        if alert.url_env is not None:
            webhook = Webhook(alert.url_env, alert.timeout_s, run)
            yield Notifications(webhook, Tally(f"webhook of alert {alert.title}"), alert.title)
        if alert.command:
            program = Program(alert.command, alert.timeout_s, run)
            yield Notifications(program, Tally(f"program of alert {alert.title}"), alert.title)


class Webhook:
    """A web server that gets each alert as a POST with JSON; it is tried three times.

    Its fields `text` and `content` have the line of the console, as Slack, Mattermost and Discord want them.

    Args:
        variable: environment variable that has the address.
        timeout_s: longest time of one attempt, until the whole answer is there.
        run: name of the run.

    """

    def __init__(self, variable: str, timeout_s: float, run: str) -> None:
        self._variable = variable
        self._timeout_s = timeout_s
        self._run = run

    def start(self, config: Record) -> None:
        """Look the address up.

        Raises:
            NotificationFailed: the variable isn't set on this machine.

        """
        address = os.environ.get(self._variable)
        if not address:
            raise NotificationFailed(f"{self._variable} isn't set on the machine of the run directory")
        self._address = address

    def record(self, record: Record) -> None:
        """Metrics aren't sent."""

    def event(self, event: Record) -> None:
        """Post an alert.

        Raises:
            NotificationFailed: no attempt was answered with a status from 200 to 299.

        """
        body = payload(event, self._run)
        for pause_s in PAUSES_S:
            if asyncio.run(self._post(body)) is None:
                return
            time.sleep(pause_s)
        problem = asyncio.run(self._post(body))
        if problem is not None:
            raise NotificationFailed(f"the webhook of {self._variable} {problem}")

    def summary(self, figures: Record) -> None:
        """Figures of a whole run aren't sent."""

    def close(self) -> None:
        """Nothing to do: each alert has a connection of its own."""

    def abandon(self) -> None:
        """Nothing to do: a thread that waits for a server ends with the process."""

    async def _post(self, body: Record) -> str | None:
        """Post once; return the problem as the rest of a sentence, None if there is none.

        Redirections aren't followed: they could lead the alert anywhere.
        """
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, trust_env=True) as session,
                session.post(self._address, json=body, allow_redirects=False) as answer,
            ):
                status = answer.status
        except TimeoutError:
            return f"gives no answer in {self._timeout_s:g} s"
        except OSError as error:  # The error's text may have the host.
            reason = type(error).__name__
            if (error.errno or 0) > 0:
                reason = os.strerror(error.errno or 0)
            return f"can't be reached: {reason}"
        except (aiohttp.ClientError, ValueError) as error:
            return f"can't be reached: {type(error).__name__}"
        return None if 200 <= status < 300 else f"answers with status {status}"


def payload(event: Record, run: str) -> dict[str, Any]:
    """Fields that a webhook gets: those of the event, the run, and a text as chat servers want it."""
    fields: dict[str, Any] = plain(event)
    del fields["monotonic_s"]
    text = f"{run}: {fields['text']}"
    return {**fields, "run": run, "text": text, "content": text}


class Program:
    """A program that is run for each alert, without a shell; variables of its environment have the figures.

    Args:
        command: program and arguments.
        timeout_s: seconds after which it is killed, with all processes that it has started.
        run: name of the run.

    """

    def __init__(self, command: Sequence[str], timeout_s: float, run: str) -> None:
        self._command = list(command)
        self._timeout_s = timeout_s
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        """Process that runs now; None without one."""

    def start(self, config: Record) -> None:
        """Nothing to do: a program is started for each alert."""

    def record(self, record: Record) -> None:
        """Metrics aren't sent."""

    def event(self, event: Record) -> None:
        """Run the program.

        Raises:
            NotificationFailed: it doesn't end in time, or ends with another exit code than 0.
            OSError: it can't be started.

        """
        environment = {**os.environ, **variables(event, self._run)}
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        errors = _ErrorTail(self._process.stderr)
        try:
            exit_code = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            self.abandon()
            raise NotificationFailed(f"{self._name} was killed after {self._timeout_s:g} s") from None
        self._process = None
        if exit_code:
            raise NotificationFailed(f"{self._name} ended with exit code {exit_code}: {errors.last_line()}")

    def summary(self, figures: Record) -> None:
        """Figures of a whole run aren't sent."""

    def close(self) -> None:
        """Nothing to do: a program was waited for."""

    def abandon(self) -> None:
        """Kill the program that still runs, with all processes that it has started."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None

    @property
    def _name(self) -> str:
        return Path(self._command[0]).name


def variables(event: Record, run: str) -> dict[str, str]:
    """Environment variables of an alert's program; a field that an alert doesn't have is empty."""
    values: dict[str, str] = {f"{PREFIX}RUN": run}
    for name, value in plain(event).items():
        if name not in ("kind", "monotonic_s"):
            key = "NAME" if name == "alert" else name.upper()
            values[f"{PREFIX}{key}"] = "" if value is None else str(value)
    return values


class _ErrorTail:
    """Last bytes of a program's error output, which a thread reads for as long as any process has it open."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), name="alert-errors", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Return the last line; the program has ended, but its children may still write."""
        self._thread.join(_ERRORS_S)
        lines = self._tail.decode(errors="replace").split("\n")
        full_lines = [line.strip() for line in lines if line.strip()]
        return full_lines[-1] if full_lines else "it wrote no error"

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while block := os.read(stream.fileno(), _LAST_BYTES):
                self._tail = (self._tail + block)[-_LAST_BYTES:]
