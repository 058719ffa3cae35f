"""How long a command takes, from what it has done: on a clock that the test sets."""

import io
import re
import sys
from typing import Any

import pytest

from probes.cli import console
from probes.run import processes
from probes.run.progress import Course, Part, announce, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_is_left_is_estimated_anew_by_the_pace_of_the_last_half(clock):
    course = Course(clock=clock)
    clock.now += 1000  # models were loaded and checked
    announce(course, ["ape init 0", "ape init 1", "bee init 0", "bee init 1"])
    course("ape pretrained", 1.0, 1.0)  # found done: it was not announced, takes no time and says nothing of it
    assert course.left is None
    clock.now += 10
    course("ape init 0", 32, 64)  # an eighth of everything in 10 s
    assert (course.done, course.spent, course.left) == (1 / 8, 10, pytest.approx(70))
    clock.now += 4
    assert course.left == pytest.approx(66)  # also between two calls
    clock.now += 6
    course("ape init 0", 64, 64)
    assert course.left == pytest.approx(60)
    clock.now += 40
    course("ape init 1", 1, 2)  # four times slower than thought: an eighth in the last 40 of 60 s
    assert course.left == pytest.approx(200)
    clock.now += 500
    assert course.left == 0
    announce(course, ["ape sinks"])  # another study begins
    assert (course.left, course.done, course.spent) == (None, 0, 0)
    announce(print, ["a"])  # nobody listens
    announce(None, ["a"])
    texts = {0.2: "1 s", 89.4: "89 s", 240.0: "4 min", 7200.0: "2.0 h"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_a_unit_that_was_not_announced_is_followed_from_where_it_begins(clock):
    course = Course(clock=clock)
    course("toys: copy", 1, 10)
    clock.now += 3
    course("toys: copy", 4, 10)
    assert course.left == pytest.approx(6)
    clock.now += 50
    course("toys: retrieval", 2, 10)
    clock.now += 1
    course("toys: retrieval", 4, 10)
    assert course.left == pytest.approx(3)


def test_a_study_of_several_is_one_unit_and_units_that_are_not_alike_are_followed_alone(clock):
    alike, course = Course(clock=clock), Course(alike=False, clock=clock)
    for one in (alike, course):
        announce(one, ["ape: jacobian", "ape: leakage"])
        part = Part(one, "ape: jacobian")
        announce(part, ["ape init 0", "ape pretrained"])
        for done in range(1, 5):
            clock.now += 20
            part("ape init 0", done, 8)
            assert one.units == {"ape: jacobian": done / 16, "ape: leakage": 0}
    assert (alike.done, course.done) == (1 / 8, 1 / 4)
    assert course.left == pytest.approx(240)
    course("ape: jacobian", 1, 1)
    course("ape: leakage", 0, 30)
    assert (course.done, course.left) == (0, None)
    clock.now += 30
    course("ape: leakage", 6, 30)
    assert (course.done, course.left) == (0.2, pytest.approx(120))
    Part(None, "sinks")("ape sinks", 1, 2)  # nobody listens


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, clock: Clock, stderr: io.StringIO, **options: Any) -> str:
    """What is written to stderr while four units of 100 s go by, of which the last takes 300 s."""
    monkeypatch.setattr(sys, "stderr", stderr)
    with console.progress(clock=clock, **options) as advance:
        announce(advance, ["a", "b", "c", "d"])
        for label, seconds in (("a", 100), ("b", 100), ("c", 100), ("d", 300)):
            for done in range(1, 101):
                clock.now += seconds / 100
                advance(label, done, 100)
    return stderr.getvalue()


def test_in_a_pipe_a_line_now_and_then_says_how_far_it_is(monkeypatch, clock):
    lines = shown(monkeypatch, clock, io.StringIO()).splitlines()
    assert len(lines) == 600 / console.EVERY
    assert lines[0] == "headwater: a: 8% done, about 6 min left"
    assert lines[9] == "headwater: c: 75% done, about 2 min left"
    assert lines[14] == "headwater: d: 88% done, about 2 min left"
    clock.now += 1000
    lines = shown(monkeypatch, clock, io.StringIO(), alike=False).splitlines()
    assert lines[0] == "headwater: a: 30% done, about 70 s left"
    monkeypatch.setattr(processes, "first", lambda: False)
    assert shown(monkeypatch, clock, io.StringIO()) == ""


def test_in_a_terminal_there_is_one_bar(monkeypatch, clock):
    text = shown(monkeypatch, clock, Terminal())
    *_, last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").strip().splitlines()
    assert last.split()[0] == "d"
    assert last.split()[-1] == "100%"
