"""The pieces of an answer for protocols whose answers are lists of steps: thoughts, texts and calls."""

from __future__ import annotations

from ..engine.request import Emission
from .tool_calls import CallParser, Piece, ToolCall, Tools, written


class Pieces:
    """Splits emissions into texts and the calls that can be handed over. How tokens are grouped into emissions changes
    nothing. A call that cannot be handed over stays what the model wrote."""

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._calls = CallParser(tools.form) if tools is not None else None

    def take(self, emission: Emission) -> list[str | ToolCall]:
        if self._calls is None:
            return [emission.text] if emission.text else []
        pieces = self._calls.push(emission.text)
        if emission.finish_reason is not None:
            pieces += self._calls.finish()
        out: list[str | ToolCall] = []
        for piece in map(self._usable, pieces):
            if isinstance(piece, str) and out and isinstance(out[-1], str):
                out[-1] += piece
            else:
                out.append(piece)
        return out

    def _usable(self, piece: Piece) -> str | ToolCall:
        assert self._tools is not None
        if isinstance(piece, str) or (isinstance(piece, ToolCall) and piece.name in self._tools.names):
            return piece
        return written(piece, self._tools.form)
