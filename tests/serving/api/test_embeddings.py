from __future__ import annotations

import base64

import numpy as np
import openai
import pytest
from google import genai

from umbra.configs.engine import EngineConfig
from umbra.serving.engine import Emission

WIDTH = 4
URL = "/v1/embeddings"


def vector(prompt):
    """A vector of length 1 that depends on the prompt."""
    raw = np.array([len(prompt), sum(prompt) % 7, prompt[0] % 5, 1.0], np.float32)
    return raw / np.linalg.norm(raw)


@pytest.fixture
def embedding(api):
    api.engine.plan = lambda prompt, params: [
        Emission("", (1,), finish_reason="max_tokens", embedding=vector(prompt) if params.embed else None)
    ]
    return api


def post(api, **body):
    return api.client.post(URL, json={"model": "fake", "input": "Hi", **body})


def test_openai_s_client(embedding):
    client = openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="k")
    answer = client.embeddings.create(model="fake", input=["Hi", "there"])
    assert [one.index for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == answer.usage.total_tokens == 7
    for one, text in zip(answer.data, ("Hi", "there"), strict=True):
        assert np.allclose(one.embedding, vector(text.encode()))


def test_google_s_client(embedding):
    client = genai.Client(api_key="k", http_options={"base_url": embedding.url})
    answer = client.models.embed_content(model="fake", contents=["Hi", "there"])
    assert [
        np.allclose(one.values, vector(text)) for one, text in zip(answer.embeddings, (b"Hi", b"there"), strict=True)
    ]
    short = client.models.embed_content(
        model="fake", contents="Hi", config={"output_dimensionality": 2, "task_type": "RETRIEVAL_QUERY"}
    )
    assert len(short.embeddings[0].values) == 2 and np.linalg.norm(short.embeddings[0].values) == pytest.approx(1)


def test_forms(embedding):
    plain = post(embedding).json()["data"][0]["embedding"]
    assert plain == post(embedding, encoding_format="float").json()["data"][0]["embedding"]
    packed = post(embedding, encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == pytest.approx(plain)
    short = post(embedding, dimensions=2).json()["data"][0]["embedding"]
    assert len(short) == 2 and np.linalg.norm(short) == pytest.approx(1)
    assert post(embedding, input=[72, 105]).json()["data"][0]["embedding"] == plain
    assert len(post(embedding, input=[[72, 105], [1]]).json()["data"]) == 2
    single = embedding.client.post("/v1beta/models/fake:embedContent", json={"content": {"parts": [{"text": "Hi"}]}})
    assert (
        single.json()["embedding"]["values"] == pytest.approx(plain) and single.headers["x-goog-billing-tokens"] == "2"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": None}, "input"), ({"input": [[]]}, "input"),
        ({"input": [300]}, "input[0]"), ({"input": ["x"] * 9}, "input"), ({"dimensions": 5}, "dimensions"),
        ({"dimensions": 0}, "dimensions"), ({"encoding_format": "hex"}, "encoding_format"), ({"model": "x"}, "model"),
        ({"input": "x" * 2000}, "input"),
    ],
)  # fmt: skip
def test_refusals(embedding, body, param):
    response = post(embedding, **body)
    assert response.status_code in (400, 404) and response.json()["error"]["param"] == param, response.text
    assert not embedding.engine.submitted


@pytest.mark.parametrize(
    "body",
    [
        {}, {"content": {}}, {"content": {"parts": [{"inlineData": {}}]}}, {"content": {"parts": [{"text": ""}]}},
        {"content": {"parts": [{"text": "x"}]}, "outputDimensionality": 9},
        {"content": {"parts": [{"text": "x"}]}, "model": "models/other"},
    ],
)  # fmt: skip
def test_refusals_of_gemini(embedding, body):
    for method, sent in (("embedContent", body), ("batchEmbedContents", {"requests": [body]})):
        response = embedding.client.post(f"/v1beta/models/fake:{method}", json=sent)
        assert response.status_code == 400 and response.json()["error"]["status"] == "INVALID_ARGUMENT"


def test_a_server_without_embeddings(embedding):
    embedding.engine.config = EngineConfig()
    assert post(embedding).status_code == 400 and "--no-embeddings" in post(embedding).json()["error"]["message"]
    batch = embedding.client.post("/v1beta/models/fake:batchEmbedContents", json={"requests": []})
    assert batch.status_code == 400
    methods = embedding.client.get("/v1/models/fake").json()["supportedGenerationMethods"]
    assert "embedContent" not in methods and "generateContent" in methods
