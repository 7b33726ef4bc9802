"""Output files that appear whole or not at all, and whose making can be interrupted and taken up again."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from ..configs.files import write_text


class ResumableRows:
    """Rows of a JSON lines file, kept as they come in `PATH.partial` and written to PATH in order by `finish`.

    The partial file starts with `settings`. One with the same settings is taken up: `done` holds its rows by index.
    One with other settings is started over. A line cut short by a crash is dropped.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.done: dict[int, dict[str, Any]] = {}
        header = json.dumps({"settings": settings}, sort_keys=True)
        write_text(self.partial, "\n".join([header, *self._rows_under(header), ""]))
        self._file = self.partial.open("a", encoding="utf-8")

    def _rows_under(self, header: str) -> list[str]:
        """The complete lines of a partial file that starts with `header`; their rows are put into `done`."""
        if not self.partial.exists():
            return []
        first, *lines = self.partial.read_text(encoding="utf-8").split("\n")
        if first != header:
            return []
        complete = lines[:-1]  # what follows the last newline is empty or cut short
        for entry in map(json.loads, complete):
            self.done[entry["index"]] = entry["row"]
        return complete

    def add(self, index: int, row: dict[str, Any]) -> None:
        self.done[index] = row
        self._file.write(json.dumps({"index": index, "row": row}, ensure_ascii=False) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Write the rows in order of their index and remove the partial file."""
        lines = [json.dumps(self.done[index], ensure_ascii=False) + "\n" for index in sorted(self.done)]
        write_text(self.path, "".join(lines))
        self._file.close()
        self.partial.unlink()

    def __enter__(self) -> ResumableRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
