"""How close does each policy come to the resource bound, by balance of the lanes and number of buckets?

    python bench/policies.py --json

Simulated: the product's executor in virtual time, so the figures do not depend on this machine. Needs no GPU.
Takes about 20 s.

The balances give seconds a step to compute (a third of it forward), each direction of copies, and Adam. The
resource bound is the busiest lane's share. One JSON line a case; ``ideal_over_bound`` is the steady period over
the bound: 1 is what no policy can beat.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from zoff_async.scheduler import POLICIES, KindCost, Layout, simulate

#: Seconds a step of compute, of each direction of copies, and of Adam.
BALANCES = {
    "balanced": (1.0, 1.0, 1.0),
    "adam twice the rest": (1.0, 1.0, 2.0),
    "compute twice the rest": (2.0, 1.0, 1.0),
    "copies twice the rest": (1.0, 2.0, 1.0),
}

#: Name in the table: policy, and the number of backwards it is told (None: uploads wait for the step's end).
CASES = {
    "serial": ("serial", None),
    "overlap": ("overlap", None),
    "in_backward": ("in_backward", 1),
    "delayed": ("delayed", 1),
    "delayed, undeclared": ("delayed", None),
}


def cost_of(balance: tuple[float, float, float], buckets: int, chunks: int) -> KindCost:
    """Equal buckets: every lane's second is spread over them."""
    compute_s, copy_s, adam_s = (seconds / buckets for seconds in balance)
    return KindCost(
        {
            "fwd": compute_s / 3,
            "bwd": 2 * compute_s / 3,
            "d2h": copy_s,
            "adam": adam_s / chunks,
            "h2d": copy_s,
        }
    )


def measure(buckets: int, chunks: int, slots: int, steps: int) -> Iterator[dict[str, object]]:
    for balance, seconds in BALANCES.items():
        for case, (policy, backwards) in CASES.items():
            layout = Layout((chunks,) * buckets, slots=min(slots, buckets), backwards=backwards)
            found = simulate(POLICIES[policy](layout), cost_of(seconds, buckets, chunks), steps=steps)
            yield {
                "bench": "policies",
                "policy": case,
                "balance": balance,
                "buckets": buckets,
                "chunks": chunks,
                "slots": layout.slots,
                "period_s": round(found.period_s, 4),
                "resource_bound_s": round(found.resource_bound_s, 4),
                "ideal_over_bound": round(found.period_s / found.resource_bound_s, 2),
            }


def table(lines: list[dict[str, object]]) -> str:
    """Markdown: a row a balance, a column a policy."""
    rows = [f"| balance | {' | '.join(CASES)} |", "| --- |" + " --- |" * len(CASES)]
    for balance in BALANCES:
        found = {str(line["policy"]): line["ideal_over_bound"] for line in lines if line["balance"] == balance}
        rows.append(f"| {balance} | {' | '.join(format(found[case], '.2f') for case in CASES)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="JSON lines instead of tables")
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 40])
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 1_000_000], help="capped at the buckets")
    parser.add_argument("--chunks", type=int, default=4, help="Adam chunks of each bucket")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    for buckets in args.buckets:
        for slots in args.slots:
            lines = list(measure(buckets, args.chunks, slots, args.steps))
            if args.json:
                for line in lines:
                    print(json.dumps(line))
            else:
                print(f"{buckets} buckets, {min(slots, buckets)} slots in each direction\n\n{table(lines)}\n")


if __name__ == "__main__":
    main()
