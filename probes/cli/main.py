"""The application `headwater`: its commands, and how errors end.

`headwater --help` has to answer at once, so torch, transformers, xarray and matplotlib are imported inside the commands
that need them. This folder is the only part of `probes` that knows `toy`.
"""

import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..measure import questions
from ..run import processes
from .console import given, standing
from .measures import Commands

BAD_INPUT = 2  # the exit code of usage errors everywhere
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PATIENCE = 20  # seconds within which the first of several processes reports what is wrong
# Commands whose prompts several processes can share:
SHARED = tuple(questions())
EXAMPLES = """Examples:
  headwater jacobian tiny-llama
  headwater theory tiny-llama
  headwater sinks tiny-llama
  headwater leakage tiny-llama tiny-llama-ntk tiny-mistral-window
  headwater report tiny-llama
  headwater pretrain tiny-llama --out runs/tiny-llama"""

app = typer.Typer(
    name="headwater",
    cls=Commands,
    help="Where does a pretrained language model's sense of position come from?",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool | None) -> None:
    if wanted:
        print(f"headwater {version('headwater')}")
        raise typer.Exit()


@app.callback(epilog=EXAMPLES)
def _options(
    wanted: Annotated[
        bool | None,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = None,
) -> None:
    """Where does a pretrained language model's sense of position come from?"""
    if processes.launched() > 1:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        if command not in SHARED:
            raise InputError(
                f"headwater {command} runs in one process, not in {processes.launched()}; "
                f"start it without the launcher ({', '.join(SHARED)} share their prompts)"
            )
        processes.join()
        if not processes.first():
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as this process lives


def main() -> None:
    """Run the application; bad input ends in one line and exit code 2, Ctrl-C in one line and 130.

    A closed pipe is nobody's error: who reads the first lines alone has the files all the same.
    """
    with standing() as out:
        code = _run()
        out.flush()
        if out.error is not None and not isinstance(out.error, BrokenPipeError):
            code = code or _complain(
                f"cannot write to stdout ({out.error.strerror}); files are written whole", BAD_INPUT
            )
    if not code:
        processes.leave()  # after an error the others are not waited for: the launcher ends them
    sys.exit(code)


def _run() -> int:
    # The hub's client warns once per retry; the error that follows says it in one line. Read when it is first imported.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        code = app(standalone_mode=False, prog_name="headwater")
    except InputError as error:
        code = _complain(str(error), BAD_INPUT)
    except typer.TyperException as error:  # what typer itself refuses: unknown options, wrong types
        context = getattr(error, "ctx", None)  # not every one of them has it
        path = context.command_path if context else "headwater"
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        code = _complain(f"{message} (given: {given()}); see {path} --help", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (RuntimeError, MemoryError) as error:
        from ..run.memory import out_of_memory

        if not out_of_memory(error):
            raise
        remedy = "give a shorter --length, --dtype bfloat16 or --device-map auto; what is done is kept"
        code = _complain(f"memory ran out ({given()}); {remedy}", BAD_INPUT)
    if code == INTERRUPTED:  # typer turns Ctrl-C within a command into this code
        _complain("interrupted; the same command resumes", INTERRUPTED)
    return code or 0


def _complain(message: str, code: int) -> int:
    who = int(os.environ.get("RANK", "0") or 0) if processes.launched() > 1 else 0
    if who > 0 and not processes.begun():  # all have the same to say, and the launcher ends all with the first
        time.sleep(PATIENCE)
        return code
    print("headwater:" if who == 0 else f"headwater, process {who}:", " ".join(message.split()), file=sys.stderr)
    return code
