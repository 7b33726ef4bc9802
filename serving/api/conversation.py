"""A conversation on its way to the model: messages of its chat template, with the tools it may call."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...model.chat_template import ChatTemplateError
from ..effort import Effort, Prepared, prepare
from ..engine.request import SamplingParams
from .errors import bad_request, unsupported
from .service import Loaded
from .tool_calls import tool_format
from .tool_prompt import told


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a prompt is made of. `tools` are OpenAI-style descriptions, the form that templates know; None: no tools.
    The fields of the request that messages and thinking stood in are named in refusals."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    field: str
    thinking_field: str

    def prepare(self, loaded: Loaded, params: SamplingParams, effort: Effort) -> Prepared:
        """The conversation and the start of the model's turn as token ids, and how it thinks, which depends on their
        number. Takes time: for a worker."""
        assert loaded.thinker is not None, "see check_model"
        texts = (message.get(name, "") for message in self.messages for name in ("content", "reasoning_content"))
        loaded.check_length(texts, self.field)
        context, messages, tools = loaded.engine.context_length, self.messages, self.tools
        form = tool_format(loaded.model.chat_template)
        if not form.native:
            messages, tools = told(messages, tools, form), None
        try:
            return prepare(loaded.thinker, context, messages, params, effort, policies=loaded.policies, tools=tools)
        except ChatTemplateError as error:
            raise bad_request(f"The model's chat template refused the {self.field}: {error}", self.field) from None
        except ValueError as error:
            raise unsupported(self.thinking_field, f"'{self.thinking_field}': {error}") from None


def check_model(loaded: Loaded) -> None:
    """Refuse a model that has no conversations."""
    if loaded.thinker is None:
        message = f"The model '{loaded.name}' has no chat template; use /v1/completions"
        raise bad_request(message, "model", "unsupported_model")
