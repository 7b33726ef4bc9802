"""Start-up progress on stderr, shared by the scripts that load a model."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StartupProgress:
    """Shows (stage, done, total) reports: bars on a terminal, otherwise one line per stage. Safe from any thread.

    `text` is the latest report in words.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self.text = "starting"

    def __enter__(self) -> StartupProgress:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            self.text = f"{stage} {done}/{total}" if 0 < total < 10_000 else stage
            known = stage in self._tasks
            if not known:
                self._tasks[stage] = self._bars.add_task(stage, total=total or None)
            self._bars.update(self._tasks[stage], completed=done, total=total or None)
        if not known and not self._console.is_terminal:
            self._console.print(stage, markup=False, highlight=False, soft_wrap=True)
