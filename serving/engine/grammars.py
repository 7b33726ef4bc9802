"""Grammars as masks: which tokens may come next, by llguidance.

`Grammars` compiles what requests ask for, once each, in the thread that asks. A `Guide` follows one answer: after every
step it finds the masks of the next pass's rows, along the tokens that are drafted for it. `Guides` has threads that do
this while the device is busy with others' steps, so that no step waits for a mask; of a request that runs alone, the
step's thread does it at once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...configs.machine import cores
from .grammar import JSON_FORM, BadGrammar, Grammar
from .landing import Ends, Landing
from .request import FORCED

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from ...model.tokenizer import Tokenizer

MAX_COMPILED = 256
"""Grammars that are kept, the last used ones."""

LIMITS = dict(
    max_items_in_row=2_000, initial_lexer_fuel=2_000_000, step_lexer_fuel=300_000, step_max_items=100_000,
    max_lexer_states=100_000, max_grammar_size=200_000, verbose_errors=False,
)  # fmt: skip
"""What a grammar may cost, in units of llguidance: a step takes tens of milliseconds at most."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A grammar, ready to be followed. `first` is the mask of an answer's first token."""

    matcher: LLMatcher
    first: np.ndarray  # uint32 [ceil(V / 32)]
    ends: Ends
    landing: Landing | None = None


@dataclasses.dataclass(frozen=True)
class Steering:
    """The next pass of one answer: `masks` uint32 `[1 + n, ceil(V / 32)]` of its rows, and the n tokens drafted for it,
    all of which the masks allow."""

    masks: np.ndarray
    drafts: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chain:
    """Drafts of a slot for its next pass, as the device has them."""

    tokens: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()


class Grammars:
    """Compiles grammars for one vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._vocabulary: tuple[LLTokenizer, Ends] | None = None
        self.words = -(-vocab_size // 32)

    def prepare(self) -> None:
        """Read the vocabulary, which takes about a second, before the first grammar needs it."""
        self._read()

    def _read(self) -> tuple[LLTokenizer, Ends]:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar ready to be followed. Raises `BadGrammar` in one sentence. Takes milliseconds for a new one,
        more if it is large: not for the event loop."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary, ends = self._read()
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        matcher = LLMatcher(vocabulary, _definition(grammar), log_level=0, limits=limits)
        first = np.zeros(self.words, np.uint32)
        if not matcher.is_error():
            _fill(matcher, first)
        if matcher.is_error():
            raise _bad(grammar, matcher.get_error())
        if not first.any():
            raise BadGrammar(f"nothing matches the {_NAMES[grammar.kind]}", grammar.field)
        return Compiled(matcher, first, ends, self._landing(grammar, matcher, ends))

    def _landing(self, grammar: Grammar, matcher: LLMatcher, ends: Ends) -> Landing | None:
        # A copy: a matcher that has run into a limit on the way stays of no use.
        way = ends.way(matcher.deep_copy(), self.words, _fill) if grammar.longest_part is not None else None
        if way is None:
            return None
        characters = sum(len(self._tokenizer.token_bytes(token)) for token in way)
        return Landing(len(way), -(-(grammar.longest_part or 0) * len(way) // max(1, characters)))


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "choice", "grammar": "grammar"}


_PATTERN = re.compile(r"regex parse error:\n {4}(.*)\n( *)\^+\nerror: (.*)")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")


def _bad(grammar: Grammar, error: str) -> BadGrammar:
    """What is wrong, in one line, out of llguidance's message, which shows its own sources and those of its parsers."""
    name = _NAMES[grammar.kind]
    if "NoExtensionBias" in error:
        return BadGrammar(f"nothing matches the {name}", grammar.field)
    return BadGrammar(f"the {name} cannot be followed: {_reason(grammar, error)}", grammar.field)


def _reason(grammar: Grammar, error: str) -> str:
    if (found := _PATTERN.search(error)) is not None:
        pattern, at, reason = found[1], len(found[2]) - 3, found[3]
        if grammar.kind != "regex":
            return f"{reason}, at character {at} of the pattern {pattern[:100]!r}"
        return f"{reason}, at character {at}" if pattern == grammar.text else reason  # else some were escaped
    if "lookarounds not supported" in error:
        return "look-around, such as \\b, is not supported"
    if "regex parse error" in error:  # of several lines
        return error.rpartition("error: ")[2].splitlines()[0][:200]
    lines = error.strip().splitlines() or ["it is not valid"]
    line = lines[0].partition(", '")[0][:200]
    place = _PLACE.match(line)
    return line if place is None else f"{place[3]}, in line {place[1]} at character {place[2]}"


def _definition(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if grammar.kind == "json_schema":
            schema = json.loads(grammar.text)
            form = schema if isinstance(schema, dict) else {"anyOf": [schema]}
            return LLMatcher.grammar_from_json_schema(form, overrides=JSON_FORM)  # type: ignore[arg-type]
        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        if grammar.kind == "choice":
            choices = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except Exception as error:  # whatever the converters stumble over
        raise _bad(grammar, str(error)) from None


def _vocabulary(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> tuple[LLTokenizer, Ends]:
    from llguidance import LLTokenizer, TokenizerWrapper

    special = getattr(tokenizer, "special_ids", {})
    texts = [tokenizer.token_bytes(i) for i in range(min(size, tokenizer.vocab_size))]
    greedy = _Greedy(texts)

    class Wrapped:
        """What llguidance asks of a tokenizer."""

        eos_token_id = eos_ids[0]
        bos_token_id = None
        special_token_ids = sorted({*special.values(), *eos_ids})
        tokens = list(texts)

        def __call__(self, text: str | bytes) -> list[int]:
            data = text.encode() if isinstance(text, str) else text
            ids = tokenizer.encode(data.decode("utf-8", "replace"))
            same = b"".join(map(tokenizer.token_bytes, ids)) == data  # some put a space in front
            return ids if same else greedy(data)

    for text, i in special.items():
        if i < len(texts):
            Wrapped.tokens[i] = text.encode()
    vocabulary = LLTokenizer(TokenizerWrapper(Wrapped()), n_vocab=size, eos_token=list(eos_ids))
    return vocabulary, Ends(texts, eos_ids, size, getattr(tokenizer, "eos_id", None))


class _Greedy:
    """Cuts text into the longest tokens there are, from left to right."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ids = {text: i for i, text in reversed(list(enumerate(tokens))) if text}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                break  # a vocabulary without bytes: what comes is not forced
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


def _fill(matcher: LLMatcher, mask: np.ndarray) -> None:
    """Write the tokens that may come next into `mask`. Other threads run meanwhile."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _only(mask: np.ndarray) -> int | None:
    """The one token that `mask` allows, if it is one."""
    found = np.flatnonzero(mask)
    if len(found) != 1:
        return None
    word = int(mask[found[0]])
    return 32 * int(found[0]) + word.bit_length() - 1 if word & (word - 1) == 0 else None


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 5] >> np.uint32(token & 31) & 1)


class Guide:
    """Follows one answer through its grammar. Used by one thread at a time."""

    def __init__(self, compiled: Compiled, room: int) -> None:
        """`room`: tokens that the answer may have."""
        self._matcher = compiled.matcher.deep_copy()
        self._words, self._ends, self._landing = len(compiled.first), compiled.ends, compiled.landing
        self._way: tuple[int, ...] | None = None
        """From about where the answer is to its end; None: not known."""
        self._ways: list[tuple[int, ...] | None] = []
        """That way at every place of the next pass. It follows from the tokens before it and nothing else."""
        self.steering: Steering | None = Steering(compiled.first[None])
        """The next pass; None while it is being found."""
        self.error: str | None = None
        """Why the answer cannot go on, in one sentence."""
        if self._landing is not None and room <= self._landing.zone:
            self.advance((), Chain(), 0, room)

    def advance(self, tokens: Sequence[int], chain: Chain, most: int, room: int) -> None:
        """The answer went on with `tokens`, `chain` is drafted behind them, and there is room for `room` more: find the
        next pass, with at most `most` drafts. A drafted token that the grammar does not allow ends the chain, and where
        the grammar leaves only one token, that is drafted."""
        try:
            if all(self._follow(place, token) for place, token in enumerate(tokens)):
                if not tokens:  # still before the answer, and the room for it may have shrunk
                    self._way = None
                self.steering = self._steer(chain, most, room)
        except Exception as error:  # the answer must end, whatever happened in this thread
            self.error = f"the grammar cannot be followed: {error}"

    def _follow(self, place: int, token: int) -> bool:
        """Consume a token that was chosen at `place` of the last pass."""
        if place < len(self._ways):
            self._way = self._ways[place]
        return self._consume(token)

    def _consume(self, token: int) -> bool:
        return self._matcher.consume_token(token) or self._fail()

    def _fail(self) -> bool:
        self.error = f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}"
        return False

    def _steer(self, chain: Chain, most: int, room: int) -> Steering:
        masks = np.zeros((1 + most, self._words), np.uint32)
        drafts: list[int] = []
        sources: list[int] = []
        odds: list[float] = []
        self._ways = []
        follows = True  # the device's chain
        for place in range(1 + most):
            if not self._mask(masks[place], room - place):
                break
            self._ways.append(self._way)
            if place == most or self._matcher.is_stopped():
                break
            token = _only(masks[place])
            if token is None:
                token = self._ends.only_end(masks[place])
            drafted = chain.tokens[place] if follows and place < len(chain.tokens) else None
            if token is None and (drafted is None or not _allows(masks[place], drafted)):
                break
            follows = follows and token in (None, drafted)
            drafts.append(drafted if token is None else token)  # type: ignore[arg-type]
            sources.append(chain.sources[place] if token is None else FORCED)
            odds.append(chain.odds[place] if token is None else 1.0)
            if not self._consume(drafts[-1]):
                break
        if drafts:
            self._matcher.rollback(len(drafts))
        return Steering(masks[: 1 + len(drafts)], tuple(drafts), tuple(sources), tuple(odds))

    def _mask(self, mask: np.ndarray, room: int) -> bool:
        """Write what may come next, with room for `room` tokens, into `mask`; whether the grammar could be followed."""
        matcher, landing = self._matcher, self._landing
        if landing is not None and room <= landing.zone and not matcher.is_stopped():
            self._way = self._ends.way(matcher, self._words, _fill, self._way)
            if self._way and landing.due(len(self._way), room):
                self._way = self._ends.way(matcher, self._words, _fill)  # is there none that is shorter?
            if self._way and landing.due(len(self._way), room):
                token = self._way[0]
                mask[token >> 5] = np.uint32(1) << np.uint32(token & 31)
                return True
        _fill(matcher, mask)
        return not matcher.is_error() or self._fail()


def _first_line(text: str) -> str:
    return (text.splitlines() or ["it is too complex"])[0][:200]


class Guides:
    """Who finds the next passes of answers: threads, or the caller."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = 0
        self._workers = concurrent.futures.ThreadPoolExecutor(min(4, max(1, cores())), thread_name_prefix="umbra-mask")

    def run(self, work: Callable[[], None], *, here: bool = False) -> None:
        """Have `work` done, which must not raise; `here`: by the caller, who has nothing else to do."""
        if here:
            work()
            return
        with self._changed:
            self._busy += 1
        self._workers.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether anything is being found."""
        return self._busy > 0

    def wait(self, seconds: float, *, everything: bool) -> None:
        """Until everything, or anything more, is found, but no longer than `seconds`."""
        with self._changed:
            least = 0 if everything else max(0, self._busy - 1)
            self._changed.wait_for(lambda: self._busy <= least, seconds)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
