"""A rule is data: what it may hold, and that a new one needs no kernel of its own."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tests.cpu_ops.reference import HYPER, check_kernel
from zoff_async.cpu_ops import ADAM, ADAMW, Line, Program, Scalars, UpdateRule, make_kernel
from zoff_async.cpu_ops.rule import Hyper, names_in


def _momentum_scalars(hyper: Hyper) -> Scalars:
    return Scalars("only", (np.float32(hyper.factor), np.float32(hyper.betas[0]), np.float32(hyper.lr)), hyper)


MOMENTUM = UpdateRule(
    "momentum",
    {"m": "momentum_buffer"},
    {"only": Program((Line("g", "g*f", unit="f"), Line("m", "m*b + g"), Line("p", "p - m*l")), ("f", "b", "l"))},
    _momentum_scalars,
)


def _lion_scalars(hyper: Hyper) -> Scalars:
    beta1, beta2 = hyper.betas
    values = (hyper.factor, beta1, 1 - beta1, 1 - beta2, hyper.lr, 1 - hyper.lr * hyper.weight_decay)
    return Scalars("only", tuple(np.float32(x) for x in values), hyper)


LION = UpdateRule(
    "lion",
    {"m": "exp_avg"},
    {
        "only": Program(
            (Line("g", "g*f"), Line("p", "p*d - sign(m*b1 + g*a1)*l", double=True), Line("m", "m + (g - m)*a2")),
            ("f", "b1", "a1", "a2", "l", "d"),
        )
    },
    _lion_scalars,
)


@pytest.mark.parametrize("kernel", ["numexpr", "numba"])
@pytest.mark.parametrize("rule", [MOMENTUM, LION], ids=lambda rule: rule.name)
def test_another_rule_is_its_expressions_and_scalars_and_nothing_else(rule, kernel):
    check_kernel(make_kernel(kernel, rule), rule.scalars(**HYPER, factor=0.5), 1000)


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=lambda rule: rule.name)
def test_no_line_holds_a_number_or_an_unknown_name(rule):
    """A float literal, and any name that numexpr would look for in the caller's frame, changes results silently."""
    for program in rule.programs.values():
        for line in program.lines:
            for text in filter(None, (line.expression, line.shorter)):
                assert not re.search(r"(?<!\w)[\d.]", text), text
                assert set(names_in(text)) <= {"p", "g", *rule.states, *program.scalars}, text


def test_every_shorter_line_is_the_line_with_a_one_in_it():
    found = [
        (line.expression, line.shorter)
        for rule in (ADAMW, ADAM)
        for program in rule.programs.values()
        for line in program.lines
        if line.unit
    ]

    assert set(found) == {("g*f", None), ("p*d - m*s/(sqrt(v) + e)", "p - m*s/(sqrt(v) + e)")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (Line("m", "m*0.9 + g"), "no numbers"),
        (Line("m", "m + g*2"), "no numbers"),
        (Line("m", "m + beta*g"), "unknown: ['beta']"),
        (Line("q", "m + g"), "assigns 'q'"),
        (Line("m", "m + g", unit="z"), "shortens on 'z'"),
    ],
)
def test_a_rule_that_numexpr_would_misread_is_refused_when_it_is_made(line, message):
    with pytest.raises(ValueError) as caught:
        UpdateRule("bad", {"m": "exp_avg"}, {"only": Program((line,), ())}, _momentum_scalars)

    assert message in str(caught.value)
    assert str(caught.value).startswith("bad.only ")


def test_scalars_are_formed_in_double_and_rounded_once():
    """``1 - beta2`` in fp32 would be 1.3e-5 off."""
    scalars = ADAMW.scalars(**HYPER, factor=0.3)
    values = dict(zip(ADAMW.programs[scalars.program].scalars, scalars.values, strict=True))
    root = math.sqrt(1 - 0.999**3)

    assert values == {
        "f": np.float32(0.3),
        "c1": np.float32(1 - 0.9),
        "b1": np.float32(0.9),
        "c2": np.float32(1 - 0.999),
        "b2": np.float32(0.999),
        "s": np.float32(1e-2 / (1 - 0.9**3) * root),
        "e": np.float32(1e-8 * root),
        "d": np.float32(1 - 1e-2 * 0.1),
    }
    assert all(type(value) is np.float32 for value in scalars.values)
    assert values["c2"] != np.float32(1) - np.float32(0.999)


def test_scalars_of_one_step_are_equal_and_hash_alike():
    first, again, later = ADAMW.scalars(**HYPER), ADAMW.scalars(**HYPER), ADAMW.scalars(**{**HYPER, "step": 4})

    assert first == again
    assert len({first, again, later}) == 2


def test_the_first_step_is_step_one():
    with pytest.raises(ValueError) as caught:
        ADAMW.scalars(**{**HYPER, "step": 0})

    assert str(caught.value) == "step counts from 1 for the first update, got step=0"


def test_states_are_told_by_their_public_names_in_order():
    assert ADAMW.state_names == ADAM.state_names == ("exp_avg", "exp_avg_sq")
