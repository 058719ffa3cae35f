"""`import probes`: every name it lists is there, whatever is imported in whatever order."""

import subprocess
import sys

import pytest

import probes

HEAVY = ("torch", "transformers", "xarray", "matplotlib", "numpy")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_costs_nothing():
    assert run(f"import sys, probes; print(*sorted(set(sys.modules) & set({HEAVY!r})))") == ""


# Some names are those of the modules they come from; the import system puts a module into its package when it is loaded.
def test_names_are_what_they_say():
    program = """
import probes.measures.jacobian, probes.theory.rollout, probes.data.prompts
from probes import *
import inspect, probes
assert probes.__all__, "empty"
for name in probes.__all__:
    value = getattr(probes, name)
    assert inspect.ismodule(value) == (name == "theory") and (callable(value) or name == "theory"), (name, value)
    assert value is getattr(probes, name)
    assert name in dir(probes)
from probes.measures.jacobian import jacobian
from probes.data.prompts import prompts
assert probes.jacobian is jacobian and probes.prompts is prompts
print("ok")
"""
    assert run(program) == "ok"


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'probes' has no attribute 'jacobean'"):
        probes.jacobean  # noqa: B018
