"""The command line `headwater`: options in, one call into the library, a line or two out.

`headwater --help` has to answer at once, so torch, transformers, xarray and matplotlib are imported inside the commands
that need them. This is also the one module of `probes` that knows `toy`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .errors import InputError

BAD_INPUT = 2  # the exit code of usage errors everywhere
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

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
        "headwater pretrain tiny-llama --out runs/tiny-llama",
    ),
)
def _options(
    wanted: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = None,
) -> None:
    """Where does a pretrained language model's sense of position come from?"""


# Options that several commands share.
Models = Annotated[
    list[str] | None,
    typer.Argument(help="Bundled names, folders or hub ids, with @REVISION if wanted; tiny-llama if not given."),
]
Conditions = Annotated[str, typer.Option(help="init (fresh weights of the same config), pretrained, or both.")]
Seeds = Annotated[int, typer.Option(help="Fresh models per model.")]
Prompts = Annotated[int, typer.Option(help="Windows of text.")]
Length = Annotated[int, typer.Option(help="Tokens per window, position 0 included.")]
Method = Annotated[
    Literal["exact", "sketch", "scalar"], typer.Option(help="All products, few with an error bar, or a single one.")
]
Products = Annotated[str | None, typer.Option(help="Of the sketch, per prompt: a number (64 if not given), or auto.")]
Text = Annotated[Path | None, typer.Option(help="A text file or folder; the bundled held-out text if not given.")]
Dataset = Annotated[str | None, typer.Option(help="A dataset to stream: owner/name, owner/name:config, or a file.")]
Split = Annotated[str, typer.Option(help="Of the dataset.")]
Column = Annotated[str, typer.Option(help="Of the dataset, holding the text.")]
First = Annotated[str, typer.Option(help="Position 0: auto (BOS where the model has one), bos, none, or a token id.")]
Seed = Annotated[int, typer.Option(help="Of the windows' places and the sketch's probes.")]
Device = Annotated[str, typer.Option(help="auto (CUDA if there is any), cpu, cuda, cuda:1, ...")]
DTypes = Annotated[Literal["auto", "float32", "float64", "bfloat16"], typer.Option(help="auto is float32.")]


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
    out: Annotated[
        Path, typer.Option(help="Folder for results and figure; an unfinished study there is continued.")
    ] = Path("runs/jacobian"),
    conditions: Conditions = "init,pretrained",
    no_rope: Annotated[
        bool, typer.Option("--no-rope", help="Repeat init without rotation (or without learned positions).")
    ] = False,
    seeds: Seeds = 3,
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
    first: First = "auto",
    seed: Seed = 0,
    backend: Annotated[
        Literal["transformers", "transformer_lens"], typer.Option(help="Who runs the model.")
    ] = "transformers",
    device: Device = "auto",
    dtype: DTypes = "auto",
) -> None:
    """Measure how strongly the output depends on each input position, at initialization and after pretraining.

    Writes jacobian.nc, jacobian.png, jacobian.svg and prints a summary: primacy (first 5 % of positions against the middle
    half's median), recency (last position against it) and the trough's place. Interrupted, the same command goes on.
    """
    from .prompts import parse_first
    from .study import COLUMNS, Settings, cells, rope_correlations, summarize

    settings = Settings(
        conditions=_conditions(conditions),
        no_rope=no_rope,
        seeds=seeds,
        prompts=prompts,
        length=length,
        method=method,
        products=_products(products),
        relative_error=relative_error,
        readout=readout,
        pathway=pathway,
        query=query,
        from_layer=from_layer,
        text=None if text is None else str(text),
        dataset=dataset,
        split=split,
        column=column,
        first=parse_first(first),
        seed=seed,
    )
    results = _study(models, out, settings, name="jacobian", backend=backend, device=device, dtype=dtype)
    _print_table(COLUMNS, [list(cells(row)) for row in summarize(results)])
    for name, correlation in rope_correlations(results).items():
        print(f"{name}: rank correlation of init with and without positional encoding {correlation:.3f}")
    _print_written(results, out, "jacobian")


@app.command(
    epilog=_examples(
        "headwater theory tiny-llama",
        "headwater theory tiny-llama tiny-qwen2 --conditions init --seeds 5 --method exact",
        "headwater theory ./checkpoint --prompts 2 --length 512",
    ),
)
def theory(
    models: Models = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results and figure; an unfinished study there is continued.")
    ] = Path("runs/theory"),
    conditions: Conditions = "init,pretrained",
    seeds: Seeds = 3,
    prompts: Prompts = 4,
    length: Length = 256,
    method: Method = "sketch",
    products: Products = None,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    first: First = "auto",
    seed: Seed = 0,
    device: Device = "auto",
    dtype: DTypes = "auto",
) -> None:
    """Hold measured profiles against theory: the second-moment kernel in four forms, and N^L with its best alpha.

    Writes theory.nc, theory.png, theory.svg, theory.md and prints each kernel's mean relative error over positions, how far
    its shape and that of N^L are off (RMS log error, free scale), and the shares of the value path (patterns held constant)
    and of the score path in the norm. On pretrained weights the kernel is the random-matrix baseline.
    """
    from .files import write_table
    from .prompts import parse_first
    from .study import AGREEMENT_COLUMNS, Settings, agreement_cells, agreements, described

    settings = Settings(
        conditions=_conditions(conditions),
        seeds=seeds,
        prompts=prompts,
        length=length,
        method=method,
        products=_products(products),
        text=None if text is None else str(text),
        dataset=dataset,
        split=split,
        column=column,
        first=parse_first(first),
        seed=seed,
        theories=("uniform", "values", "score_path", "config"),
        by_path=True,
    )
    results = _study(models, out, settings, name="theory", backend="transformers", device=device, dtype=dtype)
    rows = [list(agreement_cells(row)) for row in agreements(results)]
    _print_table(AGREEMENT_COLUMNS, rows)
    lines = [f"`{_given()}`", described(results)]
    write_table(out / "theory.md", "Theories against measured profiles", lines, AGREEMENT_COLUMNS, rows)
    _print_written(results, out, "theory", "theory.md")


@app.command("map", epilog=_examples("headwater map --quick", "headwater map --out reports/theory"))
def map_(
    out: Annotated[
        Path, typer.Option(help="Folder for result and figure; an unfinished map there is continued.")
    ] = Path("runs/map"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A few small places within a minute; all take over an hour.")
    ] = (False),
    seeds: Annotated[int, typer.Option(help="Fresh models per place, each with its own prompt.")] = 2,
    products: Annotated[int, typer.Option(help="Of the sketch, per prompt.")] = 64,
) -> None:
    """Map where the U-shape at birth holds: d sigma^2, depth, length, width, residual scale, RoPE, windows, usual models.

    Writes map.nc, map.png, map.svg, map.md and prints, for every place, how far the ends stand above the middle and how
    far each theory is off.
    """
    from .atlas import COLUMNS, atlas, cells, described, places, rows
    from .files import write_table
    from .plots import map_figure
    from .results import set_command

    set_command(sys.argv[1:])
    tables: list[list[list[str]]] = []

    def finish(result: Any) -> None:
        map_figure(result, path=out / "map.png")
        tables.append([list(cells(row)) for row in rows(result)])
        lines = [f"`{_given()}`", described(result)]
        write_table(out / "map.md", "Where the U-shape at birth holds", lines, COLUMNS, tables[0])

    with _progress() as advance:
        atlas(places(quick=quick), out, seeds=seeds, products=products, advance=advance, finish=finish)
    _print_table(COLUMNS, tables[0])
    print(f"wrote {', '.join(str(out / f'map.{end}') for end in ('nc', 'png', 'svg', 'md'))}")


def _conditions(text: str) -> tuple[Any, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _study(models: list[str] | None, out: Path, settings: Any, **options: Any) -> Any:
    """Run a study with its progress on stderr."""
    from .results import set_command
    from .study import study

    set_command(sys.argv[1:])
    with _progress() as advance:
        return study(models or ["tiny-llama"], out, settings, advance=advance, **options)


@contextmanager
def _progress() -> Iterator[Callable[[str, float, float], None]]:
    """A bar per label, shown once there is something to show, so that bad input ends in a single line."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def advance(label: str, done: float, total: float) -> None:
        progress.start()
        if label not in tasks:
            tasks[label] = progress.add_task(label)
        progress.update(tasks[label], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:
            progress.stop()


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, every line of it whole, also in a pipe or a narrow terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    widths = [max(map(len, cells)) + 3 for cells in zip(columns, *rows, strict=True)]
    Console(width=sum(widths) + 2).print(table)


def _print_written(results: Any, out: Path, name: str, *more: str) -> None:
    from .study import result_files

    written = [*result_files(results, out, name), *(out / file for file in (f"{name}.png", f"{name}.svg", *more))]
    print(f"wrote {', '.join(str(file) for file in written)}")


def _products(text: str | None) -> int | Literal["auto"] | None:
    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    try:
        return int(text)
    except ValueError:
        raise InputError(f"products '{text}' is no number; give a whole number, or auto") from None


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"keep-steps '{text}' is no list of steps; give whole numbers, as in 0,100") from None


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
        keep_steps=None if keep_steps is None else _steps(keep_steps),
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
    if code == INTERRUPTED:  # typer turns Ctrl-C within a command into this code
        _complain("interrupted", INTERRUPTED)
    sys.exit(code or 0)


def _given() -> str:
    return shlex.join(["headwater", *sys.argv[1:]])


def _complain(message: str, code: int) -> int:
    print("headwater:", " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
