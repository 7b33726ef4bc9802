"""Pictures of reports, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = tuple[str, Sequence[float], Sequence[float]]
"""A label, places on the horizontal axis, and values."""


def _pyplot() -> Any:
    import matplotlib  # only now: it takes a second

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def bars(path: Path, title: str, groups: Sequence[str], figures: Mapping[str, Sequence[float | None]]) -> None:
    """One panel per figure, a bar per group; a value of None leaves a gap."""
    pyplot = _pyplot()
    drawing, panels = pyplot.subplots(1, len(figures), figsize=(3.4 * len(figures), 3.6), squeeze=False)
    for panel, (name, values) in zip(panels[0], figures.items(), strict=True):
        panel.bar(range(len(groups)), [0.0 if value is None else value for value in values], color="#4a6fa5")
        panel.set_xticks(range(len(groups)), groups, rotation=60, ha="right", fontsize=8)
        panel.set_title(name, fontsize=10)
        for i, value in enumerate(values):
            panel.annotate("-" if value is None else f"{value:.3g}", (i, value or 0.0), ha="center", va="bottom",
                           fontsize=7)  # fmt: skip
        panel.margins(y=0.15)
    _finish(drawing, path, title)


def lines(path: Path, title: str, across: str, panels: Mapping[str, Sequence[Line]]) -> None:
    """One panel per name, with its lines; all have the same horizontal axis."""
    pyplot = _pyplot()
    drawing, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axis, (name, some) in zip(axes[0], panels.items(), strict=True):
        for label, places, values in some:
            axis.plot(places, values, marker="o", label=label)
        axis.set_xlabel(across)
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
        if len(some) > 1:
            axis.legend(fontsize=8)
    _finish(drawing, path, title)


def _finish(drawing: Any, path: Path, title: str) -> None:
    drawing.suptitle(title, fontsize=11)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)
    _pyplot().close(drawing)
