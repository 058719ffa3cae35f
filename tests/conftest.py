"""Settings that have to be made before anything is imported, and fixtures that several test files share."""

import os
import sys
from collections.abc import Iterator
from typing import Any

# Nothing is downloaded in tests, and models this small gain nothing from threads that a busy machine makes them wait for:
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):  # tracing would make them slower still, for lines that others reach
            item.add_marker("no_cover")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    # `-q` leaves out the header that says it, and long runs scroll it away.
    seed = config.getoption("randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"in random order: --randomly-seed={seed} repeats it")


@pytest.fixture(autouse=True)
def _no_command() -> Iterator[None]:
    """What a command line leaves as the origin of results goes with its test."""
    yield
    if "probes.results.dataset" in sys.modules:
        sys.modules["probes.results.dataset"].__dict__["_command"] = ""


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The smallest run of the experiment of toys that a file of tests is named after."""
    from tiny_runs import ran

    name = request.module.__name__.removeprefix("test_toy_").replace("_", "-")
    return ran({"sinks": "position-bias"}.get(name, name), tmp_path_factory)
