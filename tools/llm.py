"""Measure the real language models: `make llm`, hours on a CPU, resumable.

    python tools/llm.py                  # everything that is not there yet
    python tools/llm.py --list           # the steps with their commands, and which are done
    python tools/llm.py --only leakage   # steps whose name begins with this

Each step is one `headwater` command; an interrupted one resumes. Results go to `reports/llm/KIND/`, measurements of another
kind of input, initialization or weights to `reports/llm/VARIANT/KIND/`; figures and tables are drawn again at the end.
SmolLM2-135M-Instruct comes by `make smollm2`; Qwen2.5-Coder-0.5B-Instruct is the file of that name in `runs/` (its
steps are left out where it is not there). One thread unless OMP_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from slim import slim

from probes.charts import save as save_chart
from probes.data.documents import BUNDLED, read_documents
from probes.headlines import write_tables
from probes.measure import measure, questions
from probes.results.dataset import load, save

QWEN = "runs/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
OUT, WORK = Path("reports/llm"), Path("runs/llm")
CHAT = WORK / "chat.json"  # a passage of each bundled document, as a user's question
PASSAGE = slice(2000, 3500)  # characters
CAPITALS = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
NAMES = "When Mary and John went to the store, John gave the book to Mary. Then Mary thanked"
CODE = "assert sum([1, 2, 3]) == 6; assert sum([4, 5]) == 9; assert sum([1, 2, 3, 4]) =="
# Dose, first token, block, part, and what attention makes of key 0.
INTERVENTIONS = (
    "mean*0.2,mean*0.4,mean*0.6,mean*0.8,mean,zero,random,drawn,0,1,mean@1,mean@2,mean@4,mean@8,mean@16,mean@24,"
    "mean:keys,mean:values,mean:both,mean@4:keys,mean@4:values,mean@4:both,without-0,without-0@4,without-0@8,without-0@16,"
    "without-0@24,constant-sink,held-log-z"
)
# Of Qwen, whose weights overflow when log Z is held (its logits reach far above any normal sum).
FEWER = "drawn,zero,without-0,without-0@4,without-0@8,mean@8,mean@4:values,constant-sink"
NO_PROFILE = "--length 128 --profile-prompts 0 --bands 9-31,32-127"
LISTS = "--pairs 36 --keys apart --digits 4"
ALIKE = "--pairs 36 --keys alike --digits 4 --contexts 24"
INIT = "--conditions init --prompts 4 --seeds 2 --products 32 --initialization"
EVICT = "--length 1024 --reacts off --evict 0,1,4 --keep 64,128,256"
SWAP = "--replace mean,random --prompts 64 --length 128 --profile-prompts 4 --products 32"


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


# What the headline rests on first. `im-start`, `end`: ids 1 and 2 of SmolLM2, <|im_start|> and <|im_end|>, at position 0.
# Qwen's lists have keys that resemble each other: of others it recalls nearly all.
TABLE = f"""
sinks                  smollm2-135m --prompts 32 --length 256 --effect 40 --effect-prompts 2
jacobian               smollm2-135m --prompts 16 --seeds 2 --products 32 --initialization smollm2-135m
scalar                 smollm2-135m --method scalar --conditions pretrained --prompts 16
theory                 smollm2-135m --prompts 2 --seeds 2 --length 128 --initialization smollm2-135m
trajectory             smollm2-135m --prompts 32 --length 256
leakage                smollm2-135m --prompts 512 --length 128
retrieval              smollm2-135m {LISTS} --contexts 100
bos-swap               smollm2-135m {SWAP}
sinks                  {QWEN}       --prompts 16 --length 256 --effect 40 --effect-prompts 2
trajectory             {QWEN}       --prompts 8 --length 256
leakage                {QWEN}       --prompts 64 --length 128 --fresh 0
jacobian               {QWEN}       --prompts 8 --seeds 1 --products 24 --length 128 --initialization qwen2.5
bos-swap               {QWEN}       --replace mean,random --prompts 32 --length 128 --profile-prompts 1 --products 24
retrieval              {QWEN}       --pairs 36 --keys alike --digits 4 --contexts 100
interventions/bos-swap smollm2-135m --replace '{INTERVENTIONS}' --prompts 32 {NO_PROFILE} --recall 12
mechanism/retrieval    smollm2-135m {LISTS} --contexts 100 --candidates 12 --mechanism 24 --initialization smollm2-135m
mechanism/retrieval    {QWEN}       {ALIKE} --candidates 12 --mechanism 4 --initialization qwen2.5
decode                 smollm2-135m --prompts 32 --length 128 --erase all --recall 8
interventions/bos-swap {QWEN}       --replace '{FEWER}' --prompts 16 {NO_PROFILE} --recall 4
decode                 {QWEN}       --prompts 32 --length 128 --erase all --no-leakage
pairs-12/retrieval     smollm2-135m --pairs 12 --keys apart --digits 4 --contexts 100
reworded/retrieval     smollm2-135m {LISTS} --contexts 24 --template reworded
announced/retrieval    smollm2-135m {LISTS} --contexts 24 --template announced
nouns/retrieval        smollm2-135m --pairs 36 --keys apart --digits 0 --contexts 24
json/retrieval         smollm2-135m {LISTS} --contexts 24 --template json
alike/retrieval        smollm2-135m {ALIKE}
pairs-72/retrieval     smollm2-135m --pairs 72 --keys apart --digits 4 --contexts 24
code/leakage           smollm2-135m --prompts 512 --length 128 --text code
code/jacobian          smollm2-135m --conditions pretrained --prompts 16 --products 32 --text code
code/sinks             smollm2-135m --prompts 32 --length 256 --text code
im-start/sinks         smollm2-135m --prompts 32 --length 256 --first 1
im-start/leakage       smollm2-135m --prompts 512 --length 128 --first 1
im-start/bos-swap      smollm2-135m {SWAP} --first 1
im-start/trajectory    smollm2-135m --prompts 32 --length 256 --first 1
end/sinks              smollm2-135m --prompts 32 --length 256 --first 2
t64/sinks              smollm2-135m --prompts 4 --length 64 --reacts off --effect all --effect-prompts 4
t64/decode             smollm2-135m --prompts 32 --length 64 --erase all --recall 0 --no-leakage
t1024/sinks            smollm2-135m --prompts 8 --length 1024 --reacts off
t2048/sinks            smollm2-135m --prompts 4 --length 2048 --reacts off
all-keys/sinks         smollm2-135m --prompts 32 --length 256 --keys all --reacts off
evict/sinks            smollm2-135m --prompts 12 {EVICT}
rule-0.02/jacobian     smollm2-135m {INIT} 0.02
rule-1-24/jacobian     smollm2-135m {INIT} 1/24
code/leakage           {QWEN}       --prompts 64 --length 128 --fresh 0 --text code
code/sinks             {QWEN}       --prompts 16 --length 256 --text code
all-keys/sinks         {QWEN}       --prompts 16 --length 256 --keys all --reacts off
evict/sinks            {QWEN}       --prompts 6 {EVICT}
chat/sinks             smollm2-135m --prompts 32 --length 256 --chat {CHAT}
chat/leakage           smollm2-135m --prompts 100 --length 128 --chat {CHAT}
t1024/jacobian         smollm2-135m --conditions pretrained --prompts 2 --products 24 --length 1024
inspect/capitals/inspect smollm2-135m --prompt '{CAPITALS}' --initialization smollm2-135m
inspect/names/inspect smollm2-135m --prompt '{NAMES}' --initialization smollm2-135m
inspect/code/inspect smollm2-135m --prompt '{CODE}' --initialization smollm2-135m
"""
STEPS = [Step(*line.split(maxsplit=2)) for line in TABLE.strip().splitlines()]


def run(step: Step) -> bool:
    """Run a step and keep what `tools/slim.py` keeps; whether it came to its end."""
    print(shlex.join(["headwater", *step.words]), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run([sys.executable, "-m", "probes", *step.words], env=environment, check=False).returncode
    if code:
        print(f"not measured (exit code {code})", flush=True)
        return False
    whole = WORK / step.folder / Path(step.model).stem / f"{step.command}.nc"
    save(slim(load(whole), Path(step.folder).name), step.result)
    return True


def draw(folder: Path, command: str) -> None:
    """Chart and tables of the results in a folder, all models together."""
    files = sorted(folder.glob(f"{command}-*.nc.xz"))
    results = {file.name.removeprefix(f"{command}-").removesuffix(".nc.xz"): load(file) for file in files}
    if results and command in questions():
        save_chart(measure(command).chart(results), folder / f"{command}.png")
        write_tables(measure(command), results, folder / f"{command}.md")


def main() -> int:
    """0 where every step that was asked for is done."""
    options = argparse.ArgumentParser(description="Measure the real language models.")
    options.add_argument("--only", default="", help="steps whose folder begins with this")
    options.add_argument("--list", action="store_true", help="name the steps and stop")
    given = options.parse_args()
    steps = [step for step in STEPS if step.folder.startswith(given.only)]
    if not steps:
        options.error(f"no step begins with '{given.only}'; --list names them")
    left = [step for step in steps if not step.result.is_file()]
    if given.list:
        for step in steps:
            print(f"{'-' if step in left else 'done':5} {shlex.join(['headwater', *step.words])}")
        return 0
    CHAT.parent.mkdir(parents=True, exist_ok=True)
    chats = [[{"role": "user", "content": one.text[PASSAGE]}] for one in read_documents(BUNDLED["prose"])]
    CHAT.write_text(json.dumps(chats), encoding="utf-8")
    done = [run(step) for step in left]
    for folder, command in sorted({(OUT / step.folder, step.command) for step in left or steps}):
        draw(folder, command)
    return 0 if all(done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
