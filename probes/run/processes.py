"""Several processes, one result: who this process is, and what the others found.

A launcher (`accelerate launch -m probes ...`, `torchrun -m probes ...`) starts the same command several times and says
so in the environment. After `join` the probes share prompts between the processes (`probes.run.resume`), every process
ends with the same result, and only the first one writes and prints. What is exchanged is small and goes over gloo,
through the CPU's memory, whatever device the models are on.

Nothing is shared without `join`: a script that has a process group of its own may call probes in one process alone.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

PATIENCE = timedelta(days=7)  # a process may wait for another's share; one that dies is noticed by the launcher

_group: Any = None
_begun = False


def launched() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1)


def join() -> None:
    """Meet the launcher's other processes; nothing to do where there are none."""
    global _group
    if launched() == 1 or _group is not None:
        return
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
        _group = dist.group.WORLD
    else:  # somebody's own group, perhaps of a backend that knows no CPU tensors
        _group = dist.new_group(backend="gloo", timeout=PATIENCE)


def leave() -> None:
    """Part from the others."""
    global _group
    if _group is not None:
        import torch.distributed as dist

        dist.destroy_process_group()
        _group = None


def count() -> int:
    """How many processes share the work."""
    if _group is None:
        return 1
    import torch.distributed as dist

    return dist.get_world_size(_group)


def number() -> int:
    """Which of them this one is, from 0."""
    if _group is None:
        return 0
    import torch.distributed as dist

    return dist.get_rank(_group)


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
        import torch.distributed as dist

        dist.barrier(_group)


def gathered(content: bytes) -> list[bytes]:
    """What each process has, in the order of their numbers, in every process."""
    if _group is None:
        return [content]
    import torch
    import torch.distributed as dist

    own = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count())]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=_group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in range(count())]
    dist.all_gather(found, padded, group=_group)
    return [bytes(one[: int(size)].numpy()) for one, size in zip(found, sizes, strict=True)]


def agreed(value: Any) -> Any:
    """The first process's value, plain data, in every process."""
    return value if _group is None else json.loads(gathered(json.dumps(value).encode())[0])


def handed(tensor: Any, to: int) -> list[Any] | None:
    """Tensors [prompt, ...] of all processes, in the order of their numbers, in process `to`; None in the others."""
    if _group is None:
        return [tensor]
    import torch
    import torch.distributed as dist

    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count())]
    dist.all_gather(sizes, torch.tensor([len(tensor)]), group=_group)
    longest = max(int(size) for size in sizes)
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)  # `contiguous` leaves strides of empty ones
    own = plain.view(torch.uint8)  # gloo does not know all types
    padded = torch.zeros(longest, *own.shape[1:], dtype=torch.uint8)
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in range(count())] if number() == to else None
    dist.gather(padded, found, dst=dist.get_global_rank(_group, to), group=_group)
    if found is None:
        return None
    parts = (one[: int(size)] for one, size in zip(found, sizes, strict=True))
    return [part.contiguous().view(tensor.dtype).to(tensor.device) for part in parts]
