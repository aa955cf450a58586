"""The console's view on a terminal: a table of the last rounds, and a spinner or progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from rich import box, live
from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hypha_ray.telemetry.sinks import table
from hypha_ray.telemetry.sinks.files import Record

ROWS = 15
BAR_WIDTH = 24


class Live:
    """A view that a thread redraws four times a second.

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
