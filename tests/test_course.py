"""How long a command takes, from what it has done: on a clock that the test sets."""

from __future__ import annotations

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
    announce(course, {"ape init 0": 2.0, "ape init 1": 2.0, "bee init 0": 4.0})
    course("ape pretrained", 1.0, 1.0)  # found done: it was not expected, takes no time and says nothing of it
    assert course.left is None
    clock.now += 10
    course("ape init 0", 32, 64)  # an eighth of everything in 10 s
    assert course.done == 1 / 8
    assert course.left == pytest.approx(70)
    clock.now += 10
    course("ape init 0", 64, 64)
    clock.now += 80
    course("bee init 0", 1, 2)  # slower than thought: half of everything in 100 s
    assert course.left == pytest.approx(100)
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


def test_a_study_within_a_course_is_replaced_by_its_own_units(clock):
    course = Course(clock)
    announce(course, {"theory: ape": 10.0, "sinks: ape": 5.0})
    within = Within(course, "theory", "theory: ape")
    announce(within, {"ape init 0": 8.0, "ape pretrained": 7.0})
    assert course.sizes == {"sinks: ape": 5.0, "theory: ape init 0": 8.0, "theory: ape pretrained": 7.0}
    clock.now += 4
    within("ape init 0", 3, 6)
    assert course.left == pytest.approx(16)
    Within(course, "sinks", "sinks: ape")("ape sinks", 1, 1)
    announce(Within(None, "sinks", "sinks: ape"), {"a": 1.0})  # nobody listens
    announce(print, {"a": 1.0})


def test_a_study_goes_on_at_its_own_pace_and_the_others_at_that_of_all(clock):
    course = Course(clock)
    announce(course, {"sinks: ape": 2.0, "theory: ape": 4.0, "leakage: ape": 8.0})
    course("sinks: ape", 0, 2)
    clock.now += 2
    course("sinks: ape", 2, 2)  # 1 s per size
    assert course.left == pytest.approx(12)
    clock.now += 7  # figures, and another study is made ready
    announce(Within(course, "theory", "theory: ape"), {"ape init 0": 2.0, "ape pretrained": 2.0})
    clock.now += 10
    course("theory: ape init 0", 1, 2)  # 10 s per size; 4 s per size of all that is done
    assert course.left == pytest.approx(10 + 20 + 8 * 4 + 7)


def test_a_study_says_once_what_its_first_prompt_took_and_what_the_whole_will(clock):
    course, said = Course(clock), []
    announce(course, {"jacobian: ape": 8.0, "leakage: ape": 8.0})
    within = Within(course, "jacobian", "jacobian: ape", prompts=4, told=said.append, clock=clock)
    clock.now += 100  # the model is loaded
    announce(within, {"ape init 0": 4.0, "ape pretrained": 4.0})
    for done in range(1, 5):
        clock.now += 20
        within("ape init 0", done, 8)  # a prompt takes two of these
        assert len(said) == (done > 1)
    assert said == ["jacobian: first prompt took 40 s; the whole report about 10 min more"]  # 15 quarters of 4 at 10 s
    stages = Within(course, "leakage", "leakage: ape", told=said.append, clock=clock)
    announce(stages, {"ape leakage": 8.0})
    clock.now += 30
    stages("ape leakage", 6, 30)
    assert said[1].startswith("leakage: 20% of it took 30 s; the whole report about ")
    assert len(said) == 2


def test_no_time_is_said_of_work_that_is_done_at_once_or_unheard(clock):
    said: list[str] = []
    course = Course(clock)
    for advance in (course, None, lambda *_: None):
        announce(course, {"sinks: ape": 1.0})
        within = Within(advance, "sinks", "sinks: ape", prompts=2, told=said.append, clock=clock)
        announce(within, {"ape sinks": 1.0})
        clock.now += 1
        within("ape sinks", 1, 2)
    assert said == []


def shown(monkeypatch: pytest.MonkeyPatch, clock: Clock, steps: Any, **given: Any) -> str:
    """What is written to stderr while `steps(advance)` runs."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with console.progress(clock=clock, **given) as advance:
        steps(advance)
    return written.getvalue()


def test_time_is_said_once_when_the_first_prompt_is_measured(monkeypatch, clock):
    def steps(advance: Any) -> None:
        announce(advance, {"ape pretrained": 1.0, "ape init 0": 1.0})
        for done in range(1, 9):
            clock.now += 15
            advance("ape pretrained", done, 8)
        assert advance.left == pytest.approx(120)

    lines = shown(monkeypatch, clock, steps, prompts=4).splitlines()
    said = "headwater: about 4 min in all, as measured on the first prompt"
    assert [line for line in lines if "in all" in line] == [said]
    assert lines[-2].split()[0] == "all"  # one bar for everything, the unit's below it
    assert lines[-2].split()[-3:] == ["2", "min", "left"]

    def short(advance: Any) -> None:  # nothing is said of it, and one unit has one bar
        announce(advance, {"ape sinks": 3.0})
        clock.now += 1
        advance("ape sinks", 8, 8)

    (line,) = shown(monkeypatch, clock, short, prompts=4).splitlines()
    assert line.startswith("ape sinks")
    assert line.rstrip().endswith("100%")
