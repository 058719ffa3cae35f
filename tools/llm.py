"""Measure the real language models: `make llm`, minutes on a GPU and many hours on a CPU, resumable.

    python tools/llm.py                  # everything that is not there yet
    python tools/llm.py --list           # the steps with their commands, and which are done
    python tools/llm.py --only leakage   # steps whose name begins with this
    python tools/llm.py --model gemma --jobs 6  # of models whose name begins with this, six steps at a time

Each step is one `headwater` command; an interrupted one resumes. Results go to `reports/llm/KIND/`, measurements of another
kind of input, initialization or weights to `reports/llm/VARIANT/KIND/`; figures and tables are drawn again at the end, and
`reports/llm/table.md` puts the headlines of all models side by side. SmolLM2-135M-Instruct comes by `make smollm2`, Gemma 3
270M by `make gemma`; Qwen2.5-Coder-0.5B-Instruct is the file of that name in `runs/` (steps of models that are not there are
left out). One thread for each step unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import xarray as xr
from slim import slim

from probes.charts import save as save_chart
from probes.data.documents import BUNDLED, read_documents
from probes.errors import InputError
from probes.headlines import headlines, write_tables
from probes.measure import measure, questions
from probes.measures.retrieval.context import SLOPES, answers, by_model, forest, otherwise
from probes.measures.retrieval.numbers import SLOPE, statements
from probes.models.named import located
from probes.results.dataset import load, save
from probes.results.statistics import Interval
from probes.results.tables import Report, Table, interval, write_report
from toy.match import MEASURE as MATCH

SMOLLM2, QWEN, GEMMA = "smollm2-135m", "runs/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "gemma3-270m"
OUT, WORK = Path("reports/llm"), Path("runs/llm")
CHAT = WORK / "chat.json"  # a passage of each bundled document, as a user's question
MOST = 75  # rows of a section of the table
PASSAGE = slice(2000, 3500)  # characters
CAPITALS = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
NAMES = "When Mary and John went to the store, John gave the book to Mary. Then Mary thanked"
CODE = "assert sum([1, 2, 3]) == 6; assert sum([4, 5]) == 9; assert sum([1, 2, 3, 4]) =="
# Dose, first token, block, part, and what attention makes of key 0.
INTERVENTIONS = (
    "mean*0.2,mean*0.4,mean*0.6,mean*0.8,mean,zero,random,drawn,0,1,mean@1,mean@2,mean@4,mean@8,mean@16,"
    "mean:keys,mean:values,mean:both,mean@4:keys,mean@4:values,mean@4:both,without-0,without-0@4,without-0@8,without-0@16,"
    "constant-sink"
)
HELD = (
    ",held-log-z"  # not of Qwen, whose weights overflow when log Z is held: its logits reach far above any normal sum
)
ARMS = "'as it is,sink held,hidden,second sink,unmasked,fresh'"  # of Qwen, for the same reason
NO_PROFILE = "--length 128 --profile-prompts 0 --bands 9-31,32-127"
# One ladder of difficulty: 36 pairs with different keys; where a model recalls nine in ten of them, keys that resemble
# each other. `retrieval` holds a model's first rung that it does not pass, the variants hold all.
APART, ALIKE = "--pairs 36 --keys apart", "--pairs 36 --keys alike"
LISTS = {SMOLLM2: APART, QWEN: ALIKE, GEMMA: APART}
# Sensitivity in context: of every model and form the norm behind the lists, and in one form under the arms of
# `sink-factorial`, at the block where its interaction is largest.
IN_CONTEXT = "--pairs 24 --profile-prompts 0"
MANY, FEW, FEWER = (f"{IN_CONTEXT} --contexts {n} --mechanism {n}" for n in (48, 16, 12))
BLOCKS = {SMOLLM2: 6, QWEN: 0, GEMMA: 3}
SHOCKS = {n: f"--shocks released@{n},without-value-0@{n},without-0@{n}" for n in BLOCKS.values()}
# The makers' rules of initialization; Gemma's is not known to us, and 0.02 is transformers' default.
RULES = {SMOLLM2: "smollm2-135m", QWEN: "qwen2.5", GEMMA: "0.02"}
STEMS = [Path(model).stem for model in RULES]
HORIZON = {
    SMOLLM2: "--prompts 96 --every 5 --leakage 32",
    QWEN: "--prompts 48 --every 4 --leakage 16",
    GEMMA: "--prompts 48 --every 3 --leakage 16",
}
INIT = "--conditions init --prompts 16 --seeds 2 --products 32 --initialization"
EVICT = "--length 1024 --reacts off --evict 0,1,4 --keep 64,128,256"
SWAP = "--replace mean,random,zero,without-0 --prompts 128 --length 128 --profile-prompts 0 --recall 24"


class Step(NamedTuple):
    """One command on one model; its folder is its kind, below a variant but for what the headline rests on."""

    folder: str
    model: str
    options: str

    @property
    def command(self) -> str:
        """What is run; results of scalar surrogates are a Jacobian's."""
        kind = Path(self.folder).name
        return "jacobian" if kind == "scalar" else kind

    @property
    def result(self) -> Path:
        """The file that it leaves: what `tools/slim.py` keeps; all of it stays under `runs`."""
        return OUT / self.folder / f"{self.command}-{Path(self.model).stem}.nc.xz"

    @property
    def words(self) -> list[str]:
        """Of the command line, behind `headwater`."""
        return [
            self.command,
            self.model,
            *shlex.split(self.options),
            "--out",
            str(WORK / self.folder / Path(self.model).stem),
        ]


# Of every model, what the headlines rest on first.
OF_EACH = """
sinks                  --prompts 128 --length 256 --effect 40 --effect-prompts 32
jacobian               --prompts 48 --seeds 2 --products 48 --initialization {rule}
leakage                --prompts 512 --length 128
bos-swap               {SWAP}
retrieval              {lists} --contexts 100
evict/sinks            --prompts 32 {EVICT}
decode                 --prompts 100 --length 128 --erase all --recall 8
trajectory             --prompts 64 --length 256
theory                 --prompts 4 --seeds 2 --length 128 --initialization {rule}
interventions/bos-swap --replace {interventions} --prompts 32 {NO_PROFILE} --recall 12
pairs-12/retrieval     --pairs 12 --keys apart --digits 4 --contexts 100
apart/retrieval        {APART} --contexts 24
alike/retrieval        {ALIKE} --contexts 24
all-keys/sinks         --prompts 32 --length 256 --keys all --reacts off
code/leakage           --prompts 512 --length 128 --text code
code/sinks             --prompts 64 --length 256 --text code
t64/sinks              --prompts 64 --length 64 --reacts off
t1024/sinks            --prompts 32 --length 1024 --reacts off
t2048/sinks            --prompts 16 --length 2048 --reacts off
t1024/jacobian         --conditions pretrained --prompts 8 --products 24 --length 1024
scalar                 --method scalar --conditions pretrained --prompts 16
sink-factorial         {lists} --prompts 32 --lists 100
controls/sink-factorial --prompts 32 --lists 0 --copies 16 --sets all --length 128 --blocks {block}
horizon                --length 512 {horizon}
mechanism/retrieval    {lists} --contexts 48 --mechanism 12 --initialization {rule}
"""
# `im-start`, `end`: ids 1 and 2 of SmolLM2, <|im_start|> and <|im_end|>, at position 0. `no-bos`: Gemma without its own.
OF_ONE = f"""
reworded/retrieval     {SMOLLM2} {APART} --contexts 24 --template reworded
announced/retrieval    {SMOLLM2} {APART} --contexts 24 --template announced
nouns/retrieval        {SMOLLM2} --pairs 36 --keys apart --digits 0 --contexts 24
json/retrieval         {SMOLLM2} {APART} --contexts 24 --template json
pairs-72/retrieval     {SMOLLM2} --pairs 72 --keys apart --digits 4 --contexts 24
arms/horizon           {SMOLLM2} --prompts 48 --length 256 --every 6 --arms all --initialization smollm2-135m
arms/horizon           {GEMMA} --prompts 48 --length 256 --every 6 --arms all --initialization 0.02
arms/horizon           {QWEN} --prompts 32 --length 256 --every 6 --arms {ARMS} --initialization qwen2.5
unmasked/leakage       {SMOLLM2} --unmasked --fresh 0 --prompts 128 --length 128
unmasked/leakage       {GEMMA} --unmasked --fresh 0 --prompts 128 --length 128
t8192/evict/sinks      {SMOLLM2} --prompts 4 --length 8192 --text long --reacts off --evict 0,1,4 --keep 1020
t1024/horizon          {SMOLLM2} --prompts 24 --length 1024 --every 10
t1024/horizon          {GEMMA} --prompts 24 --length 1024 --every 6
t1024/horizon          {QWEN} --prompts 24 --length 1024 --every 8
t2048/horizon          {SMOLLM2} --prompts 24 --length 2048 --every 10
erased/horizon         {SMOLLM2} --prompts 24 --length 256 --every 10 --erase 24
erased/horizon         {GEMMA} --prompts 24 --length 256 --every 6 --erase 24
code/jacobian          {SMOLLM2} --conditions pretrained --prompts 16 --products 32 --text code
im-start/sinks         {SMOLLM2} --prompts 64 --length 256 --first 1
im-start/leakage       {SMOLLM2} --prompts 512 --length 128 --first 1
im-start/bos-swap      {SMOLLM2} {SWAP} --first 1
late/sink-factorial    {SMOLLM2} {APART} --prompts 32 --lists 100 --blocks 18 --sets 'position 0,constant gain,key 1'
second/sink-factorial  {GEMMA} --prompts 48 --length 128 --lists 0 --place 64 --blocks 3
im-start/sink-factorial {SMOLLM2} {APART} --prompts 32 --lists 100 --first 1
im-start/trajectory    {SMOLLM2} --prompts 32 --length 256 --first 1
end/sinks              {SMOLLM2} --prompts 64 --length 256 --first 2
chat/sinks             {SMOLLM2} --prompts 64 --length 256 --chat {CHAT}
chat/bos-swap          {SMOLLM2} {SWAP} --chat {CHAT}
chat/sinks             {QWEN} --prompts 64 --length 256 --chat {CHAT}
no-bos/sinks           {GEMMA} --prompts 64 --length 256 --first none
no-bos/leakage         {GEMMA} --prompts 512 --length 128 --first none
no-bos/bos-swap        {GEMMA} {SWAP} --first none
context/retrieval      {SMOLLM2} {MANY} --keys alike
context-json/retrieval {SMOLLM2} {FEW} --template json
context-nouns/retrieval {SMOLLM2} {FEW} --digits 0
context-announced/retrieval {SMOLLM2} {FEW} --template announced
context-apart/retrieval {SMOLLM2} {FEWER} {SHOCKS[6]}
context/retrieval      {GEMMA} {MANY} --keys alike
context-json/retrieval {GEMMA} {FEWER} --template json
context-nouns/retrieval {GEMMA} {FEWER} --digits 0
context-announced/retrieval {GEMMA} {FEWER} --template announced
context-apart/retrieval {GEMMA} {FEWER} {SHOCKS[3]}
context/retrieval      {QWEN} {FEWER} --keys alike {SHOCKS[0]}
context-json/retrieval {QWEN} {FEWER} --keys alike --template json
context-nouns/retrieval {QWEN} {FEWER} --keys alike --digits 0
context-announced/retrieval {QWEN} {FEWER} --keys alike --template announced
rule-0.02/jacobian     {SMOLLM2} {INIT} 0.02
rule-1-24/jacobian     {SMOLLM2} {INIT} 1/24
gemma3/match           {GEMMA} --initialization 0.02 --length 128 --with deepest=3 --with steps=2000 --with seeds=3
inspect/capitals/inspect {SMOLLM2} --prompt '{CAPITALS}' --initialization smollm2-135m
inspect/names/inspect {SMOLLM2} --prompt '{NAMES}' --initialization smollm2-135m
inspect/code/inspect {SMOLLM2} --prompt '{CODE}' --initialization smollm2-135m
"""


def steps_of(model: str) -> list[Step]:
    """Those of one model."""
    filled = OF_EACH.format(
        rule=RULES[model],
        lists=LISTS[model],
        horizon=HORIZON[model],
        block=BLOCKS[model],
        interventions=INTERVENTIONS + HELD * (model != QWEN),
        **{name: globals()[name] for name in ("SWAP", "EVICT", "NO_PROFILE", "APART", "ALIKE")},
    )
    rows = [line.split(maxsplit=1) for line in filled.strip().splitlines()]
    return [Step(folder, model, options) for folder, options in rows]


STEPS = [step for model in RULES for step in steps_of(model)]
STEPS += [Step(*line.split(maxsplit=2)) for line in OF_ONE.strip().splitlines()]


def run(step: Step) -> bool:
    """Run a step and keep what `tools/slim.py` keeps; whether it came to its end."""
    print(shlex.join(["headwater", *step.words]), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    began = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "probes", *step.words], env=environment, check=False).returncode
    said = f"not measured (exit code {code})" if code else "measured"
    print(f"{step.folder} of {Path(step.model).stem}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    if code:
        return False
    whole = WORK / step.folder / Path(step.model).stem / f"{step.command}.nc"
    save(slim(load(whole), Path(step.folder).name), step.result)
    return True


def draw(folder: Path, command: str) -> None:
    """Chart and tables of the results in a folder, all models together."""
    results = results_in(folder, command)
    if results and command in ("match", *questions()):
        of = MATCH if command == "match" else measure(command)
        save_chart(of.chart(results), folder / f"{command}.png")
        write_tables(of, results, folder / f"{command}.md")


def results_in(folder: Path, command: str) -> dict[str, xr.Dataset]:
    """A folder's results by model, in the order of `RULES`."""
    files = {name: folder / f"{command}-{name}.nc.xz" for name in STEMS}
    return {name: load(file) for name, file in files.items() if file.is_file()}


def side_by_side(path: Path = OUT / "table.md") -> None:
    """Write the table of all headlines: a section for each folder, under the commands that measured it."""
    sections = []
    for folder, command in dict.fromkeys((step.folder, step.command) for step in STEPS):
        if command in questions() and (results := results_in(OUT / folder, command)):
            commands = dict.fromkeys(str(ds.attrs.get("command", "")).split(" --out ")[0] for ds in results.values())
            said = f"{folder}: " + "; ".join(f"`{each}`" for each in commands if each)
            sections.append(replace(headlines(measure(command), results, MOST), title=said))
    intervals = "Brackets are 95 % intervals over documents, of recall over lists; weights in float32."
    write_report(Report("The real models in numbers", intervals, sections, []), path, "python tools/llm.py")


def in_context(folder: Path = OUT / "context") -> None:
    """What all models and forms together say of sensitivity in context."""
    forms = dict.fromkeys(step.folder for step in STEPS if step.folder.startswith("context"))
    found = {form: results_in(OUT / form, "retrieval") for form in forms}
    cells = {
        f"{name}, {form.partition('/')[0].partition('-')[2] or 'alike'}": of[name]
        for name in STEMS
        for form, of in found.items()
        if name in of
    }
    if not cells:
        return
    said = {name: statements(ds) for name, ds in cells.items()}
    said |= {
        f"{name}, all": {SLOPE + SLOPES[one]: of for one, of in every.items()}
        for name, every in by_model(cells).items()
    }
    columns = list(dict.fromkeys(one for of in said.values() for one in of))
    none = Interval(math.nan, math.nan, math.nan)
    rows = [[name, *(interval(*of.get(one, none)[:3], form="+.2f") for one in columns)] for name, of in said.items()]
    brackets = "Slopes in nat per unit of the log norm. Brackets are 95 % intervals over couples of lists."
    checks = [
        [name, interval(*found.rho[:3], form="+.2f"), f"{found.shifts:.2g}"]
        for name, found in otherwise(cells).items()
        if found
    ]
    other = Table("All cells, otherwise", ("", "partial rank correlation", "p under shifts"), checks)
    tables = [Table("By cell", ("", *columns), rows), other]
    report = Report("Sensitivity in context", brackets, tables, answers(cells))
    write_report(report, folder / "context.md", "python tools/llm.py --only context")
    save_chart(forest(cells), folder / "context.png")


def there(model: str) -> bool:
    """Whether a model's file is on this machine."""
    try:
        return located(model).exists()
    except InputError:
        return False


def main() -> int:
    """0 where every step that was asked for is done."""
    options = argparse.ArgumentParser(description="Measure the real language models.")
    options.add_argument("--only", default="", help="steps whose folder begins with this")
    options.add_argument("--model", default="", help="models whose name begins with this")
    options.add_argument("--jobs", type=int, default=1, help="steps at a time")
    options.add_argument("--list", action="store_true", help="name the steps and stop")
    given = options.parse_args()
    steps = [
        step for step in STEPS if step.folder.startswith(given.only) and Path(step.model).name.startswith(given.model)
    ]
    if not steps:
        options.error(f"no step of '{given.model}' begins with '{given.only}'; --list names them")
    left = [step for step in steps if not step.result.is_file()]
    if given.list:
        for step in steps:
            print(f"{'-' if step in left else 'done':5} {shlex.join(['headwater', *step.words])}")
        return 0
    CHAT.parent.mkdir(parents=True, exist_ok=True)
    chats = [[{"role": "user", "content": one.text[PASSAGE]}] for one in read_documents(BUNDLED["prose"])]
    CHAT.write_text(json.dumps(chats), encoding="utf-8")
    with ThreadPoolExecutor(max(1, given.jobs)) as pool:
        done = list(pool.map(run, (step for step in left if there(step.model))))
    for folder, command in sorted({(OUT / step.folder, step.command) for step in left or steps}):
        draw(folder, command)
    side_by_side()
    in_context()
    return 0 if all(done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
