"""The default model behind the server, asked by unmodified clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn
from google import genai

from umbra.configs.engine import EngineConfig
from umbra.serving.api import Service, create_app
from umbra.serving.engine import Engine

pytestmark = pytest.mark.real

MODEL = "smollm2"
QUESTION = "Name three colours and one animal."
GREEDY = {"temperature": 0, "max_output_tokens": 24}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from umbra.model.load import load_model

    service, model = Service(), load_model(MODEL)
    with Engine(model, EngineConfig(slots=2, context_length=512), metrics=service.engine_metrics) as engine:
        engine.start()
        service.attach(engine, model)
        config = uvicorn.Config(create_app(service), host="127.0.0.1", port=0, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join(10)
        service.close()


@pytest.fixture
def gemini(url):
    with genai.Client(api_key="any", http_options={"base_url": url}) as client:
        yield client


def shown(chunks, thought=None):
    return "".join(part.text for chunk in chunks for part in chunk.parts or () if part.thought == thought)


@pytest.mark.parametrize(
    "config",
    [GREEDY, {**GREEDY, "seed": 5, "temperature": 1}, {**GREEDY, "stop_sequences": [","]},
     {**GREEDY, "max_output_tokens": 90, "thinking_config": {"thinking_budget": 20, "include_thoughts": True}}],
    ids=["greedy", "seeded", "stopped", "thinking"],
)  # fmt: skip
def test_streamed_answers_are_the_whole_ones(gemini, config):
    whole = gemini.models.generate_content(model=MODEL, contents=QUESTION, config=config)
    chunks = list(gemini.models.generate_content_stream(model=MODEL, contents=QUESTION, config=config))
    assert shown(chunks) == shown([whole]) == whole.text and shown(chunks, True) == shown([whole], True)
    used = whole.usage_metadata
    assert used.candidates_token_count == chunks[-1].usage_metadata.candidates_token_count
    thoughts = used.thoughts_token_count or 0
    assert used.total_token_count == used.prompt_token_count + used.candidates_token_count + thoughts
    assert (thoughts > 0) == ("thinking_config" in config) and thoughts <= 20


def test_a_forced_call_has_arguments_in_little_room(url):
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "description": "Get the weather of a city", "parameters": city}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "What is the weather in Paris?"}], max_tokens=60,
            temperature=0, tool_choice="required", tools=[{"type": "function", "function": weather}],
        )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == '{"city":"Paris"}'


def test_counts_and_stops(gemini):
    whole = gemini.models.generate_content(model=MODEL, contents=QUESTION, config=GREEDY)
    counted = gemini.models.count_tokens(model=MODEL, contents=QUESTION)
    assert counted.total_tokens == whole.usage_metadata.prompt_token_count
    stopped = gemini.models.generate_content(
        model=MODEL, contents=QUESTION, config={**GREEDY, "stop_sequences": [",", "\n"]}
    )
    assert stopped.text == min(whole.text.split(",")[0], whole.text.split("\n")[0], key=len)


def test_logprobs(gemini):
    config = {**GREEDY, "response_logprobs": True, "logprobs": 2}
    answer = gemini.models.generate_content(model=MODEL, contents=QUESTION, config=config)
    result = answer.candidates[0].logprobs_result
    assert "".join(token.token for token in result.chosen_candidates) == answer.text
    assert len(result.chosen_candidates) == len(result.top_candidates) == answer.usage_metadata.candidates_token_count
    best = [top.candidates[0].token_id for top in result.top_candidates]
    assert best == [token.token_id for token in result.chosen_candidates], "greedy"


def test_the_protocols_agree(gemini, url):
    whole = gemini.models.generate_content(model=MODEL, contents=QUESTION, config=GREEDY)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24)
        message = {"role": "user", "content": QUESTION}
        chat = client.chat.completions.create(model=MODEL, messages=[message], temperature=0, max_tokens=24)
        assert response.output_text == chat.choices[0].message.content == whole.text
        assert response.usage.total_tokens == chat.usage.total_tokens == whole.usage_metadata.total_token_count
        again = client.responses.create(
            model=MODEL, input="And one more?", previous_response_id=response.id, temperature=0, max_output_tokens=16
        )
    told = [
        {"role": "user", "parts": [{"text": QUESTION}]},
        {"role": "model", "parts": [{"text": whole.text}]},
        {"role": "user", "parts": [{"text": "And one more?"}]},
    ]
    config = {**GREEDY, "max_output_tokens": 16}
    assert gemini.models.generate_content(model=MODEL, contents=told, config=config).text == again.output_text


def test_stored_answers(gemini, url):
    """Interactions and responses go on with the tokens that the same conversation has when it is sent again."""
    options = {"temperature": 0, "max_output_tokens": 16}
    first = gemini.interactions.create(model=MODEL, input=QUESTION, generation_config=options)
    more = {"model": MODEL, "input": "And a fruit?", "previous_interaction_id": first.id, "generation_config": options}
    second = gemini.interactions.create(**more)
    events = list(gemini.interactions.create(**more, stream=True))
    text = "".join(event.delta.text for event in events if event.event_type == "step.delta")
    assert text == second.output_text and events[-1].interaction.usage.total_tokens == second.usage.total_tokens
    turns = [("user", QUESTION), ("model", first.output_text), ("user", "And a fruit?")]
    contents = [{"role": role, "parts": [{"text": text}]} for role, text in turns]
    whole = gemini.models.generate_content(model=MODEL, contents=contents, config=GREEDY | {"max_output_tokens": 16})
    assert whole.text == second.output_text
    assert whole.usage_metadata.prompt_token_count == second.usage.total_input_tokens
    with openai.OpenAI(base_url=url + "/v1", api_key="any") as client:
        asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
        one = client.responses.create(input=QUESTION, **asked)
        two = client.responses.create(input="And a fruit?", previous_response_id=one.id, **asked)
    assert (one.output_text, two.output_text) == (first.output_text, second.output_text)
