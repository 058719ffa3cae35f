"""Commands that show results (all on a page, two side by side), and what can be measured, and where."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from ..errors import InputError, plural
from ..options import Loading, Prompts, argument, flag, initialization, option
from .console import given, print_report, print_table, print_written, progress, remark
from .measures import command

TOYS = "What do small transformers that are trained here do, in which one ingredient can be changed at a time?"


@command(without=("prompts", "whole", "device_map", "max_memory", "offload_folder", "ablate"))
def report(
    models: list[str] | None = argument(
        "Bundled names, folders, GGUF files or hub ids; none: make the page from the results in --out."
    ),
    out: Path = option("Folder for results and page; what was measured there is kept.", Path("runs/report")),
    fresh: bool = flag("--fresh", "Measure again what was measured before."),
    quick: bool = flag(
        "--quick",
        "Few prompts and products, one fresh model: the whole page in minutes, wide intervals, marked as quick. "
        "--prompts overrides their number; full results that exist are kept.",
    ),
    prompts: int | None = option("Windows of text for every study; if not given, 2 to 256, as each study needs."),
    initialization: str = initialization(),
    *,
    source: Prompts,
    loading: Loading,
) -> None:
    """Measure models by every study and write one page: answers, charts, tables, statements, provenance.

    Writes index.html, claims.md, overview.png, overview.svg and, in a folder per study, results, figures and tables. The
    shortest studies come first. Results that were made with the same options are kept;
    if interrupted, the same command resumes. Without models it makes the page from all results under --out, including those
    of other commands (map, match, toy), and rewrites the tables and verdicts of toys.

    Examples:
      headwater report tiny-llama
      headwater report smollm2-135m --quick
      headwater report Qwen/Qwen2.5-0.5B ./my-checkpoint --length 512 --out runs/two
      headwater report --out reports
    """
    from ..report import measuring

    names, refused = [], []
    if quick and not models:
        raise InputError(
            "--quick measures models, and none is named; name one, as in headwater report tiny-llama --quick"
        )
    if models:
        read = measuring.Source(source, loading, initialization)
        how: dict[str, Any] = {"count": prompts, "length": source.length, "fresh": fresh, "quick": quick}
        with progress() as advance:
            names, refused = measuring.measure(models, out, source=read, advance=advance, remark=remark, **how)
    for line in _page(out, names, refused):
        print(line)


def _page(out: Path, names: Sequence[str], refused: Sequence[str]) -> list[str]:
    """Write the page of all results under a folder, those of the models named first; what to print of it."""
    from toy.experiments.experiment import EXPERIMENTS, claims_of, experiment, report_of
    from toy.match import MEASURE as MATCH

    from ..charts import image
    from ..claims.claim import beside, claims_table, headline, merged
    from ..claims.sources import claims
    from ..measures.map import MAP
    from ..report import Section, page_of, quick_remarks, write
    from ..results.folder import collect
    from ..results.tables import write_report
    from ..run.files import together

    collected = collect(out)
    if not len(collected):
        raise InputError(
            f"'{out}' holds no results to report; name a model to measure, as in headwater report tiny-llama"
        )
    files = [(kind, name) for kind in collected if kind.split("/")[0] == "toy" for name in collected[kind]]
    toys = [(name, collected[kind][name], collected.files[kind, name]) for kind, name in files if name in EXPERIMENTS]
    found = merged([*claims(collected), *(claim for name, ds, _ in toys for claim in claims_of(name, ds))])
    found, kept = beside(found, out / "claims.md")
    if kept:
        line = f"kept {plural(len(kept), 'row')} of {out / 'claims.md'} for which more was measured than is in {out}"
        remark(f"{line} (remove the file to judge by that alone): {', '.join(kept)}")
    with together():
        table = claims_table(found)
        write_report(replace(table, lines=[*quick_remarks(collected), *table.lines]), out / "claims.md")
        more = []
        for name, ds, file in toys:  # verdicts by the same rules as the ledger's, under the command that trained
            report, charts = report_of(name, ds), getattr(experiment(name), "charts", lambda ds: {})
            write_report(report, file.with_suffix(".md"), str(ds.attrs.get("command", "")))
            place = f"{file.parent.name}-{name}".replace("toy-", "")
            told = (f"Toys: {place.replace('-', ' ')}", TOYS, (), list(map(image, charts(ds).values())))
            more.append(Section(f"toy-{place}", *told, report.tables, report.described))
        how: Any = {"first": names, "remarks": refused, "files": bool(names), "more": more, "others": (MATCH, MAP)}
        page = page_of(collected, found, command=given(), **how)
        written = write(page, out)
    written = [written, out / "claims.md", *([out / "overview.png", out / "overview.svg"] if page.picture else [])]
    kinds = [kind for kind in collected if "/" not in kind and page.model in collected[kind]]
    return [
        f"{page.model or out}: {', '.join(kinds or collected)}",
        *page.remarks,
        *page.sentences,
        *headline(found),
        f"wrote {', '.join(map(str, written))}",
    ]


@command()
def compare(
    a: Path = argument("A result of a measure of language models.", ..., metavar="A.nc"),
    b: Path = argument("Another one of the same measurement.", ..., metavar="B.nc"),
    out: Path | None = option("Write the table to this file, too.", metavar="FILE.md"),
) -> None:
    """Compare two results number by number, B against A, with intervals: two checkpoints, two texts, base and instruct.

    The comparison is paired by prompt if both have the same tokens, by document if both have windows of the same documents,
    and otherwise unpaired; the table says which. The settings that differ are named below it.

    Examples:
      headwater compare base/jacobian.nc instruct/jacobian.nc
      headwater compare prose/leakage.nc code/leakage.nc --out prose-and-code.md
    """
    from ..compare import compare_results, comparison_report
    from ..results.tables import write_report

    if out is not None and out.suffix != ".md":
        raise InputError(f"out '{out}' is not a Markdown file; give a name that ends in .md")
    shown = comparison_report(compare_results(a, b), (str(a), str(b)))
    if out is not None:
        write_report(shown, out)
    print_report(shown)
    if out is not None:
        print_written([out])


@command()
def families(
    kinds: list[str] | None = argument("Model types, as config.json has them; none: all.", metavar="[MODEL_TYPE]..."),
) -> None:
    """List which families of models can be measured, with which backends, and what quantized layers allow.

    A model's type is the field model_type of its config.json. The table of quantized layers holds for every family and is
    left out where types are given. Nothing is loaded or measured.

    Examples:
      headwater families
      headwater families qwen3_moe gemma2
    """
    from ..models.families import FAMILIES, QUANTIZED, family_of
    from ..models.gguf.config import ARCHITECTURES

    rows, in_files = [], set[str]().union(*ARCHITECTURES.values())
    for kind in kinds or FAMILIES:
        family = family_of(kind)
        lens = "yes" if family.no_lens is None else f"no: {family.no_lens}"
        rows.append([kind, family.models, lens, "yes" if kind in in_files else "no"])
    print_table(("supported", "models", "TransformerLens", "GGUF"), rows)
    if not kinds:
        print("Quantized layers on a processor; jacobian, inspect and bos-swap need derivatives:")
        print_table(
            ("quantized", "passes alone", "derivatives", "theory", "why"),
            [[kind.layers, *kind.measured, kind.why] for kind in QUANTIZED],
        )


@command()
def selftest(
    device: str = option("auto (an accelerator if there is one), cpu, cuda, cuda:1, mps, ...", "auto"),
    out: Path | None = option("Folder for selftest.md; nothing is written if not given."),
) -> None:
    """Run every probe on a device and on the CPU, and say whether the numbers agree. Run this first on a GPU.

    Prints where it ran, and for every probe the variable that is furthest off, what is allowed, and the times: all that a
    report of a bug needs. It takes about a minute, on bundled models. The exit code is 1 if a probe differs or fails.

    Examples:
      headwater selftest
      headwater selftest --device cuda:1 --out runs/selftest
    """
    from toy.selftest import training

    from .. import selftest as probes_selftest
    from ..results.tables import write_report
    from ..run.files import require_writable
    from ..run.hardware import devices, named

    place = named(devices()[0] if device == "auto" else device)
    if out is not None:
        require_writable(out)
    with progress() as advance:
        rows = probes_selftest.selftest(place, {"toy: training": training}, advance)
    shown = probes_selftest.report(rows, place)
    if out is not None:
        write_report(shown, out / "selftest.md")
        print_written([out / "selftest.md"])
    print_report(shown)
    if any(row.verdict != "ok" for row in rows):
        raise typer.Exit(1)
