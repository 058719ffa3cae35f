"""Commands that measure language models: position 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..options import MOST_PRODUCTS, Bands, Target, option
from .command import command
from .console import print_report, print_written, progress, remark
from .options import Running, Source


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
    print_written(written_files(results, target.out, probe, f"{probe}.md"))
