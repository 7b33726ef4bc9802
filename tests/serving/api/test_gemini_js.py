"""Google's JavaScript client, where there is Node."""

from __future__ import annotations

from umbra.serving.engine import Emission

from .javascript import GOOGLE, run


def test_the_javascript_client(api, make_answer):
    def plan(prompt, params):
        line = bytes(prompt).decode().splitlines()[-1]
        if line == "user: fail":
            return [Emission("a", (97,)), Emission("", finish_reason="error", error="secret")]
        return make_answer(f"re {line} 🎉")

    api.engine.plan = plan
    out = run("gemini.mjs", GOOGLE, api.url)

    text, prompt = "re user: Hi 🎉", len("user: Hi\n")
    for version in ("v1", "v1beta", "v1alpha"):
        got = out[version]
        assert got["text"] == got["streamed"] == text and got["finish"] == "STOP"
        assert got["usage"] == got["streamedUsage"]
        assert got["usage"]["promptTokenCount"] == got["count"] == prompt
        assert got["usage"]["totalTokenCount"] == prompt + len(text.encode())
        assert got["names"] == ["models/fake"] and got["model"] == "models/fake"

    assert out["chat"] == [f"re user: {word} 🎉" for word in ("one", "two", "three", "four")]
    assert out["history"] >= 8
    last = next(one for one in api.engine.submitted if bytes(one.prompt).decode().endswith("user: four\n"))
    assert (
        bytes(last.prompt).decode()
        == "".join(f"user: {word}\nassistant: re user: {word} 🎉\n" for word in ("one", "two", "three"))
        + "user: four\n"
    )

    assert out["full"] == {"candidates": 2, "tokens": "re user: all 🎉"}
    assert out["badOption"]["status"] == 400 and "temperature" in out["badOption"]["message"]
    assert out["badModel"]["status"] == 404 and "no-such" in out["badModel"]["message"]
    assert out["badStream"]["status"] == 500 and "secret" not in out["badStream"]["message"]
    assert all(out[name]["api"] for name in ("badOption", "badModel", "badStream"))
