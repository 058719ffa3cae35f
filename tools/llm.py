"""Measure the real language models: `make llm`, hours on a CPU, resumable.

    python tools/llm.py                  # everything that is not there yet
    python tools/llm.py --list           # the steps with their commands, and which are done
    python tools/llm.py --only leakage   # steps whose name begins with this, or holds it
    python tools/llm.py --table          # the table of docs/findings.md; reports/llm/table.md has all of it

Each step is one `headwater` command; an interrupted one resumes. Results go to `reports/llm/KIND/`, measurements of another
kind of input, initialization or weights to `reports/llm/VARIANT/KIND/`; figures and tables are drawn again at the end.
`noise` holds SmolLM2 with noise of half a quantization step on its weights, three draws: what quantization may have made.
SmolLM2-135M-Instruct comes by `make smollm2`; Qwen2.5-Coder-0.5B-Instruct is the file of that name in `runs/` (its
steps are left out where it is not there). One thread unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import xarray as xr
from slim import slim

from probes.claims.commands import MEASURED
from probes.data.documents import BUNDLED, read_documents
from probes.figures import decode_figure, retrieval_figure
from probes.measures.recall_numbers import PLACES, carries_over
from probes.measures.recall_numbers import shape as recall
from probes.measures.roles import ATTENDS
from probes.models.named import located
from probes.report.measuring import draw
from probes.results.curves import estimate
from probes.results.dataset import load, options_of, save, stored
from probes.results.folder import COMMANDS, collect
from probes.results.profiles import change, shapes
from probes.results.statistics import jackknifed, units
from probes.results.tables import interval, write_report
from probes.studies.decode import decode_report
from probes.studies.retrieval import retrieval_report
from probes.studies.study import agreements

SMOL, QWEN = "smollm2-135m", "runs/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
START, END = "1", "2"  # <|im_start|>, <|im_end|>: ids of SmolLM2
OUT, WORK = Path("reports/llm"), Path("runs/llm")
CHAT = WORK / "chat.json"  # a passage of each bundled document, as a user's question
PASSAGE = slice(2000, 3500)  # characters
NOISE = [f"runs/smollm2-135m-noise{seed}.gguf" for seed in range(3)]
TEXTS = {
    "capitals": "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is",
    "names": "When Mary and John went to the store, John gave the book to Mary. Then Mary thanked",
    "code": "assert sum([1, 2, 3]) == 6; assert sum([4, 5]) == 9; assert sum([1, 2, 3, 4]) ==",
}
CONVERGED = 3  # the block before which streams of different tokens at position 0 have not met yet


class Step(NamedTuple):
    """One command on one model; `variant` is empty for what the headline rests on."""

    kind: str
    model: str
    options: str
    variant: str = ""

    @property
    def command(self) -> str:
        """What is run; results of scalar surrogates are a Jacobian's."""
        return "jacobian" if self.kind == "scalar" else self.kind

    @property
    def name(self) -> str:
        """Of the step."""
        return "/".join(part for part in (self.variant, self.kind, Path(self.model).stem) if part)

    @property
    def result(self) -> Path:
        """The file that it leaves: what `tools/slim.py` keeps; all of it stays under `runs`."""
        drawn_by = "" if self.kind == "paths" else f"{self.command}-"
        return OUT / self.variant / self.kind / f"{drawn_by}{Path(self.model).stem}.nc.xz"

    @property
    def arguments(self) -> list[str]:
        """Of Python: what runs it, in words that a shell takes."""
        program = ["tools/paths.py"] if self.kind == "paths" else ["-m", "probes", self.command]
        return [*program, self.model, *shlex.split(self.options), "--out", str(WORK / self.name)]


RULE = {SMOL: "smollm2-135m", QWEN: "qwen2.5"}
# Dose, first token, block, part, and what attention makes of key 0.
INTERVENTIONS = (
    "mean*0.2,mean*0.4,mean*0.6,mean*0.8,mean,zero,random,drawn,0,1,mean@1,mean@2,mean@4,mean@8,mean@16,mean@24,"
    "mean:keys,mean:values,mean:both,mean@4:keys,mean@4:values,mean@4:both,without-0,without-0@4,without-0@8,without-0@16,"
    "without-0@24,constant-sink,held-log-z,equal-log-z"
)
# Of Qwen, whose weights overflow when log Z is held (its logits reach far above any normal sum).
FEWER = "drawn,zero,without-0,without-0@4,without-0@8,mean@8,mean@4:values,constant-sink,equal-log-z"
WITHOUT_PROFILE = "--length 128 --profile-prompts 0 --bands 9-31,32-127"
RECALL = "--keys apart --digits 4 --contexts 100 --candidates 12"
ALIKE = "--keys alike --digits 4 --candidates 12"
LISTS = "--pairs 36 --keys apart --digits 4"
FORMS = {  # lists of another form: what is said of it, and its options
    "orders": ("each in four orders", f"{LISTS} --contexts 48 --orders 4"),
    "reworded": ("the question in other words", f"{LISTS} --contexts 24 --template reworded"),
    "announced": ("keys named before the list", f"{LISTS} --contexts 24 --template announced"),
    "nouns": ("nouns for numbers", "--pairs 36 --keys apart --digits 0 --contexts 24"),
    "json": ("JSON", f"{LISTS} --contexts 24 --template json"),
    "alike": ("keys alike", "--pairs 36 --keys alike --digits 4 --contexts 24"),
    "pairs-72": ("72 pairs", "--pairs 72 --keys apart --digits 4 --contexts 24"),
}
EVERY_KEY = "--keys all --reacts off --pictures 0"
EVICT = "--length 1024 --reacts off --pictures 0 --evict 0,1,4 --keep 64,128,256"
STEPS = [
    # What the headline rests on, SmolLM2 first.
    Step("sinks", SMOL, f"{MEASURED['sinks']} --effect 40 --effect-prompts 2"),
    *(Step(kind, SMOL, options) for kind, options in MEASURED.items() if kind != "sinks"),
    Step("sinks", QWEN, "--prompts 16 --length 256 --effect 40 --effect-prompts 2"),
    Step("trajectory", QWEN, "--prompts 8 --length 256"),
    Step("leakage", QWEN, "--prompts 64 --length 128 --fresh 0"),
    Step("jacobian", QWEN, f"--prompts 8 --seeds 1 --products 24 --length 128 --initialization {RULE[QWEN]}"),
    Step("bos-swap", QWEN, "--replace mean,random --prompts 32 --length 128 --profile-prompts 1 --products 24"),
    Step("retrieval", QWEN, "--pairs 36 --keys alike --digits 4 --contexts 100 --candidates 1"),
    Step("bos-swap", SMOL, f"--replace '{INTERVENTIONS}' --prompts 32 {WITHOUT_PROFILE} --recall 12", "interventions"),
    Step("retrieval", SMOL, f"--pairs 36 {RECALL} --mechanism 24 --initialization {RULE[SMOL]}", "mechanism"),
    Step(
        "retrieval", QWEN, f"--pairs 36 {ALIKE} --contexts 24 --mechanism 4 --initialization {RULE[QWEN]}", "mechanism"
    ),
    Step("decode", SMOL, "--prompts 32 --length 128 --erase all --recall 8"),
    Step("bos-swap", QWEN, f"--replace '{FEWER}' --prompts 16 {WITHOUT_PROFILE} --recall 4", "interventions"),
    Step("decode", QWEN, "--prompts 32 --length 128 --erase all --no-leakage"),
    # Other texts, first tokens, lengths, initializations.
    Step("retrieval", SMOL, f"--pairs 12 {RECALL}", "pairs-12"),
    *(Step("retrieval", SMOL, f"{said} --candidates 1", variant) for variant, (_, said) in FORMS.items()),
    Step("leakage", SMOL, f"{MEASURED['leakage']} --text code", "code"),
    Step("jacobian", SMOL, "--conditions pretrained --prompts 16 --products 32 --text code", "code"),
    Step("sinks", SMOL, f"{MEASURED['sinks']} --text code", "code"),
    Step("sinks", SMOL, f"{MEASURED['sinks']} --first {START}", "im-start"),
    Step("leakage", SMOL, f"{MEASURED['leakage']} --first {START}", "im-start"),
    Step("bos-swap", SMOL, f"{MEASURED['bos-swap']} --first {START}", "im-start"),
    Step("trajectory", SMOL, f"{MEASURED['trajectory']} --first {START}", "im-start"),
    Step("sinks", SMOL, f"{MEASURED['sinks']} --first {END}", "end"),
    Step("sinks", SMOL, "--prompts 4 --length 64 --reacts off --effect all --effect-prompts 4", "t64"),
    Step("decode", SMOL, "--prompts 32 --length 64 --erase all --recall 0 --no-leakage", "t64"),
    Step("sinks", SMOL, "--prompts 8 --length 1024 --reacts off", "t1024"),
    Step("sinks", SMOL, "--prompts 4 --length 2048 --reacts off", "t2048"),
    Step("sinks", SMOL, f"{MEASURED['sinks']} {EVERY_KEY}", "all-keys"),
    Step("sinks", SMOL, f"--prompts 12 {EVICT}", "evict"),
    Step("jacobian", SMOL, "--conditions init --prompts 4 --seeds 2 --products 32 --initialization 0.02", "rule-0.02"),
    Step("jacobian", SMOL, "--conditions init --prompts 4 --seeds 2 --products 32 --initialization 1/24", "rule-1-24"),
    Step("leakage", QWEN, "--prompts 64 --length 128 --fresh 0 --text code", "code"),
    Step("sinks", QWEN, "--prompts 16 --length 256 --text code", "code"),
    Step("sinks", QWEN, f"--prompts 16 --length 256 {EVERY_KEY}", "all-keys"),
    Step("sinks", QWEN, f"--prompts 6 {EVICT}", "evict"),
    Step("sinks", SMOL, f"{MEASURED['sinks']} --chat {CHAT}", "chat"),
    Step("leakage", SMOL, f"--prompts 100 --length 128 --chat {CHAT}", "chat"),
    Step("paths", SMOL, f"--prompts 16 --seeds 2 --length 128 --initialization {RULE[SMOL]}"),
    *(
        Step("inspect", SMOL, f"--prompt {shlex.quote(text)} --initialization {RULE[SMOL]}", f"inspect/{name}")
        for name, text in TEXTS.items()
    ),
    *(Step("sinks", model, "--prompts 16 --length 256 --reacts off", "noise") for model in NOISE),
    *(Step("trajectory", model, "--prompts 16 --length 256", "noise") for model in NOISE),
    *(Step("jacobian", model, "--conditions pretrained --prompts 8 --products 32", "noise") for model in NOISE),
    Step("jacobian", SMOL, "--conditions pretrained --prompts 2 --products 24 --length 1024", "t1024"),
]


# Kinds that are no part of a report's own studies, with what draws and tells them.
OF_COMMANDS = (("retrieval", retrieval_figure, retrieval_report), ("decode", decode_figure, decode_report))


def prepare(step: Step) -> None:
    """Make the input of a step that is made here."""
    if str(CHAT) in step.options and not CHAT.is_file():
        asked = [[{"role": "user", "content": document.text[PASSAGE]}] for document in read_documents(BUNDLED["prose"])]
        CHAT.parent.mkdir(parents=True, exist_ok=True)
        CHAT.write_text(json.dumps(asked), encoding="utf-8")
    if step.model in NOISE and not Path(step.model).is_file():
        seed, half = str(NOISE.index(step.model)), f"{step.model}.part"
        subprocess.run([sys.executable, "tools/noise.py", str(located(SMOL)), half, "--seed", seed], check=True)
        Path(half).rename(step.model)


def measure(step: Step) -> bool:
    """Run a step unless its result is there; whether it is there now."""
    if step.result.is_file():
        return True
    if step.model == QWEN and not Path(QWEN).is_file():
        print(f"{step.name}: left out, '{QWEN}' is not there", flush=True)
        return False
    print(f"{step.name}: {told(step)}", flush=True)
    prepare(step)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([sys.executable, *step.arguments], env=environment, check=False)
    made = WORK / step.name / f"{step.command}.nc"
    if done.returncode or not made.is_file():
        print(f"{step.name}: not measured (exit code {done.returncode})", flush=True)
        return False
    save(slim(load(made), step.kind), step.result)
    if step.kind == "paths":  # drawn by the command itself
        shutil.copyfile(made.with_suffix(".png"), step.result.with_suffix("").with_suffix(".png"))
    return True


def told(step: Step) -> str:
    """A step's command, as a user would type it."""
    words = step.arguments
    return shlex.join(["headwater", *words[2:]] if words[0] == "-m" else ["python", *words])


def drawn(steps: Iterable[Step]) -> None:
    """Figures and tables of these steps' folders, and the table of all."""
    for root in sorted({OUT / step.variant for step in steps}):
        if root.is_dir():
            found = collect(root)
            draw(root, [kind for kind in found if kind in COMMANDS])
            for kind, figure, reported in OF_COMMANDS:
                if results := found[kind]:
                    figure(results, path=root / kind / f"{kind}.png")
                    write_report(reported(results), root / kind / f"{kind}.md")
    lines = ["# The real models in numbers", "", "95 % intervals over documents; `python tools/llm.py`.", "", *tabled()]
    lines += left_out()
    if (OUT / "noise").is_dir():
        lines += ["", "With noise of half a quantization step on all quantized weights, three draws:", ""]
        lines += tabled(OUT / "noise")
    (OUT / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def left_out() -> list[str]:
    """What of recall by depth carries over to lists of a length that was left out, in a sentence."""
    files = [OUT / variant / f"retrieval/retrieval-{SMOL}.nc" for variant in ("pairs-12", "", "pairs-72")]
    if not all(stored(file).is_file() for file in files):
        return []
    lists = [load(file) for file in files]
    found = "; ".join(f"{by} {interval(*carries_over(lists, by)[:3], form='.2f')}" for by in PLACES)
    said = f"{SMOL}, recall (log p) of 12, 36 and 72 pairs by depth, the variance of one curve explained by the others:"
    return ["", f"{said} {found}."]


Cell: TypeAlias = Callable[[xr.Dataset], str]  # what a cell of the table says, from a result


def tabled(root: Path = OUT, *, variants: bool = True) -> list[str]:
    """The models of a folder in numbers, with 95 % intervals over documents, as a table in Markdown; without `variants`
    what the headline rests on.
    """
    found = collect(root)
    names = list(found["sinks"])
    lines = [["", *(f"`{name}`" for name in names)], ["---"] * (1 + len(names))]
    for told, kind, cell in rows():
        cells = [cell(found[kind][name]) if name in found[kind] else "-" for name in names]
        if (variants or "/" not in kind) and any(one != "-" for one in cells):
            lines.append([told, *cells])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def rows() -> Iterator[tuple[str, str, Cell]]:
    """(what a row says, the kind of its results, its cells)."""
    for told, kind in (
        ("text at position 0", "sinks"),
        ("its chat token (id 1) there", "im-start/sinks"),
        ("its end-of-text token (id 2) there", "end/sinks"),
        ("its chat template", "chat/sinks"),
        ("code", "code/sinks"),
        ("T = 64", "t64/sinks"),
        ("T = 1,024", "t1024/sinks"),
        ("T = 2,048", "t2048/sinks"),
    ):
        yield f"sink rate of position 0, {told}", kind, _sink_rate
    attend = "heads that attend to it (> 0.3)"
    yield attend, "sinks", lambda ds: f"{(ds['attends'].values > ATTENDS).sum()} of {ds['attends'].size}"
    for told, kind in (("the 40 that write most", "sinks"), ("all heads, T = 64", "t64/sinks")):
        yield f"largest effect of a head's reading, {told}", kind, _effect
    for first in (0, 1, 4):
        told = f"loss with the first {first} and the last 64, 128, 256 of 1,024 keys alone, by the cache"
        yield told, "evict/sinks", partial(_evicted, first=first)
    yield "massive activation at position 0", "trajectory", _massive
    yield "other tokens put there: mean cosine of their streams, from block 3 on", "trajectory", _cosine
    total, share = partial(_part, name="log_form_of_model", unit=" nat²", part="total"), partial(_part, form=".0%")
    for told, kind in (("prose", "leakage"), ("code", "code/leakage"), ("prose behind id 1", "im-start/leakage")):
        yield f"position in attention, queries 9-31, {told}", kind, total
        yield "... of uniform attention, fresh weights, shuffled queries", kind, _nulls
        yield "... heads whose estimate lies below uniform attention's", kind, _below_uniform
        yield "... in the median block", kind, _median_block
        yield "... without the head that leaks most; the mask's share of that", kind, _without_most
        for said, name, source in (
            ("of it the mask's, with the constant sink", "steady", "mask"),
            ("of it the residual stream's", "steady", "residual"),
            ("the same, constant left in", "log", "residual"),
        ):
            yield f"... {said}", kind, partial(share, name=f"{name}_share_of_model", source=source)
        for said, name in (("taken out", "steady"), ("left in", "log")):
            yield f"V(X), constant {said}", kind, partial(_part, name=f"{name}_stream_of_model")
    yield "position in attention, queries 64-127, prose", "leakage", partial(total, band="64-127")
    yield "zero embedding for text: sink rate", "interventions/bos-swap", partial(_swapped, by="zero")
    yield "... change of loss", "interventions/bos-swap", partial(_loss, by="zero")
    for told, kind in (("text", "bos-swap"), ("id 1", "im-start/bos-swap")):
        for by in ("mean", "random"):
            yield f"{by} embedding for {told}: sink rate", kind, partial(_swapped, by=by)
            yield "... change of loss", kind, partial(_loss, by=by)
            cell = partial(_part, name="residual_steady_change_of_model", replacement=by)
            yield "... change of V(X), constant taken out", kind, cell
    for told, kind, condition in (
        ("init", "jacobian", "init"),
        ("init, every deviation 0.02", "rule-0.02/jacobian", "init"),
        ("init, every deviation 1/24", "rule-1-24/jacobian", "init"),
        ("pretrained", "jacobian", "pretrained"),
        ("pretrained, code", "code/jacobian", "pretrained"),
        ("pretrained, T = 1,024", "t1024/jacobian", "pretrained"),
    ):
        for name in ("primacy", "recency"):
            yield f"{name}, {told}", kind, partial(_shape, condition=condition, name=name)
    yield "middle, pretrained against init (elasticity)", "jacobian", _middle
    yield "kernel with score path at init", "jacobian", _kernel
    recalled = {"36 pairs": "mechanism", "12 pairs": "pairs-12"} | {said: of for of, (said, _) in FORMS.items()}
    for told, variant in recalled.items():
        yield f"recall, {told}: exact; first pairs, last pair against the middle", f"{variant}/retrieval", _recall
    for said, block in (("second", 1), ("last", -1)):
        for path in ("value", "score"):
            told = f"{path} path into the {said} block against the total, init; pretrained"
            yield told, "paths", partial(_path, path=path, block=block)


def _evicted(ds: xr.Dataset, first: int) -> str:
    at = ds.sel(cache="cut", numbering="cache")
    found = (estimate(at, "evict_loss_change", first_keys=first, last_keys=int(last)) for last in ds["last_keys"])
    return "; ".join(interval(*one, form="+.2f") for one in found) + " nat"


def _sink_rate(ds: xr.Dataset) -> str:
    sunk = ds["alpha"].isel(key=0) > options_of(ds)["threshold"]
    rates = sunk.mean(("layer", "head")).values.astype(float)
    return interval(*jackknifed(lambda some: float(some.mean()), rates, units(ds))[:3], form=".2f")


def _middle(ds: xr.Dataset) -> str:
    found = change(ds)
    return interval(*found["middle"][:3]) if found else "-"


def _kernel(ds: xr.Dataset) -> str:
    return f"{agreements({'': ds})[-1].errors['score_path']:.1%}" if "init" in ds["condition"].values else "-"


def _path(ds: xr.Dataset, path: str, block: int) -> str:
    at = ds.sel(pathway=path).isel(layer=block)
    return "; ".join(interval(*estimate(at, "share", condition=c), form=".2f") for c in ("init", "pretrained"))


def _recall(ds: xr.Dataset) -> str:
    found = recall(ds)
    return "; ".join(interval(*getattr(found, name)[:3], form=".2g") for name in ("exact", "primacy", "recency"))


def _effect(ds: xr.Dataset) -> str:
    return f"{float(ds['effect'].max()):.3f} nat" if "effect" in ds else "-"


def _shape(ds: xr.Dataset, condition: str, name: str) -> str:
    found = shapes(ds).get(condition)
    return interval(*getattr(found, name)[:3]) if found else "-"


def _median_block(ds: xr.Dataset) -> str:
    return f"{float(np.median(ds['log_form_by_block'].isel(band=0).sel(part='total').values)):.3g} nat²"


def _massive(ds: xr.Dataset) -> str:
    top = ds["top_ratio"].isel(first=0, rank=0)
    layer, named = int(np.argmax(top.values)), ds["top_dimension"].isel(first=0, rank=0)
    return f"dimension {int(named[layer])}, {float(top[layer]):,.0f} medians (block {layer})"


def _cosine(ds: xr.Dataset) -> str:
    cosine = ds["cosine"].isel(place=0).values[CONVERGED:]
    least, most = int(np.argmin(cosine)), int(np.argmax(cosine))
    said = (f"{cosine[block]:.3f} (block {block + CONVERGED})" for block in (least, most))
    return f"{' to '.join(said)}, {cosine[-1]:.3f} at the end"


def _nulls(ds: xr.Dataset) -> str:
    at = ds.isel(band=0)
    names = ("null_uniform", "null_fresh", "null_shuffled")
    return ", ".join(f"{float(at[name]):.3g}" if name in at else "-" for name in names) + " nat²"


def _without_most(ds: xr.Dataset) -> str:
    """Means over the other heads."""
    at = ds.isel(band=0)
    totals = at["log_form"].sel(part="total").values
    most = np.unravel_index(np.argmax(totals), totals.shape)
    others = np.ones(totals.shape, dtype=bool)
    others[most] = False
    mask = at["steady_source"].sel(source="mask").values[others].sum() / totals[others].sum()
    return f"{totals[others].mean():.3g} nat² (without {most[0]}.{most[1]}: {totals[most]:.3g}); {mask:.0%}"


def _part(ds: xr.Dataset, name: str, *, form: str = ".3g", unit: str = "", band: str = "9-31", **where: object) -> str:
    return interval(*estimate(ds.sel(band=band), name, **where), form=form) + unit


def _swapped(ds: xr.Dataset, by: str) -> str:
    at = ds.sel(replacement=by)
    return " to ".join(f"{float(at[f'sink_rate_{when}'].mean()):.2f}" for when in ("before", "after"))


def _loss(ds: xr.Dataset, by: str) -> str:
    return interval(*estimate(ds, "loss_change_of_model", replacement=by), form="+.3f") + " nat"


def _below_uniform(ds: xr.Dataset) -> str:
    at = ds.isel(band=0)
    totals = at["log_form"].sel(part="total")
    return f"{int((totals < at['null_uniform']).sum())} of {totals.size}"


def main() -> int:
    """0 where every step that was asked for is done."""
    given = argparse.ArgumentParser(description="Measure the real language models.")
    given.add_argument("--only", default="", help="steps whose name begins with this, or holds it")
    given.add_argument("--list", action="store_true", help="name the steps and stop")
    given.add_argument("--table", action="store_true", help="print the table, write reports/llm/table.md and stop")
    asked = given.parse_args()
    if asked.table:
        print("\n".join(tabled(variants=False)))
        return 0
    begun = [step for step in STEPS if step.name.startswith(asked.only)]
    steps = begun or [step for step in STEPS if asked.only in step.name]
    if not steps:
        given.error(f"no step's name holds '{asked.only}'; --list names them")
    if asked.list:
        print(*(f"{'done' if step.result.is_file() else '-':5} {step.name}: {told(step)}" for step in steps), sep="\n")
        return 0
    left = [step for step in steps if not step.result.is_file()] or steps
    done = [measure(step) for step in steps]
    drawn(left)
    return 0 if all(done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
