"""How long a command takes, from what it has done: on a clock that the test sets."""

import io
import sys
from typing import Any

import pytest

from probes.cli import console
from probes.run.progress import Course, Within, announce, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_is_left_covers_all_units(clock):
    course = Course(clock)
    clock.now += 1000  # models were loaded and checked
    announce(course, ["ape init 0", "ape init 1", "bee init 0", "bee init 1"])
    course("ape pretrained", 1.0, 1.0)  # found done: it was not expected, takes no time and says nothing of it
    assert course.left is None
    clock.now += 10
    course("ape init 0", 32, 64)  # an eighth of everything in 10 s
    assert course.done == 1 / 8
    assert course.share("ape init 0") == 1 / 2
    assert course.left == pytest.approx(70)
    clock.now += 10
    course("ape init 0", 64, 64)
    clock.now += 40
    course("bee init 0", 1, 1)  # slower than thought: half of everything in 60 s
    assert course.left == pytest.approx(60)
    assert course.spent == 60
    announce(course, ["ape sinks"])  # another study begins
    assert (course.left, course.done, course.spent) == (None, 0, 0)
    announce(print, ["a"])  # nobody listens
    announce(None, ["a"])
    said = {0.2: "1 s", 89.4: "89 s", 240.0: "4 min", 7200.0: "2.0 h"}
    assert {seconds: duration(seconds) for seconds in said} == said


def test_a_unit_nobody_expected_is_followed_from_where_it_begins(clock):
    course = Course(clock)
    course("toys: copy", 1, 10)
    clock.now += 3
    course("toys: copy", 4, 10)
    assert course.left == pytest.approx(6)
    clock.now += 50
    course("toys: retrieval", 2, 10)
    clock.now += 1
    course("toys: retrieval", 4, 10)
    assert course.left == pytest.approx(3)


def test_a_study_of_several_is_one_unit_and_says_once_how_long_it_still_takes(clock):
    course, said = Course(clock), []
    announce(course, ["ape: jacobian", "ape: leakage"])
    within = Within(course, "ape: jacobian", said.append, 4, clock)
    clock.now += 100  # the model is loaded
    announce(within, ["ape init 0", "ape pretrained"])
    for done in range(1, 5):
        clock.now += 20
        within("ape init 0", done, 8)  # a prompt takes two of these
        assert len(said) == (done > 1)
        assert course.units == {"ape: jacobian": done / 16, "ape: leakage": 0}
        assert course.done == done / 32  # it does not fall when another study begins
    assert said == ["ape: jacobian: first prompt took 40 s; the study about 5 min more"]  # 7 quarters of 4 at 40 s
    course("ape: jacobian", 1, 1)
    stages = Within(course, "ape: leakage", said.append, clock=clock)
    announce(stages, ["ape leakage"])
    clock.now += 30
    stages("ape leakage", 6, 30)
    assert course.done == 0.6
    assert said[1:] == ["ape: leakage: 20% of it took 30 s; the study about 2 min more"]
    quick = Within(None, "sinks", said.append, 2, clock)
    announce(quick, ["ape sinks"])
    clock.now += 1
    quick("ape sinks", 1, 2)
    assert len(said) == 2  # nothing is said of what is done at once


def shown(monkeypatch: pytest.MonkeyPatch, clock: Clock, steps: Any, **given: Any) -> str:
    """What is written to stderr while `steps(advance)` runs."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with console.progress(clock=clock, **given) as advance:
        steps(advance)
    return written.getvalue()


def test_time_is_said_once_when_the_first_prompt_is_measured(monkeypatch, clock):
    def steps(advance: Any) -> None:
        announce(advance, ["ape pretrained", "ape init 0"])
        for done in range(1, 9):
            clock.now += 15
            advance("ape pretrained", done, 8)
        assert advance.left == pytest.approx(120)

    lines = shown(monkeypatch, clock, steps, prompts=4).splitlines()
    said = "headwater: about 4 min in all, as measured on the first prompt"
    assert [line for line in lines if "in all" in line] == [said]
    assert lines[-2].split()[0] == "all"  # one bar for everything, the unit's below it
    assert lines[-2].split()[-3:] == ["2", "min", "left"]

    def toys_first(advance: Any) -> None:  # what nobody expected is told by its name, and again what was announced
        for done in (0, 1, 2):
            advance("toys: retrieval", done, 4)
            clock.now += 30
        steps(advance)

    lines = shown(monkeypatch, clock, toys_first).splitlines()
    assert [line for line in lines if "in all" in line] == [
        "headwater: toys: retrieval: about 2 min in all, as measured so far",
        "headwater: about 4 min in all, as measured so far",
    ]

    def resumed(advance: Any) -> None:  # groups that were trained before come at once: no speed can be read off them
        for done in (1, 3, 3.1):
            advance("toys: retrieval", done, 4)
            clock.now += 3

    assert "in all" not in shown(monkeypatch, clock, resumed)

    def short(advance: Any) -> None:  # nothing is said of it, and one unit has one bar
        announce(advance, ["ape sinks"])
        clock.now += 1
        advance("ape sinks", 8, 8)

    assert "min" not in shown(monkeypatch, clock, steps, alike=False)

    (line,) = shown(monkeypatch, clock, short, prompts=4).splitlines()
    assert line.startswith("ape sinks")
    assert line.rstrip().endswith("100%")
