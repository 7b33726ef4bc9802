"""The header reader against the `gguf` package, and on damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from umbra.model.gguf_header import GGUFError, read_header


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.eps", 1e-5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "é日🙂")
    writer.add_array("a.words", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 2.0])
    writer.add_tensor("t.one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("t.two", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_reads_what_the_gguf_package_reads(path: Path) -> None:
    header, reader = read_header(path), gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            value = header.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert [(t.name, t.shape[::-1], t.type, t.offset) for t in header.tensors] == [
        (t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset) for t in reader.tensors
    ]
    assert header.tensors[0].shape == (2, 3)
    data = np.frombuffer(path.read_bytes(), np.float32, 6, header.tensors[0].offset)
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_file_cut_off_anywhere_in_its_header_is_refused(path: Path) -> None:
    raw = path.read_bytes()
    start = read_header(path).tensors[0].offset
    for size in [*range(0, start - 40, 7)]:
        path.write_bytes(raw[:size])
        with pytest.raises(GGUFError, match=r"x\.gguf"):
            read_header(path)


def test_damage_is_named(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(b"PK\3\4" + raw[4:])
    with pytest.raises(GGUFError, match="is not a GGUF file: it starts with"):
        read_header(path)
    path.write_bytes(raw[:4] + b"\x09\0\0\0" + raw[8:])
    with pytest.raises(GGUFError, match="is GGUF version 9; supported: 2 and 3"):
        read_header(path)
    place = raw.index(b"a.text") + len("a.text")
    path.write_bytes(raw[:place] + b"\x63\0\0\0" + raw[place + 4 :])
    with pytest.raises(GGUFError, match=r"damaged or cut off at field 'a\.text' \(unknown value type 99\)"):
        read_header(path)
    path.write_bytes(raw[: place + 4] + b"\xff" * 8 + raw[place + 12 :])
    with pytest.raises(GGUFError, match=r"field 'a\.text'.*passes the end of the file"):
        read_header(path)
