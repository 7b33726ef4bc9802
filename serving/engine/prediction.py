"""How much of a predicted answer came true."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def came_true(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens of `prediction` that `answer` has, in order.

    Both are walked through together. Where they differ, the prediction is left until two tokens in a row of the answer
    are found further on in it. Depends on nothing but the two, however the answer was drafted.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for i in range(len(prediction) - 1):
        places.setdefault((prediction[i], prediction[i + 1]), []).append(i)
    at = found = 0
    counted = False  # the token before
    for i, token in enumerate(answer):
        if at < len(prediction) and prediction[at] == token:
            at, found, counted = at + 1, found + 1, True
            continue
        known = places.get((answer[i - 1], token), []) if i else []
        later = bisect.bisect_left(known, at)
        if later < len(known):
            at, found, counted = known[later] + 2, found + 1 + (not counted), True
        else:
            counted = False
    return min(found, len(prediction))
