"""Contexts of key-value pairs, and the questions that ask for them, in a model's own tokens.

Forms, couples and how difficult lists are stand in `docs/probes/retrieval.md`. Lines have *one shape*: key and value take
the same number of tokens in every line, so that a pair's depth decides where it stands, and nothing else does.

Source: ours; the form "json" is that of [Liu+], arXiv 2307.03172, with words for UUIDs.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ..errors import InputError
from ..models.checks import check_length
from ..models.view import View
from .prompts import FirstToken, check_highest, first_policy, put_first

Keys: TypeAlias = Literal["apart", "alike"]

NOUNS = Path(__file__).with_name("nouns.txt")  # common ones, most of them one token of a large vocabulary
COLOURS = (
    *("red", "blue", "green", "black", "white", "brown", "yellow", "pink", "purple", "gray", "golden", "silver"),
    *("dark", "pale", "bright", "old", "new", "small", "large", "long", "short", "round", "flat", "heavy"),
)
LIKE_VALUES = ("house", "book")  # nouns that share no beginning: what differs between lines with them is the value


class Rung(NamedTuple):
    """How difficult recall is made: N pairs, how their keys resemble each other, digits of a value (0: values are nouns)."""

    pairs: int
    keys: Keys = "apart"
    digits: int = 4

    def __str__(self) -> str:
        return f"{self.pairs} pairs, keys {self.keys}, {f'{self.digits} digits' if self.digits else 'values are nouns'}"


class Template(NamedTuple):
    """The form of a context: `head`, where {keys} names all keys, a line per pair, `tail`; and of a question."""

    head: str
    line: str
    tail: str
    question: str


# The blank line before the question matters: a question that goes on with the list is read as its next line, whose key would
# be a new one, and SmolLM2-135M then answers few of them.
LINE = "The code for {key} is {value}.\n"
TEMPLATES = {
    "sentences": Template("", LINE, "", "\nThe code for {key} is {value}"),
    "json": Template("JSON data:\n{\n", ' "{key}": "{value}",\n', "}\n", 'Key: "{key}"\nValue: "{value}"'),
    "reworded": Template("", LINE, "", "\nQuestion: Which code belongs to {key}?\nAnswer: {value}"),
    "announced": Template("There is a code for {keys}.\n\n", LINE, "", "\nThe code for {key} is {value}"),
}


@dataclass(frozen=True)
class Couple:
    """Two contexts of one shape without a common key, in token ids."""

    contexts: tuple[tuple[int, ...], tuple[int, ...]]
    # Of each context, for every depth, the ids that ask for the pair at it, and those of the value, which follow.
    questions: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    answers: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    starts: tuple[tuple[int, int], ...]  # of every depth, where its line and its value begin, the same for both


class Shape(NamedTuple):
    """How many tokens a line or a question has before its value, in it, and after it."""

    before: int
    value: int
    after: int


def filled(form: str, key: str, value: str) -> str:
    """A line or question with its key and value; other braces stay."""
    return form.replace("{key}", key).replace("{value}", value)


def read_template(name: str) -> Template:
    """A form by its name."""
    if name not in TEMPLATES:
        raise InputError(f"template '{name}' is none of {', '.join(TEMPLATES)}; give one of them")
    return TEMPLATES[name]


class Maker:
    """Makes the couples of one rung for one model, whose tokenizer decides; `first` as in `probes.prompts`."""

    def __init__(self, model: View, rung: Rung, template: Template, *, first: FirstToken | int = "auto") -> None:
        if model.tokenizer is None:
            raise InputError(
                f"{model.identity.name} has no tokenizer; put its files beside the weights, or in Python give tokenizer=..."
            )
        if rung.pairs < 2 or rung.digits not in (0, *range(2, 16)):
            raise InputError(f"{rung}: give at least 2 pairs and 2 to 15 digits, or 0 for nouns")
        self.model, self.rung, self.template = model, rung, template
        self.policy = first_policy(model, first)
        self._ids = cache(self._encoded)
        words = NOUNS.read_text(encoding="utf-8").split()
        forms = (self.template.line, self.template.question)
        if rung.keys == "apart":
            self._nouns, self._colours = self._alike(words, forms), [""]
        else:  # a grid of colours and nouns, as square as it can be
            side = math.ceil(math.sqrt(rung.pairs))
            self._colours = [f"{colour} " for colour in COLOURS][: min(side, len(COLOURS))]
            self._nouns = self._alike(words, forms, self._colours[0])
            self._colours = self._alike(self._colours, forms, after=self._nouns[0])
        self._each = math.ceil(rung.pairs / len(self._colours))  # nouns of one context's keys
        needed = self._each + (0 if rung.digits else rung.pairs)
        if 2 * needed > len(self._nouns):
            most = len(self._nouns) // 2 * rung.pairs // needed
            raise InputError(
                f"the tokenizer of {model.identity.name} gives {len(self._nouns)} nouns one shape, enough for {most} "
                f"pairs; {rung.pairs} are asked for"
            )
        self._key = f"{self._colours[0]}{self._nouns[0]}"
        self._shapes = tuple(self._shape(form, self._key) for form in forms)
        if not all(shape.value for shape in self._shapes):
            raise InputError(
                f"the tokenizer of {model.identity.name} does not tell numbers apart; load the model's own"
            )
        check_length(model, self.length(), f"{rung} take {self.length()} tokens", "ask for fewer pairs")

    def couple(self, seed: int, number: int) -> Couple:
        """The couple of this number."""
        rung = self.rung
        draw = np.random.default_rng([seed, number, rung.pairs, rung.digits, int(rung.keys == "alike")])
        nouns = [self._nouns[i] for i in draw.permutation(len(self._nouns))]
        sides = []
        for side_nouns in (nouns[: self._each], nouns[self._each : 2 * self._each]):
            keys = [f"{colour}{noun}" for colour, noun in product(self._colours, side_nouns)]
            keys = [keys[i] for i in draw.permutation(len(keys))[: rung.pairs]]
            sides.append(list(zip(keys, self._values(draw, nouns[2 * self._each :], len(sides)), strict=True)))
        contexts = [self._context(side) for side in sides]
        asked = [[self._asked(key, value) for key, value in side] for side in sides]
        questions, answers = (tuple(tuple(pair[n] for pair in side) for side in asked) for n in (0, 1))
        ids = tuple(ids for ids, _ in contexts)
        return Couple(ids, questions, answers, contexts[0][1])  # type: ignore[arg-type]

    def length(self) -> int:
        """Tokens of a context, a question and its answer together."""
        line, question = self._shapes
        around = len(self._start([self._key] * self.rung.pairs)) + len(self._ids(self.template.tail))
        return around + self.rung.pairs * sum(line) + question.before + question.value

    def _start(self, keys: Sequence[str]) -> list[int]:
        return [*put_first(self.policy), *self._ids(self.template.head.replace("{keys}", ", ".join(sorted(keys))))]

    def _context(self, side: Sequence[tuple[str, str]]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        ids, starts = self._start([key for key, _ in side]), []
        if len(ids) != len(self._start([self._key] * len(side))):
            raise InputError(
                "keys take another number of tokens before the list than in it; leave {keys} out of its head"
            )
        for key, value in side:
            line = self._ids(filled(self.template.line, key, value))
            if len(line) != sum(self._shapes[0]):
                raise InputError(
                    f"'{key}' and '{value}' make a line of another shape; give keys apart, or another number of digits"
                )
            starts.append((len(ids), len(ids) + self._shapes[0].before))
            ids += line
        return (*ids, *self._ids(self.template.tail)), tuple(starts)

    def _asked(self, key: str, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ids, before = self._ids(filled(self.template.question, key, value)), self._shapes[1].before
        return ids[:before], ids[before:]

    def _values(self, draw: np.random.Generator, nouns: Sequence[str], side: int) -> list[str]:
        """Of one side: numbers, or nouns that are neither keys nor values of the other side."""
        count, forms = self.rung.pairs, (self.template.line, self.template.question)
        if not self.rung.digits:
            return list(nouns[side * count : (side + 1) * count])
        found: dict[str, None] = {}
        lowest = 10 ** (self.rung.digits - 1)
        for _ in range(100 * count):
            value = str(draw.integers(lowest, 10 * lowest))
            if all(
                len(self._ids(filled(f, self._key, value))) == sum(s) for f, s in zip(forms, self._shapes, strict=True)
            ):
                found[value] = None
            if len(found) == count:
                return list(found)
        raise InputError(f"too few numbers of {self.rung.digits} digits have one shape; give more digits")

    def _alike(self, words: Sequence[str], forms: Sequence[str], before: str = "", after: str = "") -> list[str]:
        """Those of the words whose lines and questions have the most frequent shape."""
        shapes = {word: tuple(self._shape(form, f"{before}{word}{after}") for form in forms) for word in words}
        usual = Counter(shapes.values()).most_common(1)[0][0]
        return [word for word, shape in shapes.items() if shape == usual]

    def _shape(self, form: str, key: str) -> Shape:
        """Of a line or question with this key; what two values without a common digit leave alone is not value."""
        values = [digit * self.rung.digits for digit in "17"] if self.rung.digits else LIKE_VALUES
        one, other = (self._ids(filled(form, key, value)) for value in values)
        common = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        pairs = zip(reversed(one), reversed(other), strict=False)
        after = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), 0)
        return Shape(common, len(one) - common - after, after)

    def _encoded(self, text: str) -> tuple[int, ...]:
        assert self.model.tokenizer is not None
        ids = tuple(self.model.tokenizer(text, add_special_tokens=False).input_ids)
        check_highest(self.model, max(ids, default=0))
        return ids
