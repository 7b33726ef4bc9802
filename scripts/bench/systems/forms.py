"""The adapter that answers in the form of a JSON schema, and freely."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .ours import Ours


class Forms(Ours):
    def in_form(self, questions: Sequence[str], schemas: Sequence[Any], max_tokens: int) -> list[dict[str, Any]]:
        """Greedy answers to `questions`, all at once, each valid under its schema (None: free text); of each its
        figures, its text and why it ended."""
        from ....serving.api.json_schema import schema_grammar

        prompts = self.encode(questions)
        params = [
            self.params(max_tokens, grammar=None if schema is None else schema_grammar(schema, "schema"))
            for schema in schemas
        ]
        for one in params:  # compiled ahead, as a server does in a worker
            if one.grammar is not None:
                self.engine.compile_grammar(one.grammar)
        emissions = self._answer(prompts, params, self._begin())
        return [self._told(len(prompt), made) for prompt, made in zip(prompts, emissions, strict=True)]

    def _told(self, prompt_tokens: int, emissions: Sequence[Any]) -> dict[str, Any]:
        stream, last = self._stream(prompt_tokens, emissions), emissions[-1][1]
        forced = dict(last.timings.accepted).get("forced", 0)
        return {
            "text": "".join(emission.text for _, emission in emissions),
            "finish": last.finish_reason,
            "tokens": len(stream.token_ids),
            "passes": stream.passes,
            "tok_s": stream.tok_s,
            "ttft_ms": stream.ttft * 1e3,
            "forced": forced,
        }


def is_valid(text: str, schema: Any) -> bool:
    """Whether `text` is JSON that is valid under `schema`."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
