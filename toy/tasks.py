"""What the toys are trained on: random sequences and what is asked of them, drawn in blocks of many steps.

A task draws from a generator that its training loop makes of (seed, block number), so that what a model sees depends on its
own seed and step alone, not on the models beside it.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.errors import InputError

from .checks import Settings, at_least


class Drawn(NamedTuple):
    """Sequences of a block of steps: token ids `[step, B, T]` or vectors `[step, B, T, d]`, and what else was drawn."""

    inputs: Tensor
    hidden: Tensor  # [step, B, ...]; what a task needs to know the answers by


class Task(Settings):
    """Something to train on; sequences are tokens of a `vocabulary`, or vectors of a `width`, and the other is None.

    Unless it says otherwise, a task has no world, and answers that are drawn with the sequences.
    """

    kind: ClassVar[str]
    batch: Any  # sequences per step
    length: Any  # positions of a sequence
    outputs: Any  # answers that can be right
    vocabulary: Any = None
    width: Any = None

    def world(self, seed: int, device: torch.device | str) -> Any:
        """What stays as it is throughout training: class means, labels; None for tasks without."""
        return None

    def draw(self, world: Any, generator: torch.Generator, steps: int) -> Drawn:
        """The sequences of `steps` steps, on the generator's device."""
        raise NotImplementedError

    def answers(self, drawn: Drawn) -> Int[Tensor, "step batch"]:
        """The class or token to be predicted at the last position."""
        return drawn.hidden


@dataclass(frozen=True)
class Copying(Task):
    """Uniform random tokens; the answer is the one at position `target`, from 0 [Liu-7], or from the end if negative.

    -2 is the token before the last [Liu-4]. With `bos` the last id of the vocabulary stands first in every sequence and
    nowhere else, and is no answer. With `zipf` above 0 token n is drawn with a share of `(n + 1)^-zipf` over their sum.

    Raises:
        InputError: no such position, or one that holds BOS; shares that grow.
    """

    kind = "copying"
    LEAST: ClassVar = {"target": -math.inf}
    vocabulary: int = 10  # ids in all, that of BOS among them
    length: int = 10  # positions in all, that of BOS among them
    target: int = -1
    batch: int = 128
    bos: bool = False
    zipf: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("vocabulary", self.vocabulary, 2 + self.bos)
        if not -self.length <= self.target < self.length:
            raise InputError(
                f"target={self.target} is no position of {self.length}; give from {-self.length} to {self.length - 1}"
            )
        if self.bos and self.target % self.length == 0:
            raise InputError(f"target={self.target} is BOS in every sequence; give from 1 to {self.length - 1}")

    @property
    def outputs(self) -> int:
        return self.vocabulary - self.bos

    @property
    def first(self) -> int | None:
        """The id of BOS, if there is one."""
        return self.vocabulary - 1 if self.bos else None

    @property
    def shares(self) -> Float[Tensor, " token"]:
        """How often each token is drawn; they sum to 1."""
        shares = torch.arange(1, self.outputs + 1, dtype=torch.float64) ** -self.zipf
        return (shares / shares.sum()).float()

    def draw(self, world: None, generator: torch.Generator, steps: int) -> Drawn:
        size = (steps, self.batch, self.length)
        if self.zipf:
            ends = self.shares.cumsum(0)[:-1].to(generator.device)  # what is drawn beyond the last is the last
            tokens = torch.searchsorted(
                ends, torch.rand(size, generator=generator, device=generator.device), right=True
            )
        else:
            tokens = torch.randint(self.outputs, size, generator=generator, device=generator.device)
        if self.bos:
            tokens[..., 0] = self.vocabulary - 1
        return Drawn(tokens, tokens)

    def answers(self, drawn: Drawn) -> Int[Tensor, "step batch"]:
        return drawn.hidden[..., self.target]


class World(NamedTuple):
    """The classes and labels of in-context retrieval."""

    means: Float[Tensor, "class d"]
    labels: Float[Tensor, "label d"]
    label_of: Int[Tensor, " class"]
    common: Float[Tensor, " d"]  # the direction that all items share in "fixed" data


@dataclass(frozen=True)
class InContext(Task):
    """In-context retrieval [Wu, section 5]: `items` pairs of an item and its class's label, then a query; predict its label.

    A sequence has items / burst classes, `burst` items of each in random order, 2 items + 1 vectors of length `width`. An
    item of class mean mu is `(mu + eps eta) / sqrt(1 + eps^2)` with fresh noise eta ("gaussian"), or with one eta for all
    items and eps = `anisotropy` ("fixed": every class is one vector, and all lean to one side). Components of all vectors
    have standard deviation `1/sqrt(width)` at scale "text", as the paper says, and `1/width` at scale "program", as its
    program draws them. The query's class is that of the item at a random position, or at one of `biased`.
    """

    kind = "in-context"
    LEAST: ClassVar = {"biased": 0}
    items: int = 8
    width: int = 64
    classes: int = 2048
    labels: int = 32
    burst: int = 4
    eps: float = 0.75
    anisotropy: float = 0.75
    scale: Literal["text", "program"] = "text"
    data: Literal["gaussian", "fixed"] = "gaussian"
    biased: tuple[int, ...] | None = None
    batch: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items % self.burst:
            raise InputError(f"burst={self.burst} does not divide {self.items} items; give a divisor of it")
        at_least("classes", self.classes, self.items // self.burst)
        if self.biased and max(self.biased) >= self.items:
            raise InputError(f"biased={self.biased} are no items; give numbers from 0 to {self.items - 1}, or None")

    @property
    def length(self) -> int:
        """Vectors per sequence."""
        return 2 * self.items + 1

    @property
    def outputs(self) -> int:
        return self.labels

    @property
    def deviation(self) -> float:
        """Standard deviation of a component of every vector that is drawn."""
        return self.width**-0.5 if self.scale == "text" else 1 / self.width

    def world(self, seed: int, device: torch.device | str) -> World:
        generator = torch.Generator(device).manual_seed(seed)
        means, labels, common = (
            torch.randn(*size, generator=generator, device=device) * self.deviation
            for size in ((self.classes, self.width), (self.labels, self.width), (self.width,))
        )
        label_of = torch.randint(self.labels, (self.classes,), generator=generator, device=device)
        return World(means, labels, label_of, common)

    def draw(self, world: World, generator: torch.Generator, steps: int) -> Drawn:
        asked = self._drawn_classes(generator, (steps, self.batch))  # [steps, B, items + 1]
        inputs = self._sequences(world, self._vectors(world, world.means[asked], generator), world.label_of[asked])
        return Drawn(inputs, world.label_of[asked[..., -1]])

    def pairs(self, world: World, generator: torch.Generator, n: int, right: int, wrong: int) -> Drawn:
        """Test sequences of novel classes in which items `right` and `wrong` are one and the same vector.

        The query is of the class of `right`, whose label is the answer [Wu, section 5]; `wrong` carries whatever label its
        own class had (by chance the same one in 3 of 7 cases at burst 4). The published gap is accuracy[a right, b wrong]
        - accuracy[b right, a wrong]. The generator must not be seeded as the world is: its classes would be the world's.

        Returns:
            One step of n sequences.
        """
        return self._tests(world, generator, n, at=right, copied=wrong)

    def novel(self, world: World, generator: torch.Generator, n: int) -> Drawn:
        """Test sequences made as in training, of novel classes: nothing but the context says what their labels are."""
        return self._tests(world, generator, n)

    def relabelled(self, world: World, generator: torch.Generator, n: int) -> Drawn:
        """Test sequences of training's classes, whose labels have changed places; `hidden` is the query's own of training.

        Who retrieves answers what the context says; who knows classes by heart and looks in the context for one that fits
        answers `hidden`, which stands there as the label of another class.
        """
        asked = self._drawn_classes(generator, (1, n))
        classes = asked[..., :-1].sort(-1).values[..., :: self.burst]  # those of a sequence, each once
        place = (asked[..., None] == classes[..., None, :]).long().argmax(-1)
        shown = world.label_of[classes.roll(1, -1)].gather(-1, place)
        x = self._vectors(world, world.means[asked], generator)
        return Drawn(self._sequences(world, x, shown), world.label_of[asked[..., -1]])

    def single(self, world: World, generator: torch.Generator, n: int, at: int) -> Drawn:
        """Test sequences of as many novel classes as items, one item each; the query is of the class of item `at`."""
        return self._tests(world, generator, n, at=at, burst=1)

    def _tests(
        self,
        world: World,
        generator: torch.Generator,
        n: int,
        *,
        at: int | None = None,
        copied: int | None = None,
        burst: int | None = None,
    ) -> Drawn:
        """One step of n sequences of classes nobody has seen, `burst` items of each; the query is of the class of item `at`.

        `at` None: as in training. Item `copied` is replaced by a copy of item `at`.
        """
        kinds, device = self.items // (burst or self.burst), generator.device
        means = torch.randn(n, kinds, self.width, generator=generator, device=device) * self.deviation
        labels = torch.randint(self.labels, (n, kinds), generator=generator, device=device)
        own = torch.rand(n, self.items, generator=generator, device=device).argsort(-1) % kinds  # class of each item
        query = self._asked(generator, (n,)) if at is None else torch.full((n, 1), at, device=device)
        asked = torch.cat([own, own.gather(-1, query)], -1)
        x = self._vectors(world, means.gather(1, asked[..., None].expand(-1, -1, self.width)), generator)
        if copied is not None:
            x[:, copied] = x[:, at]
        found = labels.gather(1, asked)
        return Drawn(self._sequences(world, x, found)[None], found[None, :, -1])

    def _drawn_classes(self, generator: torch.Generator, size: tuple[int, ...]) -> Int[Tensor, "*size item_and_1"]:
        """The classes of the items, and that of the query."""
        chosen = self._classes(generator, size)
        return torch.cat([chosen, chosen.gather(-1, self._asked(generator, size))], -1)

    def _asked(self, generator: torch.Generator, size: tuple[int, ...]) -> Int[Tensor, "*size 1"]:
        """The item whose class the query has."""
        if self.biased is None:
            return torch.randint(self.items, (*size, 1), generator=generator, device=generator.device)
        which = torch.randint(len(self.biased), (*size, 1), generator=generator, device=generator.device)
        return torch.tensor(self.biased, device=generator.device)[which]

    def _classes(self, generator: torch.Generator, size: tuple[int, ...]) -> Int[Tensor, "*size item"]:
        """Distinct classes, `burst` items of each, in random order."""
        kinds = self.items // self.burst
        # Distinct draws without a permutation of all classes: the n-th skips those before it, smallest first.
        found: list[Tensor] = []
        for n in range(kinds):
            new = torch.randint(self.classes - n, size, generator=generator, device=generator.device)
            for before in torch.stack(found, -1).sort(-1).values.unbind(-1) if found else ():
                new = new + (new >= before)
            found.append(new)
        order = torch.rand(*size, self.items, generator=generator, device=generator.device).argsort(-1) % kinds
        return torch.stack(found, -1).gather(-1, order)

    def _vectors(self, world: World, means: Float[Tensor, "*row d"], generator: torch.Generator) -> Tensor:
        """Items of these class means."""
        if self.data == "fixed":
            return (means + self.anisotropy * world.common) / (1 + self.anisotropy**2) ** 0.5
        noise = torch.randn(means.shape, generator=generator, device=generator.device)
        return means.add_(noise, alpha=self.eps * self.deviation).div_((1 + self.eps**2) ** 0.5)

    def _sequences(self, world: World, items: Float[Tensor, "*n item d"], labels: Int[Tensor, "*n item"]) -> Tensor:
        """Item, its label, item, its label, ..., query; the last of `items` is the query."""
        pairs = torch.stack([items, world.labels[labels]], -2).flatten(-3, -2)
        return pairs[..., : self.length, :].contiguous()


@dataclass(frozen=True)
class WhichFirst(Task):
    """Which of two marked tokens stands first: the answer is 0 or 1, the marked token's own id.

    The two stand at random places before the last one; everywhere else are uniform random tokens of the other ids. A reader
    that knows which tokens there are, but not their order, is right in exactly half of the cases: exchanging the two marked
    tokens (`mirrored`) changes the answer and nothing that such a reader sees.
    """

    kind = "which-first"
    outputs = 2
    LEAST: ClassVar = {"vocabulary": 3, "length": 3}
    vocabulary: int = 10
    length: int = 10
    batch: int = 128

    def draw(self, world: None, generator: torch.Generator, steps: int) -> Drawn:
        size, device = (steps, self.batch), generator.device
        tokens = torch.randint(2, self.vocabulary, (*size, self.length), generator=generator, device=device)
        places = torch.rand(*size, self.length - 1, generator=generator, device=device).argsort(-1)[..., :2]
        ids = torch.arange(2, device=device).expand(*size, 2)
        return Drawn(tokens.scatter_(-1, places, ids), (places[..., 1] < places[..., 0]).long())


def mirrored(tokens: Int[Tensor, "*n position"]) -> Int[Tensor, "*n position"]:
    """Sequences of `WhichFirst` with the marked tokens exchanged, whose answers are the other ones."""
    return torch.where(tokens < 2, 1 - tokens, tokens)
