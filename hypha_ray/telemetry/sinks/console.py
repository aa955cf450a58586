"""The driver's console: a live table on a terminal, otherwise one aligned line per round."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich import box, live
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hypha_ray.config.entry_point import SILENCE_S, Heartbeat, line
from hypha_ray.telemetry.sinks import table
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import fixed

ROWS = 15
BAR_WIDTH = 24


class View(Protocol):
    """Protocol of a view of the console."""

    def row(self, record: Record) -> None:
        """Show a complete round."""

    def text(self, text: str) -> None:
        """Show a line of text."""

    def status(self, text: str) -> None:
        """Show the current phase."""

    def progress(self, text: str, part: float) -> None:
        """Show progress; `part` is the completed fraction of all rounds, 0 to 1."""

    def still(self, text: str) -> None:
        """Show the progress after a silence, or the last phase if the text is empty."""

    def stop(self) -> None:
        """Restore the terminal."""


class Lines:
    """A view for logs and pipes, which prints only whole lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], began_s: float) -> None:
        self._stream = stream
        self._clock = clock
        self._began_s = began_s
        self._phase = ""
        self._columns: Sequence[table.ConsoleColumn] = ()
        """Columns for all figures so far; none before the first round."""
        self._latest: dict[str, Any] = {}
        """Last value of every field that a round has had."""

    def row(self, record: Record) -> None:
        """Print the round, and the titles before the first one and before one with a further figure."""
        self._latest |= {name: value for name, value in record.items() if value is not None}
        columns = table.columns_for([self._latest])
        if columns != self._columns:
            self._columns = columns
            self.text(table.header(columns))
        self.text(table.line(record, columns))

    def text(self, text: str) -> None:
        """Print a line; characters that the stream's encoding lacks become question marks."""
        encoding = self._stream.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)

    def status(self, text: str) -> None:
        """Print the current phase, with the time since the start."""
        self._phase = text
        self._print(text)

    def progress(self, text: str, part: float) -> None:
        """Print nothing: a round is one line."""

    def still(self, text: str) -> None:
        """Print the progress, or the phase that goes on, with the time since the start."""
        if text or self._phase:
            self._print(text or f"still {self._phase}")

    def stop(self) -> None:
        """Nothing to undo."""

    def _print(self, text: str) -> None:
        self.text(line(self._clock() - self._began_s, text))


class Console:
    """Shows the progress of a run.

    Rounds are shown as a count of all, from one: ``3/100``. A round's validation figure is that of the weights after
    it; the record of the evaluation comes before that of the round. If the stream's reader is gone, nothing more is
    printed, and training continues.

    Args:
        total_rounds: rounds planned.
        stream: where to write; default: standard output.
        interactive: whether to draw a live table; default: if the stream is a terminal that can show one.
        clock: monotonic seconds.
        rounds: whether to show rounds; without them only phases, notes, silences and the final summary.
        began_s: monotonic time at which the command began; default: now.
        silence_s: seconds without a line after which a view without a terminal repeats the progress or phase.

    """

    def __init__(
        self,
        total_rounds: int,
        stream: TextIO | None = None,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        rounds: bool = True,
        began_s: float | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._total = total_rounds
        self._shows_rounds = rounds
        self._clock = clock
        self._stream = stream or sys.stdout
        if interactive is None:
            interactive = rounds and _can_draw(self._stream)
        self._view: View | None
        """View of the run; None after the stream was closed."""
        if interactive:
            self._view = Live(self._stream, clock)
        else:
            self._view = Lines(self._stream, clock, clock() if began_s is None else began_s)
        self._evaluation: Record = {}
        self._begin_round(0)
        self._end_s: float | None = None
        """Expected end of the run, in monotonic seconds; None: unknown."""
        self._is_training = False
        """Whether the last news is progress, not a phase."""
        self._samples = ""
        """Samples of the current round, and its target; empty before the first report."""
        self._lock = threading.RLock()
        self._heartbeat = Heartbeat(self.still, silence_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self, text: str) -> None:
        """Show a phase without training: a cluster starts, leases are requested, a model is built."""
        self._is_training = False
        self._show(lambda view: view.status(text))

    def round(self, record: Record) -> None:
        """Show a complete round, a record with ``kind="round"``."""
        round_number = record["round"]
        evaluated_round = self._evaluation.get("round", round_number)
        figures = table.validated(self._evaluation) if evaluated_round == round_number else {}
        self._total = record.get("rounds", self._total)
        row = {"rounds": self._total, **figures, **record}
        if self._shows_rounds:
            self._show(lambda view: view.row(row))
        if evaluated_round <= round_number:
            self._evaluation = {}
        eta_s = record.get("eta_s")
        self._end_s = None if eta_s is None else self._clock() + eta_s
        self._is_training = True
        if self._round <= round_number:  # Otherwise the next round's progress came first.
            self._begin_round(round_number + 1)

    def eval(self, record: Record) -> None:
        """Keep an evaluation for the row of its round, a record with ``kind="eval"``."""
        self._evaluation = record

    def progress(self, record: Record) -> None:
        """Show progress inside a round, a record with ``kind="step"``: the last report of one worker."""
        if record["round"] < self._round:
            return
        if record["round"] > self._round:
            self._begin_round(record["round"])
        for name in self._reported:
            self._reported[name] += record.get(name) or 0
        samples = record.get("round_samples") or 0
        target = record.get("round_target") or 0
        self._samples = ""
        part_of_round = 0.0
        if target:
            self._samples = f"{table.si(samples)}/{table.si(target)} samples"
            part_of_round = min(1.0, samples / target)
        part = (self._round + part_of_round) / self._total
        self._is_training = True
        if self._shows_rounds:
            text = self._progress()
            self._show(lambda view: view.progress(text, min(1.0, part)), is_line=False)

    def still(self) -> None:
        """Show the progress or the phase again, after a silence."""
        text = self._progress() if self._is_training else ""
        self._show(lambda view: view.still(text))

    def event(self, event: Record) -> None:
        """Show an event of events.jsonl."""
        self.note(table.event_text(event))

    def note(self, text: str) -> None:
        """Show a line of text among the rounds."""
        self._show(lambda view: view.text(f"-- {text}"))

    def close(self, summary: Record | None = None) -> None:
        """Stop drawing, then print the run's figures if there are any. Idempotent."""
        self._heartbeat.stop()
        self._show(lambda view: view.stop())
        if summary is not None:
            self._show(lambda view: view.text(table.summary_line(summary)))

    def _begin_round(self, round_number: int) -> None:
        self._round = round_number
        self._reported = {"samples": 0, "tokens": 0}
        self._round_s = self._clock()
        self._samples = ""

    def _progress(self) -> str:
        parts = [f"round {min(self._round + 1, self._total)}/{self._total}"]
        if self._samples:
            parts.append(self._samples)
        count = self._reported["samples"]
        unit = "samples/s"
        if self._reported["tokens"]:
            count = self._reported["tokens"]
            unit = "tok/s"
        seconds = self._clock() - self._round_s
        # Reports of all workers come at once; a moment after the start their sum says nothing about speed.
        if count and seconds > 0.5:
            parts.append(f"{table.si(count / seconds)} {unit}")
        for name, value in table.validated(self._evaluation).items():
            parts.append(f"{name} {fixed(value, 4)}")
        if self._end_s is not None:
            remaining_s = max(0.0, self._end_s - self._clock())
            parts.append(f"ETA {table.duration(remaining_s)}")
        return "  ".join(parts)

    def _show(self, show: Callable[[View], None], is_line: bool = True) -> None:
        """Show something; a line ends the silence."""
        with self._lock:
            if self._view is None:
                return
            try:
                show(self._view)
            except OSError:  # a closed pipe
                self._view = None
            except ValueError:
                if not self._stream.closed:
                    raise
                self._view = None
        if is_line:
            self._heartbeat.restart()


def _can_draw(stream: TextIO) -> bool:
    if not stream.isatty():
        return False
    return Terminal(file=stream).is_interactive


class Live:
    """A view on a terminal, which a thread redraws four times a second: the last rounds, and a spinner or progress bar.

    The data that the thread reads are replaced, never changed in place. Text, and output of other code, is printed
    above the table.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._terminal = Terminal(file=stream, force_terminal=True, highlight=False)
        spinner = "dots" if self._terminal.encoding.startswith("utf") else "line"
        self._spinner = Spinner(spinner, style="cyan")
        self._rows: tuple[Record, ...] = ()
        self._phase: tuple[str, float] | None = None
        """Current phase and the monotonic seconds at which it began; None during training."""
        self._progress: tuple[str, float] | None = None
        """Text of the progress bar and its completed fraction; None without a bar."""
        self._live = live.Live(console=self._terminal, get_renderable=self._draw, refresh_per_second=4)
        self._live.start()

    def row(self, record: Record) -> None:
        """Add a round to the table, which drops the oldest one."""
        self._rows = (*self._rows, record)[-ROWS:]
        self._phase = None
        self._progress = None
        self._live.refresh()

    def text(self, text: str) -> None:
        """Print a line above the table."""
        self._terminal.print(Text(self._encodable(text)))
        self._live.refresh()

    def status(self, text: str) -> None:
        """Show a spinner with the time since this call."""
        self._phase = (self._encodable(text), self._clock())
        self._live.refresh()

    def progress(self, text: str, part: float) -> None:
        """Show a progress bar with text."""
        self._phase = None
        self._progress = (self._encodable(text), part)

    def still(self, text: str) -> None:
        """Show nothing more: the spinner and the bar move by themselves."""

    def stop(self) -> None:
        """Draw the table for the last time, and restore the cursor."""
        self._phase = None
        self._progress = None
        self._live.stop()

    def _draw(self) -> RenderableType:
        phase = self._phase
        progress = self._progress
        parts: list[RenderableType] = []
        if self._rows:
            parts.append(self._table())
        if phase is not None:
            text, began_s = phase
            self._spinner.update(text=f"{text}  {table.duration(self._clock() - began_s)}")
            parts.append(self._spinner)
        elif progress is not None:
            parts.append(_bar(*progress))
        return Group(*parts)

    def _table(self) -> Table:
        grid = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1))
        columns = table.fitting(self._terminal.width, among=table.columns_for(self._rows))
        for column in columns:
            grid.add_column(column.title, justify="right", no_wrap=True)
        for record in self._rows:
            grid.add_row(*(column.cell(record) for column in columns))
        return grid

    def _encodable(self, text: str) -> str:
        """Text in which characters that the terminal's encoding lacks are question marks."""
        return text.encode(self._terminal.encoding, "replace").decode(self._terminal.encoding)


def _bar(text: str, part: float) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=1.0, completed=part, width=BAR_WIDTH), Text(text))
    return grid
