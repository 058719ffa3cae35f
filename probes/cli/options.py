"""The options that several commands of `headwater` share, each declared once, and how their values are read.

A dataclass is a group of options: a command that takes one has an option for each field (`probes.cli.command`). A new
field of `Source` or `Running` is a new option of every command that measures models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import InputError
from ..models.initialization import PUBLISHED
from ..options import argument, flag, option

MOST_SEEDS = 10_000  # a larger number is a slip; it would show only after days, or when memory runs out
MOST_PRODUCTS = 1_000_000
MOST_RESAMPLES = 100_000
LARGEST_SEED = 2**63 - 1  # NetCDF's integers

Out = Annotated[Path, typer.Option(help="Folder for results, figure and table; unfinished work there is continued.")]
Seeds = Annotated[int, typer.Option(max=MOST_SEEDS, help="Models with fresh weights per model.")]
Initialization = Annotated[
    str,
    typer.Option(
        metavar="RULE",
        help="What fresh weights are drawn from: config, one deviation for all matrices (0.02, 1/24), or a published rule: "
        f"{', '.join(PUBLISHED)}.",
    ),
]
Chat = Annotated[
    str | None,
    typer.Option(
        help="Instead of a text: a question, or a JSON file of conversations, formatted with the model's chat template."
    ),
]
First = Annotated[str, typer.Option(help="Position 0: auto (what the tokenizer puts first), bos, none, or a token id.")]
Seed = Annotated[
    int, typer.Option(max=LARGEST_SEED, help="Seed of the windows' places and of everything else that is drawn.")
]
Bootstrap = Annotated[
    int, typer.Option(max=MOST_RESAMPLES, help="Resamples of the prompts for the intervals; 0 for none.")
]
OneDevice = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")]


class Options:
    """A group of options: the base of dataclasses that `probes.cli.command` flattens."""

    def values(self) -> dict[str, Any]:
        """The options by name, as the library takes them.

        Raises:
            InputError: an option whose text cannot be read.
        """
        return dict(vars(self))


@dataclass(frozen=True)
class Target:
    """Which models are measured, and where the results go."""

    models: list[str] | None = argument(
        "Bundled names, smollm2-135m, folders, GGUF files, hub ids; with @REVISION if wanted; tiny-llama if not given."
    )
    out: Out = Path()

    @property
    def sources(self) -> list[str]:
        """The models, as `probes.load` takes them."""
        return self.models or ["tiny-llama"]


@dataclass(frozen=True)
class Source(Options):
    """Where the prompts come from."""

    prompts: int = option("Windows of text.", 32)
    length: int = option("Tokens per window, position 0 included.", 256)
    text: Path | None = option(
        "A text file or folder, or prose or code (bundled); if not given, prose, or code for the bundled models."
    )
    dataset: str | None = option("A dataset to stream: owner/name, owner/name:config, or a file.")
    split: str = option("Split of the dataset.", "train")
    column: str = option("Column of the dataset that holds the text.", "text")
    chat: Chat = None
    first: First = "auto"
    seed: Seed = 0

    def values(self) -> dict[str, Any]:
        """As `Options.values`, with the file's name as text and `first` read."""
        from ..data.prompts import parse_first

        text = None if self.text is None else str(self.text)
        return vars(self) | {"text": text, "first": parse_first(self.first)}


@dataclass(frozen=True)
class Running(Options):
    """What runs the models, where, and how precisely."""

    backend: Literal["transformers", "transformer_lens"] = option("Library that runs the models.", "transformers")
    device: str = option("auto (CUDA if there is any), cpu, cuda, cuda:1, ...", "auto")
    device_map: str | None = option(
        "Instead, for models larger than one device: auto, balanced, balanced_low_0 or sequential, over all "
        "accelerators, main memory and disk."
    )
    max_memory: str | None = option("With --device-map: what each device may hold, as in 0=20GiB,cpu=8GiB.")
    offload_folder: Path | None = option(
        "With --device-map: folder for weights that are kept on disk in another form than their own."
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = option("auto is float32.", "auto")
    beyond: bool = flag("--beyond", "Texts longer than the model was made for; not where positions are learned.")
    ablate: str | None = option("Heads that are taken out, BLOCK.HEAD, as in 18.8,26.2.")
    ablate_how: Literal["zero", "from-0"] = option(
        "What is taken out: all that a head writes, or what it reads at position 0; its mean: in Python, probes.ablated.",
        "zero",
    )

    def values(self) -> dict[str, Any]:
        """As `Options.values`, with `split_over` for models larger than one device, and `ablate` read.

        Raises:
            InputError: heads that cannot be read, or a way to take none out.
        """
        from ..models.ablate import parse_heads

        found: dict[str, Any] = {name: getattr(self, name) for name in ("backend", "device", "dtype", "beyond")}
        if self.ablate is not None:
            how = {"zero": "zero", "from-0": "from position 0"}[self.ablate_how]
            found["ablate"] = parse_heads(self.ablate), how
        elif self.ablate_how != "zero":
            raise InputError(f"ablate-how '{self.ablate_how}' takes out no head; name some, as in --ablate 18.8,26.2")
        return found | ({"split_over": spread} if (spread := self.split_over()) else {})

    def split_over(self) -> dict[str, Any]:
        """What `probes.load` takes for models larger than one device, without what was not given.

        Raises:
            InputError: memory not written as DEVICE=SIZE.
        """
        found: dict[str, Any] = {"device_map": self.device_map, "offload_folder": self.offload_folder}
        if self.max_memory is not None:
            pairs = [part.strip().partition("=") for part in self.max_memory.split(",")]
            if not all(device and size for device, _, size in pairs):
                raise InputError(
                    f"max-memory '{self.max_memory}' is not a list of DEVICE=SIZE; give it as in 0=20GiB,cpu=8GiB"
                )
            found["max_memory"] = {int(device) if device.isdecimal() else device: size for device, _, size in pairs}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Bands(Options):
    """Which queries and keys leakage is measured over, and the intervals."""

    bands: str | None = option("Ranges of queries, as in 9-31,32-63; if not given, up to 31, then doubling.")
    lags: str = option("Distances from a query back to its keys, as in 1-8 or 1,2,4.", "1-8")
    bootstrap: Bootstrap = 400

    def values(self) -> dict[str, Any]:
        """As `Options.values`, with the ranges read."""
        from ..measures.leakage import parse_bands, parse_lags

        bands = None if self.bands is None else parse_bands(self.bands)
        return vars(self) | {"bands": bands, "lags": parse_lags(self.lags)}


def numbers(text: str | None, name: str) -> frozenset[int] | None:
    """Numbers and ranges of them, ends included, as in "3-7" or "0,4"; None for none given.

    Raises:
        InputError: something else.
    """
    from ..data.positions import read_ranges

    if text is None:
        return None
    ranges = read_ranges(text, name, "3-7 or 0,4")
    return frozenset(one for first, last in ranges for one in range(first, last + 1))


def products(text: str | None) -> int | Literal["auto"] | None:
    """A number of products, "auto" or none.

    Raises:
        InputError: something else, or more than there is memory or time for.
    """
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        number = int(text)
    except ValueError:
        raise InputError(f"products '{text}' is not a number; give a whole number, or auto") from None
    if number > MOST_PRODUCTS:
        raise InputError(f"products={text} is more than is of any use; give at most {MOST_PRODUCTS}")
    return number


def steps(text: str) -> tuple[int, ...]:
    """Steps in a list, as in "0,100".

    Raises:
        InputError: something else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"keep-steps '{text}' is not a list of steps; give whole numbers, as in 0,100") from None
