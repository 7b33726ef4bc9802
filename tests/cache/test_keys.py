"""Block keys: golden values by an independent few lines of hashlib, separation of domains, and refusals."""

import hashlib
import hmac
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.cache import block_key, model_fingerprint, namespace, root_key
from umbra.cache.keys import _canonical
from umbra.configs.engine import BLOCK

TOKENS = list(range(1000, 1000 + BLOCK))
MODEL = dict(weights_id="ab" * 32, numerics_class="cpu/xla/0.10.2", kv_format="int8/f16")


def length_prefixed(data):
    return struct.pack("<Q", len(data)) + data


def test_golden_values():
    space = hmac.new(b"secret", b"kvns1alice", "sha256").digest()[:16]
    assert namespace(b"secret", "alice") == space

    body = b""
    for name in ("kv_format", "numerics_class", "weights_id"):
        body += length_prefixed(name.encode()) + b"s" + length_prefixed(MODEL[name].encode())
    model = hashlib.sha256(b"model1m" + length_prefixed(body)).digest()
    assert model_fingerprint(**MODEL) == model

    root = hashlib.sha256(b"root1" + space + model).digest()
    assert root_key(space, model) == root
    first = hashlib.sha256(b"blk1" + root + struct.pack("<128I", *TOKENS)).digest()
    assert block_key(root, TOKENS) == first
    extras = b"".join(length_prefixed(part) for part in (b"image", b"\x01\x02", b"policy", b"dense"))
    second = hashlib.sha256(b"blk1" + first + struct.pack("<128I", *TOKENS) + extras).digest()
    assert block_key(first, TOKENS, {"policy": b"dense", "image": b"\x01\x02"}) == second
    # Written down, so that a change of both sides at once is noticed: stored blocks would be lost.
    assert first.hex() == "6a98db67f0734cd173f1337e695f66e4ae2ce08146bc2bbae9e0bcc44f246349"
    assert second.hex() == "1bc76634981fcb8994ab3ef1296cc2c36e79d0d483582e20758ef3c852bce12d"


def test_any_change_changes_the_key():
    root = root_key(namespace(b"s", "p"), model_fingerprint(**MODEL))
    keys = [block_key(root, TOKENS)]
    for i in (0, 1, 63, 127):
        changed = TOKENS.copy()
        changed[i] += 1
        keys.append(block_key(root, changed))
    keys.append(block_key(root, TOKENS[::-1]))
    keys.append(block_key(keys[0], TOKENS))
    keys += [block_key(root, TOKENS, extras) for extras in ({"a": b""}, {"a": b"b"}, {"ab": b""}, {"b": b"a"})]
    keys.append(block_key(root, TOKENS, {"a": b"", "b": b""}))
    keys.append(block_key(root_key(namespace(b"s", "q"), model_fingerprint(**MODEL)), TOKENS))
    keys.append(block_key(root_key(namespace(b"t", "p"), model_fingerprint(**MODEL)), TOKENS))
    for change in ({"weights_id": "x"}, {"numerics_class": "x"}, {"kv_format": "x"}, {"adapter": "x"}):
        keys.append(block_key(root_key(namespace(b"s", "p"), model_fingerprint(**(MODEL | change))), TOKENS))
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_domains_are_separate():
    """An adapter and a salt of the same bytes, or a name that runs into its value, never meet."""
    fingerprints = [
        model_fingerprint(**MODEL, **more)
        for more in (
            {}, {"adapter": "x"}, {"salt": "x"}, {"adapter": b"x"}, {"adapterx": ""}, {"adapter": ""},
            {"adapter": None}, {"adapter": "None"}, {"adapter": 1}, {"adapter": 1.0}, {"adapter": True},
            {"adapter": "1"}, {"adapter": [1]}, {"adapter": [[1]]}, {"adapter": {"x": 1}}, {"adapter": [1, 2]},
            {"adapter": ["1", "2"]}, {"adapter": ["12"]}, {"adapter": []}, {"adapter": {}},
        )
    ]  # fmt: skip
    assert len(set(fingerprints)) == len(fingerprints)


def test_order_of_fields_is_irrelevant():
    more = {"rope": {"theta": 1e4, "scaling": None}, "layers": 30, "quant": ["int8", 32]}
    every = {**MODEL, **more}
    want = model_fingerprint(**every)
    for order in itertools.islice(itertools.permutations(every), 0, 720, 97):
        assert model_fingerprint(**{name: every[name] for name in order}) == want
    swapped = {"scaling": None, "theta": 1e4}
    assert model_fingerprint(**(every | {"rope": swapped})) == want
    assert model_fingerprint(**(every | {"quant": ("int8", 32)})) == want


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def typed(value):
    """A value that is equal to another only if both are the same by type and content."""
    if isinstance(value, list):
        return ("list", tuple(typed(item) for item in value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, typed(item)) for name, item in value.items()))
    return (type(value).__name__, struct.pack("<d", value) if isinstance(value, float) else value)


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_canonical_form_is_injective(a, b):
    assert (_canonical(a) == _canonical(b)) == (typed(a) == typed(b))


def test_token_ids_of_any_integer_type():
    root = bytes(32)
    want = block_key(root, TOKENS)
    for dtype in (np.int32, np.int64, np.uint32):
        assert block_key(root, np.array(TOKENS, dtype)) == want
    assert block_key(root, tuple(TOKENS)) == want
    assert block_key(root, [2**32 - 1] * BLOCK) != want


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: block_key(bytes(32), TOKENS[:-1]), "512 bytes, got 508"),
        (lambda: block_key(bytes(32), []), "512 bytes, got 0"),
        (lambda: block_key(bytes(31), TOKENS), "parent key has 32 bytes, got 31"),
        (lambda: block_key(bytes(32), [-1] * BLOCK), "32 unsigned bits, got -1"),
        (lambda: block_key(bytes(32), [2**32] * BLOCK), "32 unsigned bits, got 4294967296"),
        (lambda: block_key(bytes(32), [1.5] * BLOCK), "integers, got float64"),
        (lambda: root_key(bytes(15), bytes(32)), "namespace has 16 bytes, got 15"),
        (lambda: root_key(bytes(16), bytes(33)), "fingerprint has 32 bytes, got 33"),
        (lambda: namespace(b"", "x"), "must not be empty"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unknown_field_types_are_refused():
    with pytest.raises(TypeError, match="got ndarray"):
        model_fingerprint(**MODEL, table=np.zeros(3))
