"""How the table of tokens is stored, apart from all other weights: rows of frequent tokens may be kept more precisely.

A table has one row for each token, but text uses few of them: most rows can be coarser at little cost.
"""

from __future__ import annotations

import dataclasses

PRECISIONS = ("int8", "int4")


@dataclasses.dataclass(frozen=True)
class EmbeddingForm:
    """The rows of the `frequent` most frequent tokens in `precisions[0]`, all others in `precisions[1]`; with
    `frequent` 0 all rows in `precisions[0]`. Without precisions: as the other weights (of the file) are."""

    frequent: int = 0
    precisions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wanted = (0, 1) if not self.frequent else (2,)
        if self.frequent < 0 or len(self.precisions) not in wanted:
            raise ValueError(f"an embedding of {self.frequent} rows apart takes {wanted[-1]} precisions")
        for precision in self.precisions:
            if precision not in PRECISIONS:
                raise ValueError(f"embedding precision {precision!r} is not supported; supported: int8, int4")

    def __str__(self) -> str:
        if not self.precisions:
            return "file"
        return f"{self.frequent}:{','.join(self.precisions)}" if self.frequent else self.precisions[0]


FILE = EmbeddingForm()
"""As the file has it."""


def parse_embedding(text: str) -> EmbeddingForm:
    """`file`, `int8`, `int4`, or for example `4096:int8,int4`: 4,096 frequent rows in int8 and the rest in int4. Raises
    `ValueError`."""
    if text == "file":
        return FILE
    count, colon, precisions = text.rpartition(":")
    try:
        if colon and not (count.isdigit() and int(count) > 0):
            raise ValueError
        return EmbeddingForm(int(count or 0), tuple(precisions.split(",")))
    except ValueError:
        raise ValueError(
            f"embedding {text!r} is not supported; supported: file, int8, int4, or N:int8,int4 (the N most frequent "
            "tokens in the first precision, all others in the second)"
        ) from None
