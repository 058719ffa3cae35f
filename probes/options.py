"""Options of commands as fields of dataclasses: each is declared once, with its help, and typed.

`probes.cli.measures` makes the command line of them. A measure's own options are such a dataclass in its file; those that
all measures share, which prompts are drawn and how models are loaded, are here.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import InputError

if TYPE_CHECKING:
    from .data.prompts import Drawn
    from .models.view import View
    from .models.words import Intervention

MOST_SEEDS = 10_000  # a larger number is a slip; it would show only after days, or when memory runs out
MOST_PRODUCTS = 1_000_000
MOST_RESAMPLES = 100_000
LARGEST_SEED = 2**63 - 1  # NetCDF's integers


def option(text: str, default: Any = None, *names: str, **more: Any) -> Any:
    """A field that is an option with this help; `...` as its default makes it required.

    `names` are spellings other than the field's; `more` may limit a number (min, max) or name a value (metavar).
    """
    return field(default=MISSING if default is ... else default, metadata={"option": (names, {"help": text, **more})})


def flag(name: str, text: str) -> Any:
    """An option that is off unless it is given; nothing turns it off again."""
    return option(text, False, name)


def argument(text: str, default: Any = None, **more: Any) -> Any:
    """As `option`, for what is given by its place."""
    return option(text, default, argument=True, **more)


def initialization() -> Any:
    """What fresh weights are drawn from."""
    from .models.initialization import PUBLISHED

    text = (
        "What fresh weights are drawn from: config, one deviation for all matrices (0.02, 1/24), or a published rule: "
    )
    return option(f"{text}{', '.join(PUBLISHED)}.", "config", metavar="RULE")


def chat() -> Any:
    """Conversations in place of a text."""
    return option(
        "Instead of a text: a question, or a JSON file of conversations, formatted with the model's chat template."
    )


def first() -> Any:
    """What stands at position 0."""
    return option("Position 0: auto (what the tokenizer puts first), bos, none, or a token id.", "auto")


def seed() -> Any:
    """Of everything that is drawn."""
    return option("Seed of the windows' places and of everything else that is drawn.", 0, max=LARGEST_SEED)


class Options:
    """A group of options."""

    def values(self) -> dict[str, Any]:
        """The options by name, as the library's functions take them."""
        return dict(vars(self))


@dataclass(frozen=True)
class Target:
    """Which models are measured, and where the results go."""

    models: list[str] | None = argument(
        "Bundled names, smollm2-135m, gemma3-270m, folders, GGUF files, hub ids; with @REVISION if wanted; else tiny-llama."
    )
    out: Path = option("Folder for results, figure and table; unfinished work there is continued.", Path())

    @property
    def sources(self) -> list[str]:
        """The models, as `probes.load` takes them."""
        return self.models or ["tiny-llama"]


@dataclass(frozen=True)
class Prompts(Options):
    """Which prompts are drawn: so many windows of a text, as in `probes.prompts`."""

    prompts: int = option("Windows of text.", 32)
    length: int = option("Tokens per window, position 0 included.", 256)
    text: Path | None = option(
        "A text file or folder, or prose, code or long (bundled); if not given, prose, or code for the bundled models."
    )
    dataset: str | None = option("A dataset to stream: owner/name, owner/name:config, or a file.")
    split: str = option("Split of the dataset.", "train")
    column: str = option("Column of the dataset that holds the text.", "text")
    chat: str | None = chat()
    whole: bool = flag(
        "--whole",
        "Measure whole texts or conversations, each alone, instead of windows; longer ones are cut at --length.",
    )
    first: str = first()
    seed: int = seed()

    def values(self) -> dict[str, Any]:
        """As `probes.data.prompts.draw` takes them."""
        from .data.prompts import parse_first

        text = None if self.text is None else str(self.text)
        chosen = {name: value for name, value in vars(self).items() if name not in ("prompts", "whole")}
        return {"n": self.prompts, **chosen, "text": text, "first": parse_first(self.first)}

    def check(self) -> None:
        """Refuse what can be refused without a model."""
        from .data.prompts import check_source

        check_source(**self.values())

    def drawn(self, model: View) -> Drawn:
        """The prompts of a model."""
        from .data.prompts import draw

        return draw(model, **self.values())

    def each(self, model: View) -> list[Drawn]:
        """What is measured of a model one after the other: all prompts at once, or text by text."""
        from .data.prompts import whole

        return whole(model, **self.values()) if self.whole else [self.drawn(model)]


@dataclass(frozen=True)
class Loading(Options):
    """What runs the models, where, and how precisely."""

    backend: Literal["transformers", "transformer_lens"] = option("Library that runs the models.", "transformers")
    device: str = option("auto (CUDA if there is any), cpu, cuda, cuda:1, ...", "auto")
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = option(
        "Instead of --device, for models larger than one: how they are spread over all accelerators, main memory and disk."
    )
    max_memory: str | None = option("With --device-map: what each device may hold, as in 0=20GiB,cpu=8GiB.")
    offload_folder: Path | None = option(
        "With --device-map: folder for weights that are kept on disk in another form than their own."
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = option("auto is float32.", "auto")
    beyond: bool = flag(
        "--beyond", "Allow texts longer than the model was made for; impossible where positions are learned."
    )
    ablate: str | None = option("Heads to take out, as in 18.8,26.2, or other interventions, as in released@8.")

    def values(self) -> dict[str, Any]:
        """As `probes.load` takes them."""
        spread: dict[str, Any] = {"device_map": self.device_map, "offload_folder": self.offload_folder}
        if self.max_memory is not None:
            pairs = [part.strip().partition("=") for part in self.max_memory.split(",")]
            if not all(device and size for device, _, size in pairs):
                raise InputError(
                    f"max-memory '{self.max_memory}' is not a list of DEVICE=SIZE; give it as in 0=20GiB,cpu=8GiB"
                )
            spread["max_memory"] = {int(device) if device.isdecimal() else device: size for device, _, size in pairs}
        chosen = {name: getattr(self, name) for name in ("backend", "device", "dtype", "beyond")}
        return chosen | {name: value for name, value in spread.items() if value is not None}

    def changes(self) -> Intervention | None:
        """What is done to the model."""
        from .models.words import intervention

        return None if self.ablate is None else intervention(self.ablate.replace(",", "+"))

    def load(self, source: str) -> View:
        """The model, under the interventions that were asked for."""
        from .models.load import load

        changes, values = self.changes(), self.values()
        model = load(source, **values)
        return model if changes is None else changes.on(model)


@dataclass(frozen=True)
class Bands(Options):
    """Which queries and keys leakage is measured over, and its intervals."""

    bands: str | None = option(
        "Ranges of queries, as in 9-31,32-63; if not given, up to 31, then 32-63, 64-127 and so on."
    )
    lags: str = option("Distances from a query back to its keys, as in 1-8 or 1,2,4.", "1-8")
    bootstrap: int = option("Resamples of the prompts for the intervals; 0 for none.", 400, max=MOST_RESAMPLES)

    def values(self) -> dict[str, Any]:
        """As `Options.values`, with the ranges read, ends included."""
        bands = None if self.bands is None else tuple(read_ranges(self.bands, "bands", "9-31,32-63"))
        lags = (range(first, last + 1) for first, last in read_ranges(self.lags, "lags", "1-8 or 1,2,4"))
        return vars(self) | {"bands": bands, "lags": tuple(lag for some in lags for lag in some)}


def read_ranges(text: str, what: str, example: str) -> list[tuple[int, int]]:
    """Read "0-7", "0,5" or "0-3,8" as (first, last), ends included; a single position is a range of one."""
    ranges = []
    for piece in text.split(","):
        ends = [end.strip() for end in piece.split("-")]
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() and len(end) < 8 for end in ends):
            raise InputError(f"{what} '{text}' are no positions; write them as {example}")
        ranges.append((int(ends[0]), int(ends[-1])))
        if int(ends[0]) > int(ends[-1]):
            raise InputError(f"{what} '{piece.strip()}' run backwards; give {ends[-1]}-{ends[0]}")
    return ranges
