"""The command that shows one text in colour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import options
from ..options import MOST_PRODUCTS, MOST_SEEDS, Loading, Options, argument, option
from .command import command
from .console import print_lines, print_table, print_written, progress


@dataclass(frozen=True)
class Text:
    """What the model reads."""

    prompt: str | None = option("What the model reads.")
    text: Path | None = option("Instead: a file that holds it.")
    chat: str | None = options.chat()
    ids: str | None = option("Instead: token ids, as in 1,2,3.")


@dataclass(frozen=True)
class Inspection(Options):
    """What of a text's reading is measured, and against what."""

    of: str = option(
        "What depends on the tokens: prediction, logits, top (log p of the most probable), an id.", "prediction"
    )
    baseline: Literal["init", "kernel", "text", "none"] = option(
        "What is divided out: the architecture's bias at initialization; the random-matrix baseline of the weights; "
        "the model's mean profile over other texts; nothing.",
        "init",
    )
    method: Literal["exact", "sketch"] = option("All products, or few with an error bar.", "sketch")
    products: int | None = option("Products of the sketch; 64 if not given.", max=MOST_PRODUCTS)
    seeds: int = option("Fresh models of the baseline init.", 3, max=MOST_SEEDS)
    initialization: str = options.initialization()
    first: str = options.first()
    seed: int = options.seed()

    def values(self) -> dict[str, Any]:
        from ..data.prompts import parse_first
        from ..measures.inspect import parse_of

        return vars(self) | {"of": parse_of(self.of), "first": parse_first(self.first)}


@command()
def inspect(
    model: str = argument("A bundled name, folder, GGUF file or hub id, with @REVISION if wanted.", "tiny-llama"),
    *,
    read: Text,
    out: Path = option("Folder for the page and the result.", Path("runs/inspect")),
    top: int = option("Tokens in the table.", 12, min=0),
    inspection: Inspection,
    loading: Loading,
) -> None:
    """Show a text in colour: how much the next-token prediction depends on each token, position's own part divided out.

    Writes inspect.html, inspect.nc and prints the text (numbers instead of colours in a pipe), the shares of sink, recency
    and the rest, and the tokens that stand out most.

    Examples:
      headwater inspect tiny-llama --prompt "def area(width, height): return width *"
      headwater inspect tiny-qwen2 --text notes.txt --baseline text --out runs/notes
      headwater inspect ./checkpoint --chat "Why is the sky blue?" --of top --method exact
    """
    import torch

    from ..loop import KEY
    from ..measures.inspect import inspect as measured
    from ..measures.reading import parse_prompt, read_prompt
    from ..report.inspection import inspection_page
    from ..results.dataset import kept, provenance, save
    from ..run.files import atomic, require_free, require_writable, together
    from ..run.store import Store, unfinished

    prompt, chat = parse_prompt(**vars(read))
    page, result = files = [out / "inspect.html", out / "inspect.nc"]
    require_writable(out)
    require_free(files)
    view, values = loading.load(model), inspection.values()
    label = f"{view.identity.name} inspect"
    ids, *_ = read_prompt(view, prompt, chat, values["first"])
    origin = provenance(view, torch.tensor([ids]))
    with progress() as advance, unfinished(out, "inspect") as root:
        pieces = Store(root, label, {name: origin[name] for name in KEY if name in origin} | values)
        how: Any = {"pieces": pieces, "progress": lambda done, total: advance(label, float(done), float(total))}
        ds = kept(pieces, lambda: measured(view, prompt, chat=chat, **how, **values))
        with together():
            with atomic(page) as temporary:
                temporary.write_text(inspection_page(ds, top), encoding="utf-8")
            save(ds, result)
    _show(ds, top)
    print_written(files)


def _show(ds: Any, top: int) -> None:
    """The coloured text with its legend, or every token with its numbers where there are no colours; then the tables."""
    from rich.console import Console

    from ..report.inspection import COLUMNS, colored_text, rows, sentences, tables

    console = Console(highlight=False, emoji=False)
    print_lines(sentences(ds))
    if console.color_system is not None and not console.no_color:
        console.print("", colored_text(ds), soft_wrap=True, sep="\n")
    else:
        print_table(COLUMNS, rows(ds))
    for table in tables(ds, top):
        print(f"\n{table.title}:")
        print_table(table.columns, table.rows)
