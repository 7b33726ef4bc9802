"""A conversation on its way to the model: messages of its chat template, with the tools it may call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ...model.chat_template import ChatTemplateError, Known
from ..effort import Effort, Prepared, prepare
from ..engine.request import SamplingParams
from .errors import bad_request, unsupported
from .service import Loaded
from .tool_calls import tool_format
from .tool_prompt import told

Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a prompt is made of. `tools` are OpenAI-style descriptions, the form that templates know; None: no tools.
    The fields of the request that messages and thinking stood in are named in refusals. With `known` the messages are
    those that show where the known ids end, and what follows; `whole` gives all of them, for templates that do not
    show it."""

    messages: Messages
    tools: list[dict[str, Any]] | None
    field: str
    thinking_field: str
    known: Known | None = None
    whole: Callable[[], Messages] | None = None

    def prepare(self, loaded: Loaded, params: SamplingParams, effort: Effort) -> Prepared:
        """The conversation and the start of the model's turn as token ids, and how it thinks, which depends on their
        number. Takes time: for a worker."""
        assert loaded.thinker is not None, "see check_model"
        texts = (message.get(name, "") for message in self.messages for name in ("content", "reasoning_content"))
        loaded.check_length(texts, self.field)
        try:
            try:
                return self._prepare(loaded, params, effort, self.messages, self.known)
            except ChatTemplateError:
                if self.whole is None:
                    raise
                return self._prepare(loaded, params, effort, self.whole(), None)
        except ChatTemplateError as error:
            raise bad_request(f"The model's chat template refused the {self.field}: {error}", self.field) from None
        except ValueError as error:
            raise unsupported(self.thinking_field, f"'{self.thinking_field}': {error}") from None

    def until(self, loaded: Loaded, mark: str) -> list[int]:
        """The ids of what the template writes before `mark`, which stands in a message. For a worker; raises
        `ChatTemplateError`."""
        assert loaded.thinker is not None
        loaded.check_length((message["content"] for message in self.messages), self.field)
        messages, tools = self._shown(loaded, self.messages)
        return loaded.thinker.encode(messages, thinking=False, tools=tools, until=mark)

    def _shown(self, loaded: Loaded, messages: Messages) -> tuple[Messages, list[dict[str, Any]] | None]:
        """Messages and tools as the chat template knows them."""
        form = tool_format(loaded.model.chat_template)
        return (messages, self.tools) if form.native else (told(messages, self.tools, form), None)

    def _prepare(
        self, loaded: Loaded, params: SamplingParams, effort: Effort, messages: Messages, known: Known | None
    ) -> Prepared:
        assert loaded.thinker is not None
        messages, tools = self._shown(loaded, messages)
        return prepare(
            loaded.thinker,
            loaded.engine.context_length,
            messages,
            params,
            effort,
            policies=loaded.policies,
            tools=tools,
            **({} if known is None else {"known": known}),
        )


def check_model(loaded: Loaded) -> None:
    """Refuse a model that has no conversations."""
    if loaded.thinker is None:
        message = f"The model '{loaded.name}' has no chat template; use /v1/completions"
        raise bad_request(message, "model", "unsupported_model")
