"""Commands that measure what language models do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..options import flag, option
from .command import command
from .console import print_report, print_written, progress, remark
from .options import First, Initialization, Options, Running, Seed, Target


@dataclass(frozen=True)
class Recalled(Options):
    """Which lists are made, and what is asked; arguments of `probes.retrieval`."""

    pairs: int | None = option("Pairs of a list; if not given, lists get harder, from 12 pairs to 288.")
    keys: Literal["apart", "alike"] | None = option("Different nouns, or colours and nouns that recur.")
    digits: int | None = option("Digits of a value, 2 to 15; 0: values are nouns.")
    contexts: int = option("Lists, an even number: each is the control of another one.", 100)
    orders: int = option("Orders in which each couple of lists is asked; contexts is a multiple of twice as many.", 1)
    depths: int | None = option("Pairs asked for in each list, evenly spaced; all if not given.")
    template: str = option("sentences, json, reworded, or announced (keys before the list).", "sentences")
    chat: bool = flag("--chat", "The list is the user's, the answer the assistant's, by the model's chat template.")
    candidates: int = option("Values whose probabilities are ranked for each question; 1: none, which is faster.", 36)
    pilot: int = option("Lists that are tried before lists get harder.", 8)
    mechanism: int = option("Lists of which it is also measured what the value's log odds depend on; 0: none.", 0)
    mechanism_depths: int = option("Pairs of each of these lists that are asked for, evenly spaced.", 5)
    fisher: bool = flag("--fisher", "With --mechanism, also what the whole next-token distribution depends on.")
    profile_prompts: int = option("With --mechanism, prompts of ordinary text for profiles; 0: no profiles.", 4)
    initialization: Initialization = "config"
    first: First = "auto"
    seed: Seed = 0

    def values(self) -> dict[str, Any]:
        from ..data.prompts import parse_first

        return vars(self) | {"first": parse_first(self.first)}


@command(without=("backend",), out=Path("runs/retrieval"))
def retrieval(target: Target, recalled: Recalled, running: Running) -> None:
    """Measure what a model recalls of a list of keys and values, by the depth at which the pair stands.

    Writes retrieval.nc, retrieval.png, retrieval.svg, retrieval.md and prints recall by depth, with the first and the last
    pairs against the middle. Lists get harder until the model answers no more than nine of ten questions, unless --pairs,
    --keys and --digits say how hard they are. There is no --backend: lists run once, and questions behind them, through the
    modules of transformers. If interrupted, the same command resumes.

    With --mechanism it is also measured, in some of the lists, what the value's log odds depend on: the pair asked for, the
    other pairs, position 0, the paths through attention to it; and what that says of recall by depth.

    Examples:
      headwater retrieval smollm2-135m --pairs 36 --contexts 24
      headwater retrieval smollm2-135m --pairs 36 --mechanism 24
      headwater retrieval ./checkpoint --template json --chat
      headwater retrieval Qwen/Qwen2.5-0.5B --pairs 144 --keys alike --depths 12
    """
    from ..studies.retrieval import retrieval as study
    from ..studies.retrieval import retrieval_report
    from ..studies.runner import written_files

    with progress() as advance:
        how = running.values() | {"advance": advance, "told": remark}
        results = study(target.sources, target.out, recalled.values(), **how)
    print_report(retrieval_report(results))
    print_written(written_files(results, target.out, "retrieval", "retrieval.md"))
