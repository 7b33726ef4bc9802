"""The pieces of an answer for protocols that tell calls apart from text."""

from __future__ import annotations

from ..engine.request import Emission
from .tool_calls import BadCall, CallParser, Piece, ToolCall, Tools, written


class Pieces:
    """Splits emissions into texts and the calls that can be handed over. How tokens are grouped into emissions changes
    nothing. A call that cannot be handed over, and any after `most` calls, stays what the model wrote."""

    def __init__(self, tools: Tools | None, *, most: int | None = None) -> None:
        self._tools, self._most, self._found = tools, most, 0
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
        if isinstance(piece, str):
            return piece
        if isinstance(piece, BadCall) or piece.name not in self._tools.names or self._found == self._most:
            return written(piece, self._tools.form)
        self._found += 1
        return piece
