"""Memory that is used again."""

from __future__ import annotations

import numpy as np

from umbra.cache.buffers import Buffers


def test_what_is_given_back_comes_again_and_no_more_is_kept_than_asked_for():
    buffers = Buffers(1000, most=3000)
    taken = [buffers.take() for _ in range(5)]
    assert len({buffer.ctypes.data for buffer in taken}) == 5
    assert all(buffer.dtype == np.uint8 and buffer.shape == (1000,) for buffer in taken)
    for buffer in taken:
        buffers.give(buffer)
    again = {buffers.take().ctypes.data for _ in range(3)}
    assert again == {buffer.ctypes.data for buffer in taken[2:]}


def test_a_buffer_is_there_even_where_none_is_kept():
    assert Buffers(1000, most=0).take().shape == (1000,)
