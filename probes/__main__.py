"""The command line `headwater`: options in, one call into the library, a line or two out.

`headwater --help` has to answer at once, so torch, transformers, xarray and matplotlib are imported inside the commands
that need them. This is also the one module of `probes` that knows `toy`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .cli import options as read
from .cli.console import print_report, print_table, print_written, progress, remark
from .cli.options import (
    Backends,
    Bands,
    Bootstrap,
    Chat,
    Column,
    Conditions,
    Dataset,
    Device,
    DeviceMap,
    DTypes,
    First,
    Fresh,
    Initialization,
    Lags,
    Length,
    MaxMemory,
    Method,
    Models,
    OffloadFolder,
    Out,
    Products,
    Prompts,
    Seed,
    Seeds,
    Split,
    Text,
)
from .errors import InputError
from .run import processes

BAD_INPUT = 2  # the exit code of usage errors everywhere
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PATIENCE = 20  # seconds in which the first of several processes can be expected to have said what is wrong
SHARED = ("jacobian", "theory", "sinks", "trajectory", "leakage", "bos-swap")  # what several processes do together

app = typer.Typer(
    name="headwater",
    help="Where does a pretrained language model's sense of position come from?",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _examples(*lines: str) -> str:
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def _print_version(wanted: bool | None) -> None:
    if wanted:
        print(f"headwater {version('headwater')}")
        raise typer.Exit()


@app.callback(
    epilog=_examples(
        "headwater jacobian tiny-llama",
        "headwater theory tiny-llama",
        "headwater sinks tiny-llama",
        "headwater leakage tiny-llama tiny-llama-ntk tiny-mistral-window",
        "headwater report tiny-llama",
        "headwater pretrain tiny-llama --out runs/tiny-llama",
    ),
)
def _options(
    wanted: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = None,
) -> None:
    """Where does a pretrained language model's sense of position come from?"""
    if processes.launched() > 1:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if command not in SHARED:
            raise InputError(
                f"headwater {command} runs in one process, not in {processes.launched()}; "
                f"start it without the launcher ({', '.join(SHARED)} share their prompts)"
            )
        processes.join()
        if not processes.first():
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as this process lives


@app.command(
    epilog=_examples(
        "headwater jacobian tiny-llama",
        "headwater jacobian tiny-llama tiny-qwen2 --no-rope --out runs/two",
        "headwater jacobian tiny-llama@step0 tiny-llama@step300 tiny-llama --conditions pretrained",
        "headwater jacobian Qwen/Qwen2.5-0.5B --prompts 8 --length 1024 --text book.txt",
        "headwater jacobian ./checkpoint --method exact --readout logits --first none",
    ),
)
def jacobian(
    models: Models = None,
    out: Out = Path("runs/jacobian"),
    conditions: Conditions = "init,pretrained",
    no_rope: Annotated[
        bool, typer.Option("--no-rope", help="Repeat init without rotation (or without learned positions).")
    ] = False,
    seeds: Seeds = 3,
    initialization: Initialization = "config",
    prompts: Prompts = 16,
    length: Length = 256,
    method: Method = "sketch",
    products: Products = None,
    relative_error: Annotated[float, typer.Option(help="Where --products auto stops, for the mean profile.")] = 0.02,
    readout: Annotated[
        Literal["residual", "normed", "logits"], typer.Option(help="Before or after the final norm, or the logits.")
    ] = "residual",
    pathway: Annotated[
        Literal["total", "value", "score"],
        typer.Option(help="All paths, those with every attention pattern held constant, or the rest."),
    ] = "total",
    query: Annotated[int, typer.Option(help="The position read out; negative counts from the end.")] = -1,
    from_layer: Annotated[int, typer.Option(help="Sensitivity to this block's input instead of the embeddings.")] = 0,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    dtype: DTypes = "auto",
) -> None:
    """Measure how strongly the output depends on each input position, at initialization and after pretraining.

    Writes jacobian.nc, jacobian.png, jacobian.svg and prints a summary: primacy (first 5 % of positions against the middle
    half's median), recency (last position against it) and the trough's place. Interrupted, the same command goes on.
    """
    from .data.prompts import parse_first
    from .results.dataset import drawn_from
    from .studies.runner import written_files
    from .studies.study import COLUMNS, Settings, cells, rope_correlations, summarize

    settings = Settings(
        conditions=read.conditions(conditions),
        no_rope=no_rope,
        seeds=seeds,
        initialization=initialization,
        prompts=prompts,
        length=length,
        method=method,
        products=read.products(products),
        relative_error=relative_error,
        readout=readout,
        pathway=pathway,
        query=query,
        from_layer=from_layer,
        text=None if text is None else str(text),
        dataset=dataset,
        split=split,
        column=column,
        chat=chat,
        first=parse_first(first),
        seed=seed,
    )
    spread = read.split_over(device_map, max_memory, offload_folder)
    running = {"backend": backend, "device": device, "dtype": dtype, "split_over": spread}
    results = _study(models, out, settings, name="jacobian", **running)
    print_table(COLUMNS, [list(cells(row)) for row in summarize(results)])
    if drawn_from(results):
        print(f"fresh weights: {drawn_from(results)}")
    for name, correlation in rope_correlations(results).items():
        print(f"{name}: rank correlation of init with and without positional encoding {correlation:.3f}")
    print_written(written_files(results, out, "jacobian"))


@app.command(
    epilog=_examples(
        "headwater theory tiny-llama",
        "headwater theory tiny-llama tiny-qwen2 --conditions init --seeds 5 --method exact",
        "headwater theory ./checkpoint --prompts 2 --length 512",
    ),
)
def theory(
    models: Models = None,
    out: Out = Path("runs/theory"),
    conditions: Conditions = "init,pretrained",
    seeds: Seeds = 3,
    initialization: Initialization = "config",
    prompts: Prompts = 4,
    length: Length = 256,
    method: Method = "sketch",
    products: Products = None,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    dtype: DTypes = "auto",
) -> None:
    """Hold measured profiles against theory: the second-moment kernel in four forms, and N^L with its best alpha.

    Writes theory.nc, theory.png, theory.svg, theory.md and prints each kernel's mean relative error over positions, how far
    its shape and that of N^L are off (RMS log error, free scale), and the shares of the value path (patterns held constant)
    and of the score path in the norm. On pretrained weights the kernel is the random-matrix baseline. Theory takes blocks
    apart, which transformers' modules alone allow: there is no --backend.
    """
    from .data.prompts import parse_first
    from .results.dataset import drawn_from
    from .run.files import write_table
    from .studies.runner import written_files
    from .studies.study import AGREEMENT_COLUMNS, Settings, agreement_cells, agreements, described

    settings = Settings(
        conditions=read.conditions(conditions),
        seeds=seeds,
        initialization=initialization,
        prompts=prompts,
        length=length,
        method=method,
        products=read.products(products),
        text=None if text is None else str(text),
        dataset=dataset,
        split=split,
        column=column,
        chat=chat,
        first=parse_first(first),
        seed=seed,
        theories=("uniform", "values", "score_path", "config"),
        by_path=True,
    )
    spread = read.split_over(device_map, max_memory, offload_folder)
    running = {"backend": "transformers", "device": device, "dtype": dtype, "split_over": spread}

    def finish(results: Any) -> None:
        rows = [list(agreement_cells(row)) for row in agreements(results)]
        lines = [f"`{_given()}`", described(results)]
        write_table(out / "theory.md", "Theories against measured profiles", lines, AGREEMENT_COLUMNS, rows)

    results = _study(models, out, settings, name="theory", finish=finish, **running)
    print_table(AGREEMENT_COLUMNS, [list(agreement_cells(row)) for row in agreements(results)])
    if drawn_from(results):
        print(f"fresh weights: {drawn_from(results)}")
    print_written(written_files(results, out, "theory", "theory.md"))


@app.command("map", epilog=_examples("headwater map --quick", "headwater map --out reports/theory"))
def map_(
    out: Out = Path("runs/map"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A few small places within a minute; all take over an hour.")
    ] = (False),
    seeds: Annotated[
        int, typer.Option(max=read.MOST_SEEDS, help="Fresh models per place, each with its own prompt.")
    ] = 2,
    products: Annotated[int, typer.Option(max=read.MOST_PRODUCTS, help="Of the sketch, per prompt.")] = 64,
) -> None:
    """Map where the U-shape at birth holds: d sigma^2, depth, length, width, residual scale, RoPE, windows, usual models.

    Writes map.nc, map.png, map.svg, map.md and prints, for every place, how far the ends stand above the middle and how
    far each theory is off.
    """
    from .figures import map_figure
    from .results.dataset import set_command
    from .results.theory_map import COLUMNS, cells, described, rows
    from .run.files import write_table
    from .studies.atlas import atlas, places

    set_command(sys.argv[1:])
    tables: list[list[list[str]]] = []

    def finish(result: Any) -> None:
        map_figure(result, path=out / "map.png")
        tables.append([list(cells(row)) for row in rows(result)])
        lines = [f"`{_given()}`", described(result)]
        write_table(out / "map.md", "Where the U-shape at birth holds", lines, COLUMNS, tables[0])

    with progress() as advance:
        atlas(places(quick=quick), out, seeds=seeds, products=products, advance=advance, told=remark, finish=finish)
    print_table(COLUMNS, tables[0])
    print_written([out / f"map.{end}" for end in ("nc", "png", "svg", "md")])


def _study(models: list[str] | None, out: Path, settings: Any, **options: Any) -> Any:
    """Run a study with its progress on stderr."""
    from .results.dataset import set_command
    from .studies.study import study

    set_command(sys.argv[1:])
    with progress(settings.prompts) as advance:
        return study(models or ["tiny-llama"], out, settings, advance=advance, told=remark, **options)


@app.command(
    epilog=_examples(
        "headwater sinks tiny-llama",
        "headwater sinks tiny-llama tiny-qwen2 --keys 0,1,5 --threshold 0.2",
        "headwater sinks ./checkpoint --keys all --reacts off --pictures 0 --length 1024",
        "headwater sinks tiny-qwen2 --effect all --prompts 8 --length 64",
        "headwater sinks ./checkpoint --device-map auto --max-memory 0=20GiB,cpu=60GiB --offload-folder offload",
    ),
)
def sinks(
    models: Models = None,
    out: Out = Path("runs/sinks"),
    keys: Annotated[
        str | None, typer.Option(help="Positions that may be sinks: all, 0-7, 0,5; the first 8 if not given.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="alpha above it is a sink [Gu].")] = 0.3,
    tau: Annotated[float, typer.Option(help="Weights above it are counted [Wu].")] = 0.2,
    reacts: Annotated[
        str, typer.Option(help="What to put at position 0: mean, zero, random, a token id, or off.")
    ] = "mean",
    pictures: Annotated[
        int, typer.Option(help="Patterns to keep, of the first heads in the table; the figure has room for three.")
    ] = 3,
    effect: Annotated[
        str,
        typer.Option(
            help="Heads whose effect is measured, what they take from position 0 removed: off, all, or the first so many; "
            "about half a pass for each head and prompt."
        ),
    ] = "off",
    effect_prompts: Annotated[int, typer.Option(help="Prompts for that, the first of all.")] = 8,
    top: Annotated[int, typer.Option(min=0, help="Heads of each model in the table.")] = 10,
    prompts: Prompts = 32,
    length: Length = 256,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    dtype: DTypes = "auto",
) -> None:
    """Find attention sinks, and what every head does with position 0: reads, parks, reacts or ignores.

    Writes sinks.nc, sinks.png, sinks.svg, sinks.md and prints the sink rate of the first keys beside uniform attention and
    Wu's fraction, how many heads have which role, and the heads that take most from position 0.
    """
    from .measures.effect import parse_effect
    from .measures.sinks import parse_keys
    from .models.swap import parse_replacement

    options = {
        "threshold": threshold,
        "tau": tau,
        "reacts": None if reacts == "off" else parse_replacement(reacts),
        "pictures": pictures,
        "effect": parse_effect(effect),
        "effect_prompts": effect_prompts,
    }
    if keys is not None:  # the default is as many of the first as a prompt has
        options["keys"] = parse_keys(keys)
    _survey("sinks", locals(), options, top=top)


@app.command(
    epilog=_examples(
        "headwater trajectory tiny-llama",
        "headwater trajectory tiny-llama tiny-qwen2 --starts 128 --out runs/two",
    ),
)
def trajectory(
    models: Models = None,
    out: Out = Path("runs/trajectory"),
    starts: Annotated[int, typer.Option(help="Tokens whose paths from position 0 are compared.")] = 64,
    prompts: Prompts = 32,
    length: Length = 256,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    dtype: DTypes = "auto",
) -> None:
    """Follow position 0 through the blocks, which no later token can reach.

    Writes trajectory.nc, trajectory.png, trajectory.svg, trajectory.md and prints, block by block, its norm against other
    positions, its massive activations, and how alike different first tokens, drawn from the prompts, have become.
    """
    _survey("trajectory", locals(), {"starts": starts, "seed": seed})


@app.command(
    epilog=_examples(
        "headwater leakage tiny-llama tiny-llama-ntk tiny-mistral-window",
        "headwater leakage tiny-qwen2 --bands 9-31 --lags 1,2,4 --prompts 128",
    ),
)
def leakage(
    models: Models = None,
    out: Out = Path("runs/leakage"),
    bands: Bands = None,
    lags: Lags = "1-8",
    bootstrap: Bootstrap = 400,
    fresh: Fresh = None,
    initialization: Initialization = "config",
    prompts: Prompts = 256,
    length: Length = 256,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    dtype: DTypes = "auto",
) -> None:
    """Split the absolute position in attention patterns into the causal mask's part and the residual stream's.

    Writes leakage.nc, leakage.png, leakage.svg, leakage.md and prints every band's shares with intervals, the order
    of the models, the null checks, and both forms block by block.
    """
    from .measures.leakage import parse_bands, parse_lags

    options = {
        "bands": None if bands is None else parse_bands(bands),
        "lags": parse_lags(lags),
        "bootstrap": bootstrap,
        "seed": seed,
        "fresh": fresh,
        "initialization": initialization,
    }
    _survey("leakage", locals(), options)


@app.command(
    "bos-swap",
    epilog=_examples(
        "headwater bos-swap tiny-llama",
        "headwater bos-swap tiny-llama tiny-qwen2 --replace mean,zero,random,17",
        "headwater bos-swap ./checkpoint --bands 9-31 --profile-prompts 2",
    ),
)
def bos_swap(
    models: Models = None,
    out: Out = Path("runs/bos-swap"),
    replace: Annotated[
        str, typer.Option(help="What to put at position 0, one after another: mean, zero, random, token ids.")
    ] = "mean",
    bands: Bands = None,
    lags: Lags = "1-8",
    bootstrap: Bootstrap = 400,
    profile_prompts: Annotated[int, typer.Option(help="Prompts of the Jacobian profile.")] = 4,
    products: Annotated[int, typer.Option(max=read.MOST_PRODUCTS, help="Of its sketch, per prompt.")] = 64,
    prompts: Prompts = 128,
    length: Length = 256,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    dtype: DTypes = "auto",
) -> None:
    """Put something else at position 0 and see what changes.

    Writes bos-swap.nc, bos-swap.png, bos-swap.svg, bos-swap.md and prints, for every replacement, the fraction of the
    residual component of leakage that it removes in each band, and sink rate, loss and Jacobian profile before and after.
    """
    from .measures.leakage import parse_bands, parse_lags
    from .models.swap import parse_replacement

    options = {
        "replacement": [parse_replacement(part.strip()) for part in replace.split(",")],
        "bands": None if bands is None else parse_bands(bands),
        "lags": parse_lags(lags),
        "bootstrap": bootstrap,
        "seed": seed,
        "profile_prompts": profile_prompts,
        "products": products,
    }
    _survey("bos-swap", locals(), options)


# What the commands above take beside options of their own, handed to `probes.studies.survey.survey` as it is.
COMMON = ("prompts", "length", "dataset", "split", "column", "chat", "seed", "backend", "device", "dtype")


def _survey(probe: Any, given: Mapping[str, Any], options: Mapping[str, Any], **reporting: Any) -> None:
    """Run a survey with its progress on stderr, and print its report; `given` are the command's arguments by name."""
    from .data.prompts import parse_first
    from .results.dataset import set_command
    from .studies.runner import written_files
    from .studies.survey import PROBES, survey

    set_command(sys.argv[1:])
    with progress(given["prompts"]) as advance:
        results = survey(
            given["models"] or ["tiny-llama"],
            given["out"],
            probe,
            options=options,
            reporting=reporting,
            text=None if given["text"] is None else str(given["text"]),
            first=parse_first(given["first"]),
            split_over=read.split_over(given["device_map"], given["max_memory"], given["offload_folder"]),
            advance=advance,
            told=remark,
            **{name: given[name] for name in COMMON},
        )
    print_report(PROBES[probe].report(results, **reporting))
    print_written(written_files(results, given["out"], probe, f"{probe}.md"))


@app.command(
    epilog=_examples(
        'headwater inspect tiny-llama --prompt "def area(width, height): return width *"',
        "headwater inspect tiny-qwen2 --text notes.txt --baseline text --out runs/notes",
        'headwater inspect ./checkpoint --chat "Why is the sky blue?" --of top --method exact',
    ),
)
def inspect(
    model: Annotated[
        str, typer.Argument(help="A bundled name, folder, GGUF file or hub id, with @REVISION if wanted.")
    ] = ("tiny-llama"),
    prompt: Annotated[str | None, typer.Option(help="What the model reads.")] = None,
    text: Annotated[Path | None, typer.Option(help="Instead: a file that holds it.")] = None,
    chat: Chat = None,
    ids: Annotated[str | None, typer.Option(help="Instead: token ids, as in 1,2,3.")] = None,
    of: Annotated[
        str,
        typer.Option(help="What depends on the tokens: prediction, logits, top (log p of the most probable), an id."),
    ] = "prediction",
    baseline: Annotated[
        Literal["init", "kernel", "text", "none"],
        typer.Option(
            help="What is divided out: the architecture's bias at birth; the random-matrix baseline of the weights; "
            "the model's mean profile over other texts; nothing."
        ),
    ] = "init",
    out: Annotated[Path, typer.Option(help="Folder for the page and the result.")] = Path("runs/inspect"),
    top: Annotated[int, typer.Option(min=0, help="Tokens in the table.")] = 12,
    method: Annotated[
        Literal["exact", "sketch"], typer.Option(help="All products, or few with an error bar.")
    ] = "sketch",
    products: Annotated[
        int | None, typer.Option(max=read.MOST_PRODUCTS, help="Of the sketch; 64 if not given.")
    ] = None,
    seeds: Annotated[int, typer.Option(max=read.MOST_SEEDS, help="Fresh models of the baseline init.")] = 3,
    initialization: Initialization = "config",
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_memory: MaxMemory = None,
    offload_folder: OffloadFolder = None,
    dtype: DTypes = "auto",
) -> None:
    """Show a text in colour: how much the next-token prediction depends on each token, position's own part divided out.

    Writes inspect.html, inspect.nc and prints the text (numbers instead of colours in a pipe), the shares of sink, recency
    and the rest, and the tokens that stand out most.
    """
    from .data.prompts import parse_first
    from .figures.inspection import print_inspection, write_page
    from .measures.inspect import parse_of
    from .measures.reading import parse_prompt
    from .models.load import load
    from .results.dataset import save, set_command
    from .run.files import require_writable, together
    from .studies.reading import Reading
    from .studies.runner import require_free

    set_command(sys.argv[1:])
    read_as, chat = parse_prompt(prompt, text, chat, ids)
    require_writable(out)
    require_free([out / "inspect.html", out / "inspect.nc"])
    spread = read.split_over(device_map, max_memory, offload_folder)
    view = load(model, backend, device=device, dtype=dtype, **spread)
    reading = Reading(out)
    with progress() as advance:
        result = reading.read(
            view,
            read_as,
            advance=advance,
            chat=chat,
            of=parse_of(of),
            baseline=baseline,
            method=method,
            products=products,
            first=parse_first(first),
            seeds=seeds,
            seed=seed,
            initialization=initialization,
        )
    with together():
        write_page(result, out / "inspect.html", top=top)
        save(result, out / "inspect.nc")
    reading.finish()
    print_inspection(result, top=top)
    print_written([out / "inspect.html", out / "inspect.nc"])


@app.command(
    epilog=_examples(
        "headwater match tiny-llama --quick",
        "headwater match tiny-llama tiny-mistral-window --out runs/two",
        "headwater match ./checkpoint --length 512 --device cuda",
    ),
)
def match(
    models: Models = None,
    out: Out = Path("runs/match"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Small toys, few steps, no ablations: about a minute, marked as such.")
    ] = False,
    seeds: Seeds = 2,
    initialization: Initialization = "config",
    bootstrap: Bootstrap = 400,
    prompts: Prompts = 128,
    length: Length = 256,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    dtype: DTypes = "auto",
) -> None:
    """Train toys of a model's architecture and lay both beside each other: profiles, sinks, leakage, position 0 swapped.

    Writes match.nc, match.png, match.svg, match.md and prints how far the model's profile agrees with those of the toys and
    of theory, and which ingredient (residual stream, mask, positional encoding, window) makes which feature of it.
    Interrupted, the same command goes on.
    """
    from toy.matching import QUICK, Matching, Settings

    from .data.prompts import parse_first
    from .results.dataset import set_command
    from .studies.match import NAME, match
    from .studies.matched import match_report
    from .studies.runner import written_files

    maker = Matching(QUICK if quick else Settings(), device)
    set_command(sys.argv[1:])
    with progress() as advance:
        results = match(
            models or ["tiny-llama"],
            out,
            maker,
            quick=quick,
            seeds=seeds,
            initialization=initialization,
            bootstrap=bootstrap,
            prompts=prompts,
            length=length,
            text=None if text is None else str(text),
            dataset=dataset,
            split=split,
            column=column,
            chat=chat,
            first=parse_first(first),
            seed=seed,
            backend=backend,
            device=device,
            dtype=dtype,
            advance=advance,
            told=remark,
        )
    print_report(match_report(results))
    print_written(written_files(results, out, NAME, f"{NAME}.md"))


@app.command(
    epilog=_examples(
        "headwater toy all --quick",
        "headwater toy retrieval --out reports/toy",
        "headwater toy position-bias --with depths=2 --with steps=20000 --with seeds=2",
    ),
)
def toy(
    names: Annotated[
        list[str], typer.Argument(help="retrieval, previous-token, position-bias, sinks, rollout, petroglyph, or all.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small setting of about a minute each, marked as such.")
    ] = False,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="FIELD=VALUE", help="Change a setting; lists as in depths=2,4. May be repeated."
        ),
    ] = None,
    out: Out = Path("runs/toy"),
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")] = "auto",
) -> None:
    """Train small transformers in which one phenomenon each can be isolated, and redo the figures of their sources.

    Writes NAME.nc, figures and NAME.md, a table of what was published, what was measured, and whether it holds. The full
    setting is the published one, which takes hours; interrupted, the same command goes on.
    """
    from toy.experiments.experiment import EXPERIMENTS, run, settings_of

    from .results.dataset import set_command

    chosen = EXPERIMENTS if names == ["all"] else tuple(dict.fromkeys(names))
    for name in chosen:  # before any work
        settings_of(name, quick=quick, given=given or ())
    set_command(sys.argv[1:])
    for name in chosen:
        with progress() as advance:
            _, report, files = run(name, out, quick=quick, given=given or (), device=device, advance=advance)
        print_report(report, sentences=True)
        print_written(files)


@app.command(
    epilog=_examples(
        "headwater report tiny-llama",
        "headwater report smollm2-135m --quick",
        "headwater report Qwen/Qwen2.5-0.5B ./my-checkpoint --length 512 --out runs/two",
        "headwater report --out reports",
    ),
)
def report(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Bundled names, folders, GGUF files or hub ids; none: the page from what lies in --out."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results and page; what was measured there is kept.")] = Path(
        "runs/report"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is there.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Few prompts and products, one fresh model: the whole page in minutes, wide intervals, marked as quick. "
            "--prompts, where given, counts; full results that are there are kept.",
        ),
    ] = False,
    prompts: Annotated[
        int | None, typer.Option(help="Windows of text of every study; if not given, 2 to 256 as each study needs.")
    ] = None,
    initialization: Initialization = "config",
    length: Length = 256,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    chat: Chat = None,
    first: First = "auto",
    seed: Seed = 0,
    backend: Backends = "transformers",
    device: Device = "auto",
    dtype: DTypes = "auto",
) -> None:
    """Measure models by every study and write one page: answer, claims, interactive charts, methods, provenance.

    Writes index.html, claims.md, overview.png, overview.svg and, in a folder per study, results, figures and tables. The
    studies that take least come first, and the page is written after each. A result that is there, made with the same
    options, is kept; interrupted, the same command goes on. Without models it makes the page from all results under
    --out, those of other commands (map, match, toy) included; tables of toys are written again, their verdicts too.
    """
    from .data.prompts import parse_first
    from .report.measuring import Source, measure
    from .results.dataset import set_command

    set_command(sys.argv[1:])
    refused: list[str] = []
    if quick and not models:
        raise InputError(
            "--quick measures models, and none is named; name one, as in headwater report tiny-llama --quick"
        )
    if models:
        source = Source(
            None if text is None else str(text),
            dataset,
            split,
            column,
            chat,
            parse_first(first),
            seed,
            backend,
            device,
            dtype,
            initialization,
        )

        def so_far(refused: Sequence[str]) -> None:
            _, written = _page(out, refused)
            remark(f"wrote {written[0]} with what is measured so far")

        with progress(telling=False) as advance:
            refused = measure(
                models,
                out,
                count=prompts,
                length=length,
                source=source,
                fresh=fresh,
                quick=quick,
                advance=advance,
                told=remark,
                between=so_far,
            )
    lines, written = _page(out, refused)
    print("\n".join(lines))
    print_written(written)


def _page(out: Path, refused: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Write the page of all results under a folder: what it says in short, and which files, the page first."""
    from toy.experiments.experiment import claims_of, report_of

    from .claims.claim import claims_table, headline, merged
    from .claims.sources import claims
    from .figures.overview import overview_figure
    from .report import build
    from .report.answer import leading, sentences
    from .report.cards import quick_remarks
    from .results.collected import collect
    from .results.tables import write_report
    from .run.files import together

    collected = collect(out)
    if not len(collected):
        raise InputError(
            f"'{out}' holds no results to report; name a model to measure, as in headwater report tiny-llama"
        )
    toys = _toys(collected)
    found = merged([*claims(collected), *(claim for name, ds, _ in toys for claim in claims_of(name, ds))])
    written = [out / "index.html", out / "claims.md"]
    picture = None
    said = sentences(collected, found)
    with together():
        table = claims_table(found)
        write_report(replace(table, lines=[*quick_remarks(collected), *table.lines]), out / "claims.md")
        for name, ds, file in toys:  # verdicts by the same rules as the ledger's, under the command that trained
            write_report(report_of(name, ds), file.with_suffix(".md"), str(ds.attrs.get("command", "")))
            written.append(file.with_suffix(".md"))
        if collected["jacobian"]:
            picture = out / "overview.png"
            shown = (leading(collected[kind]) for kind in ("jacobian", "leakage", "bos-swap"))
            overview_figure(*shown, path=picture)
            written += [picture, picture.with_suffix(".svg")]
        build(collected, found, out, command=_given(), picture=picture, sentences=said, remarks=refused)
    return [*said, *headline(found)], written


def _toys(collected: Any) -> list[tuple[str, Any, Path]]:
    """Every result of a toy experiment: its name, the result and its file."""
    from toy.experiments.experiment import EXPERIMENTS

    return [
        (name, ds, collected.files[kind, name])
        for kind in collected
        for name, ds in collected[kind].items()
        if kind.split("/")[0] == "toy" and name in EXPERIMENTS
    ]


@app.command(
    epilog=_examples(
        "headwater compare base/jacobian.nc instruct/jacobian.nc",
        "headwater compare prose/leakage.nc code/leakage.nc --out prose-and-code.md",
    ),
)
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A.nc", help="A result of jacobian, sinks, trajectory, leakage, bos-swap.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B.nc", help="Another one of the same measurement.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the table to this file, too.")] = None,
) -> None:
    """Compare two results number by number, B against A, with intervals: two checkpoints, two texts, base and instruct.

    Paired by prompt where both have the same tokens, by document where both have windows of the same documents, else
    unpaired; the table says which. Settings that differ are named below it.
    """
    from .results.dataset import set_command
    from .results.tables import write_report
    from .studies.paired import compare_files, comparison_report
    from .studies.runner import require_free

    if out is not None:
        if out.suffix != ".md":
            raise InputError(f"out '{out}' is no Markdown file; give a name that ends in .md")
        require_free([out])
    set_command(sys.argv[1:])
    shown = comparison_report(compare_files(a, b), (str(a), str(b)))
    if out is not None:
        write_report(shown, out)
    print_report(shown)
    if out is not None:
        print_written([out])


@app.command(
    epilog=_examples(
        "headwater pretrain tiny-llama --out runs/tiny-llama",
        "headwater pretrain tiny-qwen2 --steps 300 --text book.txt --out runs/book",
        "headwater pretrain --config config.json --dataset owner/name --no-bos --device cuda --out runs/own",
    ),
)
def pretrain(
    out: Annotated[Path, typer.Option(help="New or empty folder; an unfinished run in it is continued.")],
    recipe: Annotated[
        str | None,
        typer.Argument(help="tiny-llama, tiny-llama-ntk, tiny-mistral-window or tiny-qwen2."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Instead of a recipe: a transformers config.json.")] = None,
    text: Annotated[Path | None, typer.Option(help="Train on a text file, .jsonl file or folder of them.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Train on a dataset: owner/name, owner/name:config, or a parquet or JSON file.")
    ] = None,
    stdlib: Annotated[
        bool, typer.Option("--stdlib", help="Train on the standard library of this Python (the default).")
    ] = False,
    split: Annotated[str | None, typer.Option(help="Of the dataset; 'train' if not given.")] = None,
    column: Annotated[str | None, typer.Option(help="Of the dataset, holding the text; 'text' if not given.")] = None,
    characters: Annotated[
        int | None, typer.Option(help="Read so many characters of the dataset; 50 million if not given.")
    ] = None,
    heldout_characters: Annotated[int, typer.Option(help="Text kept out of training, for validation.")] = 240_000,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 2400,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    peak_lr: Annotated[float, typer.Option(help="Learning rate after warm-up; it decays to a tenth.")] = 3e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 100,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW, on matrices only.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides fresh weights and the order of the data.")] = 0,
    compute: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Weights stay float32; bfloat16 is autocast.")
    ] = "float32",
    keep_steps: Annotated[
        str | None, typer.Option(help="Steps to keep the weights of, as in 0,100; the recipe's own if not given.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between the states that a run continues from.")] = 200,
    bos: Annotated[
        bool | None,
        typer.Option("--bos/--no-bos", help="Start windows with BOS; if not given as the recipe has it, else yes."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")] = "auto",
    compile: Annotated[
        bool, typer.Option("--compile", help="Pass the model through torch.compile: slow start, faster steps.")
    ] = False,
) -> None:
    """Pretrain a small language model from fresh weights and write its model card.

    The data order follows from seed and step alone: the same command, given again, continues an interrupted run to the
    very weights it would have had.
    """
    from toy.pretrain import run

    report = run(
        recipe,
        out,
        config=config,
        text=text,
        dataset=dataset,
        stdlib=stdlib,
        split=split,
        column=column,
        characters=characters,
        heldout_characters=heldout_characters,
        bos=bos,
        keep_steps=None if keep_steps is None else read.steps(keep_steps),
        save_every=save_every,
        device=device,
        compile=compile,
        command=_given(),
        steps=steps,
        batch=batch,
        length=length,
        peak_lr=peak_lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        seed=seed,
        compute=compute,
    )
    print(
        f"{out}: validation loss {report['validation_loss']:.4f} nats per token "
        f"(bigram {report['bigram_validation_loss']:.4f}), largest mean weight on position 0 "
        f"{max(max(layer) for layer in report['position0_weight']):.4f}; model card in {out / 'README.md'}"
    )


def main() -> None:
    """Run the application; bad input ends in one line and exit code 2, Ctrl-C in one line and 130."""
    # The hub's client warns once per retry; the error that follows says it in one line. Read when it is first imported.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        code = app(standalone_mode=False, prog_name="headwater")
    except InputError as error:
        code = _complain(str(error), BAD_INPUT)
    except typer.TyperException as error:  # what typer itself refuses: unknown options, wrong types
        context = getattr(error, "ctx", None)  # not every one of them has it
        path = context.command_path if context else "headwater"
        message = error.format_message().rstrip(".")
        code = _complain(f"{message} (given: {_given()}); see {path} --help", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (RuntimeError, MemoryError) as error:
        from .run.memory import out_of_memory

        if not out_of_memory(error):
            raise
        remedy = "give a shorter --length, --dtype bfloat16 or --device-map auto; what is done is kept"
        code = _complain(f"memory ran out ({_given()}); {remedy}", BAD_INPUT)
    if code == INTERRUPTED:  # typer turns Ctrl-C within a command into this code
        _complain("interrupted", INTERRUPTED)
    if not code:
        processes.leave()  # after an error the others are not waited for: the launcher ends them
    sys.exit(code or 0)


def _given() -> str:
    return shlex.join(["headwater", *sys.argv[1:]])


def _complain(message: str, code: int) -> int:
    who = int(os.environ.get("RANK", "0") or 0) if processes.launched() > 1 else 0
    if (
        who > 0 and not processes.begun()
    ):  # all processes have the same to say, and the launcher ends all with the first
        time.sleep(PATIENCE)
        return code
    print("headwater:" if who == 0 else f"headwater, process {who}:", " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
