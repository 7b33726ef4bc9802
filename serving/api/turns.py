"""Going on with a conversation: what is known of its last turn, and the prompt of the next one.

Token ids are the truth. A conversation goes on from the ids of its last turn as they are, and the chat template writes
only what follows, so that the prompt's beginning is what the context cache has. The messages are needed only when the
instructions or tools are others than before.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ...model.chat_template import Known
from .conversation import Conversation, Messages
from .service import Loaded
from .tool_calls import Tools, tool_format


@dataclasses.dataclass(frozen=True)
class Turn:
    """The end of a turn. `token_ids` is the conversation to there, `names` has the functions that were called in it
    by the ids of the calls, `messages` gives all of it but the system text, `number` counts turns from 0."""

    id: str
    token_ids: Sequence[int]
    system: str
    tools: list[dict[str, Any]] | None
    names: dict[str, str]
    messages: Callable[[], Messages]
    number: int


def declared_tools(descriptions: list[dict[str, Any]] | None, loaded: Loaded) -> Tools | None:
    """Tools that were declared earlier, as they were kept."""
    return Tools(tool_format(loaded.model.chat_template), descriptions) if descriptions else None


def conversation_of(
    loaded: Loaded,
    turn: Turn | None,
    new: Messages,
    system: str,
    tools: list[dict[str, Any]] | None,
    *,
    field: str,
    thinking_field: str,
) -> Conversation:
    """The conversation that goes on after `turn`, if there is one, with `new` messages."""
    opening = [{"role": "system", "content": system}] if system else []
    if turn is None:
        return Conversation([*opening, *new], tools, field, thinking_field)
    earlier = turn.messages

    def whole() -> Messages:
        return [*opening, *earlier(), *new]

    if system != turn.system or tools != turn.tools:
        return Conversation(whole(), tools, field, thinking_field)
    mark = f"mark{uuid.uuid4().hex}"
    shown = [*opening, {"role": "user", "content": "-"}, {"role": "assistant", "content": mark}, *new]
    known = Known(turn.token_ids, mark, ends=frozenset(getattr(loaded.model, "eos_ids", ())))
    return Conversation(shown, tools, field, thinking_field, known, whole)
