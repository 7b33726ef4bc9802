from __future__ import annotations

import pytest

from umbra.configs.keys import ApiKey, Limits, digest_of, new_key, plain_keys, read_keys
from umbra.configs.server import ServerConfig, is_loopback


def test_a_new_key_goes_into_a_file(tmp_path):
    secret, table = new_key("alice")
    _, other = new_key("bob@example.org")
    path = tmp_path / "keys.toml"
    path.write_text(f'{table}tenant = "research"\ntokens_per_minute = 10\npriority = "low"\n{other}')
    alice, bob = read_keys(path)
    assert secret not in path.read_text() and alice.sha256 == digest_of(secret.encode())
    assert alice == ApiKey("alice", alice.sha256, "research", {"tokens_per_minute": 10}, "low")
    assert bob.name == bob.tenant == "bob@example.org" and bob.priority == "high"
    assert len(secret) > 40 and alice.sha256 not in repr(alice)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no API key"),
        ("alice", "not a file of API keys"),
        ('alice = "secret"', "expected a table"),
        ("[alice]", "sha256 is missing"),
        ('[alice]\nsha256 = "abc"', "64 lower-case hexadecimal digits"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nsecret = "x"', "'secret' is not known; supported: max_concurrent"),
        (f'[alice]\nsha256 = "{"0" * 64}"\ntokens_per_minute = -1', "tokens_per_minute must be 0"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nmax_concurrent = "x"', "max_concurrent must be 0"),
        (f'[alice]\nsha256 = "{"0" * 64}"\npriority = "top"', "one of low, normal, high"),
        (f'[alice]\nsha256 = "{"0" * 64}"\ntenant = "a b"', "tenant of an API key must be"),
        (f'["a b"]\nsha256 = "{"0" * 64}"', "name of an API key must be"),
    ],
)
def test_a_file_that_is_not_understood(tmp_path, text, said):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="keys.toml") as error:
        read_keys(path)
    assert said in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read the API keys"):
        read_keys(tmp_path / "none.toml")


def test_plain_keys():
    assert [key.name for key in plain_keys("a", "b", "a")] == ["key-ca978112", "key-3e23e816"]
    with pytest.raises(ValueError, match="must not be empty"):
        plain_keys("a", " ")


def test_without_keys_only_loopback_is_listened_on():
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    with pytest.raises(ValueError, match="UMBRA_API_KEYS"):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", api_keys=plain_keys("a")).host == "0.0.0.0"


@pytest.mark.parametrize("field", ["name", "sha256"])
def test_keys_are_told_apart(field):
    keys = [{"name": "a", "sha256": "0" * 64, "tenant": "t"}, {"name": "b", "sha256": "1" * 64, "tenant": "t"}]
    keys[1][field] = keys[0][field]
    with pytest.raises(ValueError, match=f"two API keys have the {field}"):
        ServerConfig(api_keys=tuple(ApiKey(**key) for key in keys))


def test_limits_are_checked():
    for bad in (-1, True, 1.5):
        with pytest.raises(ValueError, match="requests_per_minute"):
            Limits(requests_per_minute=bad)
