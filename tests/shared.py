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
from probes.measures.leakage import leakage
from probes.run import processes
from probes.studies.retrieval import retrieval
from probes.studies.study import Settings, study
from probes.studies.survey import survey
from probes.theory.kernel import second_moment

SURVEYS: dict[str, dict[str, Any]] = {
    "sinks": {"prompts": 5, "length": 32, "options": {"reacts": "mean"}},
    "trajectory": {"prompts": 5, "length": 32, "options": {"starts": 4}},
    "leakage": {"prompts": 5, "length": 32, "options": {"bootstrap": 9}},
    "bos-swap": {
        "prompts": 4,
        "length": 32,
        "options": {"replacement": ["mean", "zero"], "bootstrap": 9, "products": 20},
    },
    "decode": {"prompts": 9, "length": 32, "options": {"erase": (2,), "bootstrap": 9, "recall": 0}},
}
STUDIES: dict[str, Settings] = {
    "jacobian": Settings(prompts=3, length=24, seeds=1, products=40),
    "auto": Settings(prompts=3, length=24, products="auto", relative_error=0.01, conditions=("pretrained",)),
    "resumed": Settings(prompts=3, length=24, products="auto", relative_error=0.01, conditions=("pretrained",)),
    "theory": Settings(prompts=3, length=24, seeds=1, products=40, theories=("uniform", "values"), by_path=True),
}
RECALL: dict[str, Any] = {"pairs": 6, "keys": "apart", "digits": 3, "contexts": 6, "candidates": 3, "depths": None}
RECALL |= {"template": "sentences", "chat": False, "pilot": 2, "first": "auto", "seed": 0, "orders": 1}
RECALL |= {"mechanism": 4, "mechanism_depths": 2, "profile_prompts": 2}
SECOND_ROUND = 150  # products of three prompts, 32 for each in the first round and no less in the second


def everything(folder: Path) -> None:
    """Run all studies; results into folders of their names."""
    for name, given in SURVEYS.items():
        survey(["tiny-llama"], folder / name, name, **given)  # type: ignore[arg-type]
    for name, settings in STUDIES.items():
        study(["tiny-llama"], folder / name, settings, name="theory" if name == "theory" else "jacobian")
    retrieval(["tiny-llama"], folder / "retrieval", RECALL)


def begin(folder: Path) -> None:
    """Begin the study "resumed" in one process, and leave it in the middle of its rounds."""

    def stop(_: str, done: float, __: float) -> None:
        if done > SECOND_ROUND:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        study(["tiny-llama"], folder / "resumed", STUDIES["resumed"], advance=stop)
    assert list((folder / "resumed" / "unfinished").rglob("*.npz"))


def in_memory() -> dict[str, list[float]]:
    """The probes themselves, without a folder."""
    model = probes.load("tiny-llama")
    tokens = probes.prompts(model, n=4, length=16)
    found = {
        "jacobian": probes.jacobian(model, tokens, method="scalar")["sensitivity"],
        "auto": probes.jacobian(model, tokens, method="sketch", products="auto", relative_error=0.01)["stderr"],
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
