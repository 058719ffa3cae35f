"""How far a command is, and what it says of that, on a clock that the test sets."""

import io
import sys

import pytest

from probes.cli import console
from probes.run import processes
from probes.run.progress import Course, Part, announce


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_announced_units_add_up_and_a_measure_of_several_is_one_unit():
    course = Course()
    course("toys: copy", 1, 10)
    course("toys: copy", 4, 10)
    assert course.done == 0.4
    announce(course, ["ape: jacobian", "ape: leakage"])
    course("found done", 1.0, 1.0)
    part = Part(course, "ape: jacobian")
    announce(part, ["ape init 0", "ape pretrained"])
    part("ape init 0", 3, 8)
    part("ape init 0", 1, 8)  # resumed work never goes back
    assert (course.units, course.done) == ({"ape: jacobian": 3 / 16, "ape: leakage": 0}, 3 / 32)
    announce(print, ["a"])  # nobody listens
    announce(None, ["a"])
    Part(None, "sinks")("ape sinks", 1, 2)


def shown(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> str:
    """What is written to stderr while four units of 100 s go by."""
    monkeypatch.setattr(sys, "stderr", stderr)
    clock = Clock()
    with console.progress(clock) as advance:
        announce(advance, ["a", "b", "c", "d"])
        for label in "abcd":
            for done in range(1, 101):
                clock.now += 1
                advance(label, done, 100)
    return stderr.getvalue()


def test_in_a_pipe_a_line_now_and_then_says_how_far_it_is(monkeypatch):
    lines = shown(monkeypatch, io.StringIO()).splitlines()
    assert len(lines) == 400 // console.EVERY
    assert lines[0] == "headwater: a: 8% done, about 6 min left"
    assert lines[9] == "headwater: c: 75% done, about 2 min left"
    texts = {0.2: "1 s", 89.4: "89 s", 240.0: "4 min", 7200.0: "2.0 h"}
    assert {seconds: console.duration(seconds) for seconds in texts} == texts
    monkeypatch.setattr(processes, "first", lambda: False)
    assert shown(monkeypatch, io.StringIO()) == ""
