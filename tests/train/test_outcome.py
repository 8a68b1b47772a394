"""The outcome of a run, as figures and as a report."""

from __future__ import annotations

import io
import json
from dataclasses import replace

from rich.console import Console

from zoff_async.train.lanes import LaneTime
from zoff_async.train.outcome import Outcome
from zoff_async.train.report import print_report
from zoff_async.train.settings import settings_from

OUTCOME = Outcome(
    settings=settings_from({"steps": 3, "max_norm": 1.0}),
    parameters=1000,
    text_name="book",
    text_bytes=5000,
    device="cpu",
    kernel="numba",
    losses=[5.5, 4.0, 3.0],
    reference_losses=[5.5, 4.25, 3.125],
    tokens_per_s=1234.0,
    reference_tokens_per_s=1000.0,
    step_ms=50.0,
    lanes={"compute": LaneTime(0.03, 0.03, 0.03, 0.6), "cpu": LaneTime(0.02, 0.04, 0.005, 0.4)},
    hidden_share=0.25,
    places={("host", "masters"): 4000},
    skipped_steps=0,
    sample="[bold] is no markup here",
    checkpoint="runs/checkpoint.pt",
)


def printed(outcome: Outcome) -> str:
    file = io.StringIO()
    print_report(outcome, Console(file=file, width=100))
    return file.getvalue()


def test_the_json_has_the_promised_figures():
    figures = json.loads(json.dumps(OUTCOME.as_json(), allow_nan=False))

    assert {name: figures[name] for name in PROMISED} == PROMISED
    assert figures["lanes"]["cpu"] == {"busy_s": 0.02, "work_s": 0.04, "hidden_s": 0.005, "share": 0.4}
    assert figures["bytes"] == [{"place": "host", "purpose": "masters", "bytes": 4000, "per_parameter": 4.0}]


PROMISED = {
    "loss_first": 5.5,
    "loss_last": 3.0,
    "reference_loss_last": 3.125,
    "max_abs_loss_difference": 0.25,
    "tokens_per_s": 1234.0,
    "steps": 3,
    "parameters": 1000,
    "policy": "overlap",
    "kernel": "numba",
    "device": "cpu",
    "dtype": "fp32",
    "losses": [5.5, 4.0, 3.0],
    "hidden_share": 0.25,
}


def test_what_was_not_asked_for_is_null():
    plain = replace(OUTCOME, reference_losses=None, reference_tokens_per_s=None, hidden_share=None)
    figures = plain.as_json()

    for name in ("reference_loss_last", "max_abs_loss_difference", "reference_losses", "hidden_share"):
        assert figures[name] is None


def test_the_report_says_everything_once():
    report = printed(OUTCOME)

    for line in (
        "[bold] is no markup here",
        "o = offloaded, r = reference, = is both",
        "5.5000 -> 3.0000",
        "2.50e-01 at any step",
        "AdamW on the host, overlap, numba kernel, norm clipped at 1",
        "25% of its time lies behind compute",
        "checkpoint: runs/checkpoint.pt",
    ):
        assert report.count(line) == 1, line


def test_a_report_without_a_comparison_draws_no_curve():
    report = printed(replace(OUTCOME, reference_losses=None, reference_tokens_per_s=None, sample=None))

    assert "plain AdamW" not in report
    assert "What the model writes" not in report


def test_skipped_steps_are_told_only_if_there_are_any():
    assert "skipped" not in printed(OUTCOME)
    assert "2 (a gradient was not finite)" in printed(replace(OUTCOME, skipped_steps=2))
