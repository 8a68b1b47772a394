"""The outcome of a run for a person: tables, loss curves and what the model writes."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zoff_async.train.curves import draw_curves
from zoff_async.train.outcome import Outcome

LANE_WORK = {
    "compute": "forward and backward",
    "d2h": "gradients to the host",
    "cpu": "accumulation, norm, Adam",
    "h2d": "parameters to the device",
    "net": "between processes",
}


def print_report(outcome: Outcome, console: Console) -> None:
    """Print everything that ``zoff train`` has to say at its end."""
    if outcome.sample is not None:
        console.print("\nWhat the model writes:\n", style="bold")
        console.print(outcome.sample, markup=False, highlight=False)
    if outcome.reference_losses is not None:
        console.print("\nLoss, step by step:\n", style="bold")
        curves = {"offloaded": outcome.losses, "reference": outcome.reference_losses}
        console.print(draw_curves(curves), markup=False, highlight=False)
    for table in (_run_table(outcome), _bytes_table(outcome), _lanes_table(outcome)):
        console.print()
        console.print(table)
    if outcome.gantt is not None:
        console.print("\nThe last steps:\n", style="bold")
        console.print(outcome.gantt, markup=False, highlight=False, soft_wrap=True)
    if outcome.verdict is not None:
        console.print(f"\n{outcome.verdict}", markup=False, highlight=False)
    if outcome.trace is not None:
        console.print(f"\ntrace: {outcome.trace}", markup=False, highlight=False, soft_wrap=True)
    if outcome.checkpoint is not None:
        console.print(f"\ncheckpoint: {outcome.checkpoint}", markup=False, highlight=False, soft_wrap=True)


def _run_table(outcome: Outcome) -> Table:
    settings = outcome.settings
    table = _table("Run", ("", "left"), ("", "left"))
    table.show_header = False
    clip = "no clipping" if settings.max_norm is None else f"norm clipped at {settings.max_norm:g}"
    table.add_row("model", f"{settings.size}, {outcome.parameters:,} parameters, {settings.dtype}")
    table.add_row("text", f"{outcome.text_name}, {outcome.text_bytes:,} bytes")
    table.add_row("optimizer", f"AdamW on the host, {settings.policy}, {outcome.kernel} kernel, {clip}")
    table.add_row("device", outcome.device)
    table.add_row("steps", f"{len(outcome.losses):,} of {settings.tokens_per_step:,} tokens")
    table.add_row("loss, first and last step", f"{outcome.losses[0]:.4f} -> {outcome.losses[-1]:.4f}")
    if outcome.reference_losses is not None:
        first, last = outcome.reference_losses[0], outcome.reference_losses[-1]
        table.add_row("  with plain AdamW", f"{first:.4f} -> {last:.4f}")
        table.add_row("  largest difference", f"{outcome.max_abs_loss_difference:.2e} at any step")
    table.add_row("tokens/s", f"{outcome.tokens_per_s:,.0f} ({outcome.step_ms:.1f} ms a step)")
    if outcome.reference_tokens_per_s is not None:
        table.add_row("  with plain AdamW", f"{outcome.reference_tokens_per_s:,.0f}")
    if outcome.hidden_share is not None:
        table.add_row("host work hidden", f"{outcome.hidden_share:.0%} of its time lies behind compute")
    if outcome.skipped_steps:
        table.add_row("skipped steps", f"{outcome.skipped_steps} (a gradient was not finite)")
    return table


def _bytes_table(outcome: Outcome) -> Table:
    table = _table(
        "Where the bytes live",
        ("place", "left"),
        ("what", "left"),
        ("bytes", "right"),
        ("a parameter", "right"),
    )
    for (place, purpose), held in outcome.places.items():
        table.add_row(place, purpose, f"{held:,}", f"{held / outcome.parameters:.2f}")
    return table


def _lanes_table(outcome: Outcome) -> Table:
    table = _table(
        "Time by lane, a step",
        ("lane", "left"),
        ("work", "left"),
        ("busy ms", "right"),
        ("of the step", "right"),
        ("behind compute", "right"),
    )
    order = {lane: place for place, lane in enumerate(LANE_WORK)}
    for lane, time in sorted(outcome.lanes.items(), key=lambda item: order.get(item[0], len(order))):
        hidden = "" if lane == "compute" or not time.busy_s else f"{time.hidden_s / time.busy_s:.0%}"
        table.add_row(lane, LANE_WORK.get(lane, ""), f"{time.busy_s * 1e3:.2f}", f"{time.share:.0%}", hidden)
    return table


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left")
    return table
