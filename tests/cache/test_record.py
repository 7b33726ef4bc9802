"""Records and layouts: what is written comes back, and whatever is changed is noticed."""

import dataclasses

import numpy as np
import pytest
from blocks import ALICE, BOB, LAYOUT, contents, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.cache.keys import BlockInfo, Extras, Identity, Namespaces
from umbra.cache.layout import BlockLayout
from umbra.cache.record import (
    ALIGN,
    HEADER,
    Damaged,
    Header,
    Kind,
    Place,
    decode,
    encode,
    padding,
    payload_crc,
    verify,
)
from umbra.configs.engine import BLOCK
from umbra.kernels.attention import KVFormat

PLACE = Place(b"s" * 16, 3, 8192)


def record(info, payload):
    header = Header(Kind.BLOCK, PLACE, 7, 1.5, info, LAYOUT.codec, len(payload), payload_crc(payload))
    return header, encode(header), payload + padding(len(payload))


@pytest.mark.parametrize("n", [1, 50, BLOCK])
@pytest.mark.parametrize("extras", [None, Extras(policy="sparse 64", layers=(0, 2, 5), media=b"\0" * 32)])
def test_round_trip(n, extras):
    info = ALICE.chain(tokens(n), extras, tail=True)[0]
    header, head, payload = record(info, contents(info))
    assert len(head) == HEADER and len(payload) % ALIGN == 0
    assert decode(head) == header
    assert decode(head).info.expected_key() == info.key
    verify(decode(head), payload, place=PLACE, info=info, codec=LAYOUT.codec)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 8 * (HEADER + ALIGN * 3) - 1))
def test_every_flipped_bit_is_noticed(bit):
    info = ALICE.chain(tokens(BLOCK), Extras(policy="p"))[0]
    header, head, payload = record(info, contents(info))
    data = bytearray(head + payload)
    at = bit % (8 * len(data))
    data[at // 8] ^= 1 << at % 8
    with pytest.raises(Damaged):
        verify(decode(data[:HEADER]), bytes(data[HEADER:]), place=PLACE, info=info, codec=LAYOUT.codec)


def test_another_block_is_noticed():
    info = ALICE.chain(tokens(BLOCK))[0]
    header, head, payload = record(info, contents(info))

    def reason(**change):
        asked = dict(place=PLACE, info=info, codec=LAYOUT.codec) | change
        with pytest.raises(Damaged) as error:
            verify(decode(head), payload, **asked)
        return error.value.reason

    assert reason(place=Place(PLACE.store, 3, 4096)) == "place"
    assert reason(place=Place(b"t" * 16, 3, 8192)) == "place"
    assert reason(info=Identity(ALICE.space, b"n" * 32).chain(tokens(BLOCK))[0]) == "model"
    assert reason(info=ALICE.chain(tokens(BLOCK, seed=1))[0]) == "tokens"
    assert reason(info=BOB.chain(tokens(BLOCK))[0]) == "key"
    assert reason(info=dataclasses.replace(info, position=128)) == "key"
    assert reason(codec="float32") == "codec"
    with pytest.raises(Damaged, match="deleted"):
        verify(dataclasses.replace(header, kind=Kind.DEAD), payload, place=PLACE, info=info, codec=LAYOUT.codec)
    with pytest.raises(Damaged, match="checksum"):
        verify(header, payload[:-1], place=PLACE, info=info, codec=LAYOUT.codec)


def test_too_much_for_a_header_is_refused():
    info = ALICE.chain(tokens(BLOCK), Extras(adapter=bytes(4000)))[0]
    with pytest.raises(ValueError, match="must fit"):
        record(info, b"")


@pytest.mark.parametrize(
    "kv", [KVFormat("int8"), KVFormat("int8", "float32"), KVFormat("float32"), KVFormat("bfloat16")]
)
@pytest.mark.parametrize("n", [1, 77, BLOCK])
def test_layout_round_trip(kv, n):
    layout = BlockLayout.of(kv, 2, 3, 4)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-100, 100, part.shape).astype(part.dtype) for part in layout.parts]
    payload = layout.pack(arrays, n)
    assert len(payload) == layout.nbytes(n) == n * kv.bytes_per_token(2, 3, 4)
    for array, back, part in zip(arrays, layout.unpack(payload, n), layout.parts, strict=True):
        cut = (slice(None),) * part.token_axis
        assert back.shape == array.shape and back.dtype == array.dtype
        np.testing.assert_array_equal(back[(*cut, slice(n))], array[(*cut, slice(n))])
        assert not back[(*cut, slice(n, None))].any(), "what lies behind a tail must not be kept"


def test_layout_of_the_tests_is_a_pools():
    assert BlockLayout.of(KVFormat("int8"), 2, 1, 8) == LAYOUT
    assert LAYOUT.block_bytes == LAYOUT.nbytes(BLOCK) == 2 * 1 * BLOCK * (2 * 8 + 2 * 2)


def test_layout_refusals():
    layout = BlockLayout.of(KVFormat("float32"), 1, 1, 4)
    with pytest.raises(ValueError, match="has 1 arrays, got 2"):
        layout.pack([np.zeros(3), np.zeros(3)])
    with pytest.raises(ValueError, match="expected float32 of shape"):
        layout.pack([np.zeros((1, 1, BLOCK, 8), np.float16)])
    with pytest.raises(ValueError, match="have 4096 bytes, got 4095"):
        layout.unpack(bytes(4095))
    assert layout.codec != BlockLayout.of(KVFormat("float32"), 1, 1, 8).codec


def test_chains_of_an_identity():
    ids = tokens(300)
    chain = ALICE.chain(ids, tail=True)
    assert [info.n_tokens for info in chain] == [128, 128, 44] and [info.position for info in chain] == [0, 128, 256]
    assert [info.parent for info in chain] == [ALICE.root, chain[0].key, chain[1].key]
    assert ALICE.chain(ids) == chain[:2] and chain[0].first and not chain[1].first
    assert {info.key for info in chain}.isdisjoint(info.key for info in BOB.chain(ids, tail=True))
    other = [
        ALICE.chain(ids, extras)[0].key for extras in (Extras(policy="x"), Extras(adapter=b"x"), Extras(media=b"x"))
    ]
    assert len({chain[0].key, *other}) == 4
    # A tail of n tokens is never taken for anything else that begins alike.
    assert len({ALICE.chain(ids[:n], tail=True)[-1].key for n in range(1, 129)}) == 128
    assert isinstance(chain[0], BlockInfo) and chain[2].expected_key() == chain[2].key


def test_namespaces_outlive_the_process(tmp_path):
    path = tmp_path / "state" / "secret"
    first = Namespaces.load(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Namespaces.load(path).of("alice") == first.of("alice") != first.of("bob")
    assert Namespaces.load(tmp_path / "other").of("alice") != first.of("alice")
    assert [p.name for p in path.parent.iterdir()] == ["secret"]
    path.write_text("short")
    with pytest.raises(ValueError, match="must hold a secret of at least 32 bytes"):
        Namespaces.load(path)
