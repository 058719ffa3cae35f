"""Several processes, one result: who this process is, and what the others found.

A launcher (`accelerate launch -m probes ...`, `torchrun -m probes ...`) starts the same command several times and says
so in the environment. After `join` the probes share prompts between the processes (`probes.run.store`), every process
ends with the same result, and only the first one writes and prints. What is exchanged is small and goes over gloo,
through the CPU's memory, whatever device the models are on.

Nothing is shared without `join`: a script that has a process group of its own may call probes in one process alone.
"""

import os
from datetime import timedelta
from typing import Any

PATIENCE = timedelta(days=7)  # a process may wait for another's share; one that dies is noticed by the launcher

_dist: Any = None  # torch.distributed, once there is a group
_group: Any = None
_begun = False


def launched() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def join() -> None:
    """Meet the launcher's other processes; nothing to do where there are none."""
    global _dist, _group
    if launched() == 1 or _group is not None:
        return
    import torch.distributed as _dist

    if not _dist.is_initialized():
        _dist.init_process_group("gloo", timeout=PATIENCE)
        _group = _dist.group.WORLD
    else:  # somebody's own group, perhaps of a backend that knows no CPU tensors
        _group = _dist.new_group(backend="gloo", timeout=PATIENCE)


def leave() -> None:
    """Part from the others."""
    global _group
    if _group is not None:
        _dist.destroy_process_group()
        _group = None


def count() -> int:
    """How many processes share the work."""
    return 1 if _group is None else _dist.get_world_size(_group)


def number() -> int:
    """Which of them this one is, from 0."""
    return 0 if _group is None else _dist.get_rank(_group)


def first() -> bool:
    """Whether this process writes and prints: the only one, or number 0."""
    return number() == 0


def local_number() -> int:
    """Which of the processes on this machine; decides its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0") or 0)


def begin() -> None:
    """From now on processes do different things, and what befalls one need not befall the others."""
    global _begun
    _begun = True


def begun() -> bool:
    """Whether they do; before, all of them raise the same errors."""
    return _begun


def wait() -> None:
    """Until every process has come here."""
    if _group is not None:
        _dist.barrier(_group)


def gathered(value: Any) -> list[Any]:
    """What each process has, in the order of their numbers, in every process."""
    found = [value] * count()
    if _group is not None:
        _dist.all_gather_object(found, value, group=_group)
    return found


def agreed(value: Any) -> Any:
    """The first process's value in every process."""
    return gathered(value)[0]
