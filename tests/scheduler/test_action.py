"""Actions and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoff_async.scheduler import Action, Edge


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("norm", Action("norm")),
        ("d2h:3", Action("d2h", 3)),
        ("d2h:3#1", Action("d2h", 3, backward=1)),
        ("adam:3.7", Action("adam", 3, 7)),
        ("fwd:0@+1", Action("fwd", 0, lag=1)),
        ("my_node#2@+1", Action("my_node", backward=2, lag=1)),
    ],
)
def test_text_and_action_are_two_forms_of_one_thing(text, action):
    assert Action.parse(text) == action
    assert str(action) == text


kinds = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
numbers = st.integers(0, 10**6)
places = st.one_of(st.tuples(st.none(), st.none()), st.tuples(numbers, st.none()), st.tuples(numbers, numbers))


@given(kinds, places, st.integers(0, 3), st.integers(0, 3))
def test_every_action_reads_back(kind, place, backward, lag):
    action = Action(kind, *place, backward, lag)

    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "Adam", "adam:", "adam:x", "adam.3", "adam:3.", "adam:03", "adam:3#0", "adam:3@1", "adam:3 ", "3"]
)
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError) as caught:
        Action.parse(text)

    assert str(caught.value) == (
        f"cannot read action {text!r}: expected KIND[:BUCKET[.CHUNK]][#BACKWARD][@+LAG], "
        "for example 'norm', 'd2h:3', 'adam:3.7#1' or 'fwd:0@+1', with KIND a lower-case word"
    )


def test_a_later_action_adds_up_and_its_template_forgets():
    action = Action("d2h", 3).later(backward=1).later(lag=1)

    assert str(action) == "d2h:3#1@+1"
    assert action.template() == Action("d2h", 3)


def test_an_edge_reads_as_an_arrow():
    assert str(Edge(Action("h2d", 0), Action("fwd", 0, lag=1), "weights-before-forward")) == "h2d:0 -> fwd:0@+1"
