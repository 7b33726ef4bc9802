"""What a training run found, as Markdown with plots."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ...configs.files import replacing, write_text
from ...kernels.draft import SHADOW_PLACES
from .measure import Calibration, Measured
from .pipeline import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_report(result: Result, command: str) -> Path:
    """`report.md`, the figures behind it as `report.json`, and four plots. Gives the path of the first."""
    out = result.run.out
    plots = {
        "loss.png": lambda ax: _plot_loss(ax, result.trained.history),
        "acceptance.png": lambda ax: _plot_acceptance(ax, result.held_out.acceptance),
        "reliability.png": lambda ax: _plot_reliability(ax, result.held_out.calibration),
        "tokens_per_pass.png": lambda ax: _plot_lengths(ax, result.held_out.per_length),
    }
    for name, draw in plots.items():
        _plot(out / name, draw)
    write_text(out / "report.json", json.dumps(_plain(result, command), indent=1) + "\n")
    write_text(out / "report.md", "\n".join(_markdown(result, command)) + "\n")
    return out / "report.md"


def _plain(result: Result, command: str) -> dict[str, Any]:
    outside = dataclasses.asdict(result.outside) if result.outside else None
    return {
        "command": command, "trunk": result.run.trunk.name, "weights_id": result.run.weights_id,
        "shadow": dataclasses.asdict(result.run.shadow), "training": dataclasses.asdict(result.run.config),
        "size": dataclasses.asdict(result.size), "tokens": result.tokens, "coverage": result.coverage,
        "seconds": result.seconds, "held_out": dataclasses.asdict(result.held_out), "outside": outside,
        "versions": {"python": platform.python_version(), "jax": jax.__version__}, "machine": platform.machine(),
    }  # fmt: skip


def _markdown(result: Result, command: str) -> list[str]:
    run, config = result.run, result.run.shadow
    spent = ", ".join(f"{name} {seconds / 60:.1f} min" for name, seconds in result.seconds.items())
    lines = [
        f"# Shadow for {run.trunk.name}",
        "",
        f"`{command}`",
        "",
        f"- {result.size}",
        f"- rank {config.rank}, MLP {config.mlp}, draft vocabulary {config.vocab:,}: it covers "
        + ", ".join(f"{share:.2%} of the {name} tokens" for name, share in result.coverage.items()),
        "- tokens: " + ", ".join(f"{n:,} {name}" for name, n in result.tokens.items()) + "; split by prompt",
        f"- {result.trained.steps:,} steps of {run.config.batch:,} examples; {spent}",
        f"- trained for the weights `{run.weights_id}`",
        "",
        *_measured("Held-out prompts", result.held_out),
    ]
    if result.outside is not None:
        lines += _measured(
            "Prompts from outside (nothing trained on shares eight words in a row with them)", result.outside
        )
    return [*lines, "## Loss", "", "![loss](loss.png)"]


def _measured(title: str, found: Measured) -> list[str]:
    """All figures of one set of answers."""
    sources = list(found.per_length)
    lines = [
        f"## {title}",
        "",
        "Greedy answers. Tokens per pass as in live drafting: a draft stands when it is what the trunk chooses.",
        "",
        *_table(
            ["drafts at most", *map(str, range(1, SHADOW_PLACES + 1)), "gate decides", "not repetitive"],
            [
                [
                    name,
                    *_numbers(found.per_length[name]),
                    f"{found.gated['all'][name]:.2f}",
                    _of(found.not_repetitive, name),
                ]
                for name in sources
            ],
        ),
        "",
        f"A table of the most frequent successor of each token (bigrams), eight drafts: {found.bigram:.2f}.",
        "",
        "Tokens per pass by category, the gate deciding how many are drafted, and how often the shadow's guess at a "
        "place is right when all before it were:",
        "",
        *_table(
            ["category", "answers", *sources, *(f"place {k}" for k in range(1, 5))],
            [
                [name, str(found.answers[name]), *_numbers(found.gated[name].values())]
                + [_percent(value) for value in found.acceptance[name][:4]]
                for name in found.acceptance
            ],
        ),
        "",
        "### Gate",
        "",
        *_gate_table(found.calibration),
        "",
    ]
    if title.startswith("Held-out"):
        lines += [f"![{name}]({name}.png)" for name in ("acceptance", "tokens_per_pass", "reliability")] + [""]
    return lines


def _gate_table(found: Mapping[str, Calibration]) -> list[str]:
    names = sorted({name for each in found.values() for name in each.coverage})
    rows = [
        [kind, f"{each.n:,}", f"{each.ece:.2%}", f"{each.brier:.3f}", f"{each.auroc:.3f}"]
        + [f"{each.coverage[n][1]:.1%} (precision {each.coverage[n][2]:.1%})" for n in names]
        for kind, each in found.items()
    ]
    head = ["live drafts", "number", "ECE", "Brier", "AUROC", *(f"coverage at {name} precision" for name in names)]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _numbers(values: Any) -> list[str]:
    return [f"{value:.2f}" for value in values]


def _percent(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1%}"


def _of(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.2f}" if name in values else ""


# ---- plots

SHOWN_PLACES = 6
"""Places of a chain in the plot of guesses; later ones are seldom reached."""


def _plot(path: Path, draw: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=110)
    draw(axes)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
    pyplot.close(figure)


def _plot_loss(axes: Axes, history: Sequence[Mapping[str, float]]) -> None:
    steps = [row["step"] for row in history]
    for place in range(1, SHADOW_PLACES + 1):
        if history and f"ce{place}" in history[0]:
            axes.plot(steps, [row[f"ce{place}"] for row in history], label=f"place {place}", linewidth=0.9)
    axes.set(xlabel="step", ylabel="cross-entropy (nats)", title="Training loss")
    axes.legend(ncols=2, fontsize=8)


def _plot_acceptance(axes: Axes, found: Mapping[str, Sequence[float]]) -> None:
    shown = np.array([values[:SHOWN_PLACES] for values in found.values()], float)
    axes.imshow(shown, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(shown):
        if not np.isnan(value):
            colour = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=6, color=colour)
    axes.set(xlabel="place", title="How often the shadow is right, given all before")
    axes.set_xticks(range(shown.shape[1]), [str(place + 1) for place in range(shown.shape[1])])
    axes.set_yticks(range(len(found)), list(found), fontsize=6)


def _plot_reliability(axes: Axes, found: Mapping[str, Calibration]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    for kind, each in found.items():
        label = f"{kind} (ECE {each.ece:.1%})"
        axes.plot([row[0] for row in each.bins], [row[1] for row in each.bins], marker="o", label=label)
    axes.set(xlabel="probability by the gate", ylabel="share that stood", title="Reliability of the gate, live drafts")
    axes.legend(fontsize=8)


def _plot_lengths(axes: Axes, found: Mapping[str, Sequence[float]]) -> None:
    for name, values in found.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set(xlabel="drafts at most", ylabel="tokens per pass", title="Tokens per pass, greedy test answers")
    axes.legend(fontsize=8)
