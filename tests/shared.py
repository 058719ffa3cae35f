"""What `test_processes` starts several times at once: all studies, each process as the launcher numbered it.

torchrun --nproc-per-node 2 tests/shared.py FOLDER
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import probes
from probes.loop import run
from probes.measure import measure
from probes.measures.leakage import leakage
from probes.options import Prompts
from probes.run import processes
from probes.theory.kernel import second_moment

# By folder: the measure, prompts and their length, options.
RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "trajectory": ("trajectory", 5, 32, {"starts": 4}),
    "leakage": ("leakage", 5, 32, {"bootstrap": 9, "unmasked": True}),
    "sinks": ("sinks", 5, 32, {"reacts": "mean", "evict": "1", "keep": "8", "effect": "2"}),
    "bos-swap": ("bos-swap", 4, 32, {"replace": "mean,zero", "bootstrap": 9, "products": 20}),
    "decode": ("decode", 9, 32, {"erase": "2", "controls": 2, "bootstrap": 9, "recall": 0}),
    "jacobian": ("jacobian", 3, 24, {"seeds": 1, "products": 40}),
    "resumed": ("jacobian", 4, 24, {"products": 40, "conditions": "pretrained"}),
    "theory": ("theory", 3, 24, {"seeds": 1, "products": 40}),
    "retrieval": (
        "retrieval",
        0,
        0,
        {"pairs": 6, "keys": "apart", "digits": 3, "contexts": 6, "mechanism": 4, "profile_prompts": 2},
    ),
}
BEGUN = 2  # pieces of "resumed", one of each prompt


def everything(folder: Path) -> None:
    """Run all studies; results into folders of their names."""
    for name in RUNS:
        one(name, folder)


def one(name: str, folder: Path, advance: Any = None) -> None:
    """One of `RUNS`, into a folder of its name."""
    called, count, length, options = RUNS[name]
    how = measure(called)
    run(how, ["tiny-llama"], folder / name, how.options(**options), Prompts(count, length), advance=advance)


def begin(folder: Path) -> None:
    """Begin the study "resumed" in one process, and leave it in the middle."""
    pieces = folder / "resumed" / "unfinished"

    def stop(*_: object) -> None:
        if len(list(pieces.rglob("[!.]*.npz"))) >= BEGUN:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        one("resumed", folder, stop)
    assert list(pieces.rglob("[!.]*.npz"))


def in_memory() -> dict[str, list[float]]:
    """The probes themselves, without a folder."""
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=4, length=16)
    found = {
        "jacobian": probes.jacobian(model, tokens, method="scalar")["sensitivity"],
        "sketch": probes.jacobian(model, tokens, method="sketch", products=40)["stderr"],
        "sinks": probes.sinks(model, tokens, keys="all")["alpha"],
        "leakage": leakage(model, tokens, bootstrap=3)["log_form_high"],
        "theory": second_moment(model, tokens[:1])["sensitivity"],  # fewer than there are processes
    }
    return {name: values.values.ravel().tolist() for name, values in found.items()}


def main() -> None:
    """Join, measure, and say what came out here."""
    torch.set_num_threads(1)
    processes.join()
    folder = Path(sys.argv[1])
    everything(folder)
    found = in_memory()
    (folder / f"process-{processes.number()}.json").write_text(json.dumps(found))
    processes.leave()
    assert processes.count() == 1
    assert os.environ["WORLD_SIZE"] == "2"


if __name__ == "__main__":
    main()
