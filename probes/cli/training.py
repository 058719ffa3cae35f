"""Commands that build models: the map over fresh models, toys beside a model, toys by themselves, pretraining."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from toy.recipes import Pretraining

from ..options import MOST_PRODUCTS, MOST_SEEDS, argument, flag, option
from .console import given, print_lines, print_table, print_written, progress, remark
from .measures import command

Out = Annotated[Path, typer.Option(help="Folder for results, figure and table; unfinished work there is continued.")]
OneDevice = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")]


@command()
def map_(
    out: Out = Path("runs/map"),
    quick: bool = flag("--quick", "A few small places within a minute; all of them take over an hour."),
    seeds: int = option("Fresh models per place, each with its own prompt.", 2, min=1, max=MOST_SEEDS),
    products: int = option("Products of the sketch, per prompt.", 64, max=MOST_PRODUCTS),
) -> None:
    """Map where the U-shape at initialization holds: d sigma^2, depth, length, width, residual scale, RoPE, windows, models.

    Writes map.nc, map.png, map.svg and map.md, the table of all places: how far the ends stand above the middle and how far
    each theory is off.

    Examples:
      headwater map --quick
      headwater map --out reports/theory
    """
    from ..charts import save as save_chart
    from ..headlines import SHOWN, headlines, write_tables
    from ..measures.map import MAP, atlas, places
    from ..results.dataset import replaced, save
    from ..run.files import together
    from ..run.store import unfinished

    nc, *_ = files = [out / f"map.{end}" for end in ("nc", "png", "svg", "md")]
    with progress() as advance, unfinished(out, "map") as root:
        for line in replaced([nc]):
            remark(line)
        ds = atlas(places(quick=quick), root, seeds=seeds, products=products, advance=advance, remark=remark)
        with together():
            save(ds, nc)
            save_chart(MAP.chart({"map": ds}), out / "map")
            write_tables(MAP, {"map": ds}, out / "map.md")
    shown = headlines(MAP, {"map": ds}, SHOWN)
    print_table(shown.columns, shown.rows)
    print_written(files)
    print_lines(MAP.answer({"map": ds}))


@command()
def toy(
    names: list[str] = argument(
        "retrieval, previous-token, exchanges, remarks, position-bias, rollout, petroglyph, births, or all.", ...
    ),
    quick: bool = flag("--quick", "A small setting of one to three minutes each, marked as quick."),
    changed: list[str] | None = option(
        "Change a setting; lists as in depths=2,4. May be repeated.", None, "--with", metavar="FIELD=VALUE"
    ),
    out: Out = Path("runs/toy"),
    device: OneDevice = "auto",
) -> None:
    """Train small transformers that isolate one phenomenon each, and redo the figures of their sources.

    Writes NAME.nc, figures and NAME.md, tables of what was published, what was measured, and whether it holds. The full
    setting is the published one, which takes hours; if interrupted, the same command resumes.

    Examples:
      headwater toy all --quick
      headwater toy retrieval --out reports/toy
      headwater toy position-bias --with depths=2 --with masks=causal --with seeds=2
      headwater toy births --with kinds=uniform-0.36,flat-0.36 --with seeds=0
    """
    from toy.experiments.experiment import EXPERIMENTS, extent, run, settings_of, summary

    chosen = EXPERIMENTS if names == ["all"] else tuple(dict.fromkeys(names))
    for name in chosen:  # before any work
        settings_of(name, quick=quick, given=changed or ())
    for name in chosen:
        with progress() as advance:
            ds, _, files = run(name, out, quick=quick, given=changed or (), device=device, advance=advance, told=remark)
        print_written(files)
        print_lines([extent(ds), *summary(name, ds)])


@command()
def pretrain(options: Pretraining) -> None:
    """Pretrain a small language model from fresh weights.

    The data order follows from seed and step alone, so the same command resumes an interrupted run and ends with the same
    weights as a run without a break.

    Examples:
      headwater pretrain tiny-llama --out runs/tiny-llama
      headwater pretrain tiny-qwen2 --steps 300 --text book.txt --out runs/book
      headwater pretrain --config config.json --dataset owner/name --no-bos --device cuda --out runs/own
    """
    from toy.pretrain import run

    with progress() as bar:
        label, steps = f"pretrain {options.out.name}", float(options.steps)
        report = run(**vars(options), command=given(), advance=lambda step, loss: bar(label, float(step), steps))
    print(
        f"{options.out}: validation loss {report['validation_loss']:.4f} nats per token "
        f"(bigram {report['bigram_validation_loss']:.4f}); all of it in {options.out / 'training.json'}"
    )
