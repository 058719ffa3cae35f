"""Commands that measure language models: profiles and theory, sinks, trajectory, leakage, position 0, one text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..options import MOST_PRODUCTS, Options, Target, option
from . import options as read
from .command import command
from .console import print_report, print_written, progress, remark
from .options import Bands, Initialization, Running, Source


@dataclass(frozen=True)
class Sinks(Options):
    """What counts as a sink, and what is found out about heads."""

    keys: str | None = option("Positions that may be sinks: all, 0-7, 0,5; the first 8 if not given.")
    threshold: float = option("A key with alpha above it is a sink [Gu].", 0.3)
    tau: float = option("Attention weights above it are counted [Wu].", 0.2)
    reacts: str = option("What to put at position 0: mean, zero, random, a token id, or off.", "mean")
    pictures: int = option(
        "Attention patterns to keep, of the first heads in the table; the figure has room for three.", 3
    )
    effect: str = option(
        "Heads whose effect is measured by removing what they take from position 0: off, all, or how many of "
        "those that take most; it costs about half a pass per head and prompt.",
        "off",
    )
    effect_prompts: int = option("Prompts for --effect: the first ones.", 8)
    evict: str | None = option(
        "Numbers of first keys that a cache keeps beside the last, as in 0,1,4: loss and KL against all keys."
    )
    keep: str | None = option(
        "With --evict: numbers of last keys; 64,128,256 if not given, as far as prompts are longer."
    )

    def values(self) -> dict[str, Any]:
        from ..measures.effect import parse_effect
        from ..measures.evict import parse_counts
        from ..measures.sinks import parse_keys
        from ..models.swap import parse_replacement

        reacts = None if self.reacts == "off" else parse_replacement(self.reacts)
        found: dict[str, Any] = vars(self) | {"reacts": reacts, "effect": parse_effect(self.effect)}
        if (keys := found.pop("keys")) is not None:  # the default is as many of the first as a prompt has
            found["keys"] = parse_keys(keys)
        for name, example in (("evict", "0,1,4"), ("keep", "64,128,256")):
            found[name] = None if found[name] is None else parse_counts(found[name], name, example)
        return found


@command(out=Path("runs/sinks"))
def sinks(
    target: Target,
    heads: Sinks,
    top: int = option("Heads of each model in the table.", 10, min=0),
    layer: str | None = option("Blocks in the table, as in 3-7 or 0,4; all if not given."),
    head: str | None = option("Heads of these blocks in the table, likewise."),
    *,
    source: Source,
    running: Running,
) -> None:
    """Find attention sinks, and what every head does with position 0: reads, parks, reacts or ignores.

    Writes sinks.nc, sinks.png, sinks.svg, sinks.md, sinks-heads.csv (all numbers of all heads) and prints the sink rate of
    the first keys beside uniform attention and
    Wu's fraction, how many heads have which role, and the heads that take most from position 0.

    Examples:
      headwater sinks tiny-llama
      headwater sinks tiny-llama tiny-qwen2 --keys 0,1,5 --threshold 0.2
      headwater sinks ./checkpoint --keys all --reacts off --pictures 0 --length 1024
      headwater sinks tiny-qwen2 --effect all --prompts 8 --length 64
      headwater sinks tiny-llama --evict 0,1,4 --keep 16,64 --prompts 8
      headwater sinks ./checkpoint --device-map auto --max-memory 0=20GiB,cpu=60GiB --offload-folder offload
    """
    chosen = {"layers": read.numbers(layer, "layer"), "heads": read.numbers(head, "head")}
    _survey("sinks", target, source, running, heads.values(), top=top, **chosen)


@dataclass(frozen=True)
class Leakage(Bands):
    """How leakage is measured."""

    fresh: int | None = option(
        "Prompts of the null with fresh weights; 0 for none; if not given, 64 where memory holds the weights twice."
    )
    initialization: Initialization = "config"


@command(out=Path("runs/leakage"), prompts=256)
def leakage(target: Target, bands: Leakage, source: Source, running: Running) -> None:
    """Split the absolute position in attention patterns into the causal mask's part and the residual stream's.

    Writes leakage.nc, leakage.png, leakage.svg, leakage.md and prints every band's shares with intervals, the order
    of the models, the null checks, and both forms block by block.

    Examples:
      headwater leakage tiny-llama tiny-llama-ntk tiny-mistral-window
      headwater leakage tiny-qwen2 --bands 9-31 --lags 1,2,4 --prompts 128
    """
    _survey("leakage", target, source, running, bands.values() | {"seed": source.seed})


@command(out=Path("runs/bos-swap"), prompts=128)
def bos_swap(
    target: Target,
    replace: str = option(
        "What to do at position 0, one after another: mean, zero, random, drawn, token ids, each with @BLOCK, :PART (keys, "
        "values, both), *DOSE if wanted; without-0, constant-sink, held-log-z, equal-log-z, each with @BLOCK if wanted.",
        "mean",
    ),
    *,
    bands: Bands,
    profile_prompts: int = option("Prompts of the Jacobian profile; 0: none.", 4),
    products: int = option("Products of the profile's sketch, per prompt.", 64, max=MOST_PRODUCTS),
    recall: int = option("Lists of keys and values that recall is measured on; 0: none.", 0),
    source: Source,
    running: Running,
) -> None:
    """Put something else at position 0, or take it out of attention, and see what changes.

    Writes bos-swap.nc, bos-swap.png, bos-swap.svg, bos-swap.md and prints, for every replacement, the fraction of the
    residual component of leakage that it removes in each band, and sink rate, loss, KL divergence, recall and Jacobian
    profile before and after.

    Examples:
      headwater bos-swap tiny-llama
      headwater bos-swap tiny-llama tiny-qwen2 --replace mean,zero,random,17
      headwater bos-swap ./checkpoint --bands 9-31 --profile-prompts 2
      headwater bos-swap smollm2-135m --replace "mean@4,mean:keys,mean*0.4,without-0@8,held-log-z" --recall 12
    """
    from ..models.intervene import intervention

    options = {"replacement": [intervention(part).label for part in replace.split(",")], **bands.values()}
    options |= {"seed": source.seed, "profile_prompts": profile_prompts, "products": products, "recall": recall}
    _survey("bos-swap", target, source, running, options)


def _survey(
    probe: Any, target: Target, source: Source, running: Running, options: Mapping[str, Any], **reporting: Any
) -> None:
    """Run a survey with its progress on stderr, and print its report."""
    from ..studies.runner import written_files
    from ..studies.survey import PROBES, survey

    with progress() as advance:
        how = source.values() | running.values() | {"reporting": reporting, "advance": advance, "told": remark}
        results = survey(target.sources, target.out, probe, options=options, **how)
    print_report(PROBES[probe].report(results, **reporting))
    print_written(written_files(results, target.out, probe, f"{probe}.md", *PROBES[probe].files))
