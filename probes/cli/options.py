"""Options that several commands of `headwater` share, and how those are read that are more than a number or a name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import InputError
from ..models.initialization import PUBLISHED

MOST_SEEDS = 10_000  # more of anything than these is a slip of the hand, found out after days or in no memory
MOST_PRODUCTS = 1_000_000
MOST_RESAMPLES = 100_000
LARGEST_SEED = 2**63 - 1  # NetCDF's integers

Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="Bundled names, smollm2-135m, folders, GGUF files, hub ids; with @REVISION if wanted; tiny-llama if not given."
    ),
]
Conditions = Annotated[str, typer.Option(help="init (fresh weights of the same config), pretrained, or both.")]
Seeds = Annotated[int, typer.Option(max=MOST_SEEDS, help="Fresh models per model.")]
Initialization = Annotated[
    str,
    typer.Option(
        metavar="RULE",
        help="What fresh weights are drawn from: config, one deviation for all matrices (0.02, 1/24), or a published rule: "
        f"{', '.join(PUBLISHED)}.",
    ),
]
Prompts = Annotated[int, typer.Option(help="Windows of text.")]
Length = Annotated[int, typer.Option(help="Tokens per window, position 0 included.")]
Method = Annotated[
    Literal["exact", "sketch", "scalar"], typer.Option(help="All products, few with an error bar, or a single one.")
]
Products = Annotated[str | None, typer.Option(help="Of the sketch, per prompt: a number (64 if not given), or auto.")]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A text file or folder, or prose or code (bundled); if not given prose, or code for the bundled models."
    ),
]
Chat = Annotated[
    str | None,
    typer.Option(help="Instead: a question, or a JSON file of conversations, written by the model's chat template."),
]
Dataset = Annotated[str | None, typer.Option(help="A dataset to stream: owner/name, owner/name:config, or a file.")]
Split = Annotated[str, typer.Option(help="Of the dataset.")]
Column = Annotated[str, typer.Option(help="Of the dataset, holding the text.")]
First = Annotated[str, typer.Option(help="Position 0: auto (BOS where training put one), bos, none, or a token id.")]
Seed = Annotated[int, typer.Option(max=LARGEST_SEED, help="Of the windows' places and of whatever else is drawn.")]
Device = Annotated[str, typer.Option(help="auto (CUDA if there is any), cpu, cuda, cuda:1, ...")]
DTypes = Annotated[Literal["auto", "float32", "float64", "bfloat16"], typer.Option(help="auto is float32.")]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Instead, for models larger than one device: auto, balanced, balanced_low_0 or sequential, over all "
        "accelerators, main memory and disk."
    ),
]
MaxMemory = Annotated[
    str | None, typer.Option(help="With --device-map: what each device may hold, as in 0=20GiB,cpu=8GiB.")
]
OffloadFolder = Annotated[
    Path | None, typer.Option(help="With --device-map: for weights that wait on disk in another form than they came.")
]
Backends = Annotated[Literal["transformers", "transformer_lens"], typer.Option(help="Who runs the models.")]
Out = Annotated[Path, typer.Option(help="Folder for results, figure and table; unfinished work there is continued.")]
Bands = Annotated[
    str | None, typer.Option(help="Ranges of queries, as in 9-31,32-63; if not given up to 31, then doubling.")
]
Lags = Annotated[str, typer.Option(help="How far back the keys stand, as in 1-8 or 1,2,4.")]
Fresh = Annotated[
    int | None,
    typer.Option(
        help="Prompts of the null of fresh weights, 0 for none; 64 if not given and memory holds the weights twice."
    ),
]
Bootstrap = Annotated[
    int, typer.Option(max=MOST_RESAMPLES, help="Resamples of the prompts for the intervals; 0 for none.")
]


def conditions(text: str) -> tuple[Any, ...]:
    """Names in a list, as in "init,pretrained"; the study says which there are."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


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
        raise InputError(f"products '{text}' is no number; give a whole number, or auto") from None
    if number > MOST_PRODUCTS:
        raise InputError(f"products={text} are more than is of any use; give at most {MOST_PRODUCTS}")
    return number


def split_over(device_map: str | None, max_memory: str | None, offload_folder: Path | None) -> dict[str, Any]:
    """What `probes.load` takes for models larger than one device, without what was not given.

    Raises:
        InputError: memory not written as DEVICE=SIZE.
    """
    found: dict[str, Any] = {"device_map": device_map, "offload_folder": offload_folder}
    if max_memory is not None:
        pairs = [part.strip().partition("=") for part in max_memory.split(",")]
        if not all(device and size for device, _, size in pairs):
            raise InputError(f"max-memory '{max_memory}' is no list of DEVICE=SIZE; give it as in 0=20GiB,cpu=8GiB")
        found["max_memory"] = {int(device) if device.isdecimal() else device: size for device, _, size in pairs}
    return {name: value for name, value in found.items() if value is not None}


def steps(text: str) -> tuple[int, ...]:
    """Steps in a list, as in "0,100".

    Raises:
        InputError: something else.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"keep-steps '{text}' is no list of steps; give whole numbers, as in 0,100") from None
