"""Run a command again and again and kill it (SIGKILL) at random moments, until it has been killed often enough.

    python tests/killed.py KILLS SEED SECONDS -- COMMAND...

Everything is imported once and each attempt is a fork, so that attempts begin at once. After every kill the results that are
there are read: a file is whole or not there. The last attempt is left to end. Prints how many attempts were killed and how
many seconds the last one took.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Kill, then let it end."""
    kills, seed, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    command = sys.argv[sys.argv.index("--") + 1 :]
    out = Path(command[command.index("--out") + 1])

    import probes
    from probes import loop  # noqa: F401 - so that no attempt has to
    from probes.cli.main import main as headwater
    from probes.measure import measure, questions
    from probes.results.dataset import load
    from toy import match, train  # noqa: F401

    if command[0] in questions():
        measure(command[0])
    train.SAVE_SECONDS = 0.02  # so that short training has been saved when it is killed

    if "--text" not in command:
        probes.prompts(probes.load("tiny-llama"), n=1, length=8)

    def attempt() -> int:
        child = os.fork()
        if child == 0:
            sys.argv = ["headwater", *command]
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            try:
                headwater()
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            os._exit(1)
        return child

    rng, killed = random.Random(seed), 0
    while killed < kills:
        if command[0] == "pretrain" and (out / "training.json").exists():
            break  # finished, just before it was killed: it would say so
        child = attempt()
        time.sleep(rng.uniform(0.02, seconds))
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                sys.exit(f"an attempt failed with {status} after {killed} kills")
            if killed:
                break  # it came to its end before
            shutil.rmtree(out)  # the machine has become faster: from the beginning, and sooner
            seconds /= 2
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        for file in out.rglob("*.nc"):
            if not file.name.startswith("."):
                load(file)
    began = time.perf_counter()
    done = command[0] == "pretrain" and (out / "training.json").exists()
    status = 0 if done else os.waitpid(attempt(), 0)[1]
    if status:
        sys.exit(f"the last attempt failed with {status} after {killed} kills")
    print(killed, time.perf_counter() - began)


if __name__ == "__main__":
    main()
