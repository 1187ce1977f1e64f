"""The tables of `tests.lab.fleet_scale`, one for each part of its report, in the report's order."""

from collections.abc import Mapping
from typing import Any, Final

from gpulease.client.console.tables import MISSING, table

from .fleet_fail_over import GOAL_HORIZON_S, GOAL_S
from .fleet_leases import ANONYMOUS, HOST, NAMED

BEAT_TIMES: Final = ("beat_p50_ms", "beat_p99_ms", "claim_p50_ms", "claim_p99_ms", "plain_put_p50_ms")
KINDS: Final = {HOST: "one host, no fleet", ANONYMOUS: "a fleet", NAMED: "a fleet, by a name"}
LAUNCHES: Final = {
    "launch_pipelined_us": "launch, pipelined",
    "launch_own_us": "launch, the caller's own time",
    "launch_sync_p50_us": "launch + sync, p50",
}
FAULTS: Final = {
    "daemon": "the daemon is killed",
    "node": "all of the node is killed",
    "cut": "the node is cut from etcd",
    "leader and node": "etcd's leader and the node are killed",
    "leader": "etcd's leader is killed: another name",
}

_Found = Mapping[str, Any]


def fleet_tables(found: _Found) -> str:
    """Lay out the report's parts as tables, with an empty line between them."""
    parts = (_placement, _grants, _launches, _fail_over, _refusals, _beats)
    return "\n\n".join(part(found) for part in parts)


def _placement(found: _Found) -> str:
    placement = found["placement"]
    rows = [
        [
            text,
            *(f"{placement[kind][name]:.2f} ms" for name in ("p50_ms", "p99_ms")),
            *_ratios(placement["ratio"], kind),
        ]
        for kind, text in KINDS.items()
    ]
    return table(["acquire", "p50", "p99", "p50 to the host's", "p99 to the host's"], rows)


def _ratios(ratio: Mapping[str, float], kind: str) -> list[str]:
    # Leave out the ratio of the host to itself.
    return [f"{ratio[f'{kind}_{name}']:.2f}" if kind != HOST else MISSING for name in ("p50", "p99")]


def _grants(found: _Found) -> str:
    rows = [
        [
            KINDS[one["kind"]],
            str(one["daemons"] or 1),
            f"{one['per_s']:.1f}",
            f"{one['p50_ms']:.1f} ms",
            f"{one['p99_ms']:.1f} ms",
        ]
        for one in found["grants"]
    ]
    at_a_time = found["grants"][0]["at_a_time"]
    return table([f"leases, {at_a_time} at a time", "daemons", "grants a second", "acquire p50", "p99"], rows)


def _launches(found: _Found) -> str:
    launches = found["launches"]
    rows = [
        [text, *(f"{launches[where][name]:.2f} us" for where in ("host", "node")), f"{launches['ratio'][name]:.2f}"]
        for name, text in LAUNCHES.items()
    ]
    return table(["a lease without a name", "one host, no fleet", "a node of a fleet", "ratio"], rows)


def _fail_over(found: _Found) -> str:
    fail_over = found["fail_over"]
    rows = [
        [
            FAULTS[one["fault"]],
            str(one["runs"]),
            f"{one['served_again_median_s']:.1f} s",
            f"{one['served_again_max_s']:.1f} s",
            # With an intact node the first session does not end.
            MISSING if one["ended_after_s"][0] is None else f"{max(one['ended_after_s']):.1f} s",
            str(one["overlaps"]),
        ]
        for one in fail_over["faults"]
    ]
    head = [f"fail-over, a horizon of {fail_over['horizon_s']} s", "runs", "first kernel elsewhere", "worst"]
    return table([*head, "last kernel here, worst", "overlaps"], rows) + f"\n\n{_reason(fail_over)}"


def _reason(fail_over: _Found) -> str:
    # Gaps are known only for a session that continued through the fault.
    gaps = [gap for one in fail_over["faults"] for gap in one["longest_gap_ms"] if gap is not None]
    goal = f"The goal is {GOAL_S:g} s at a horizon of {GOAL_HORIZON_S} s: half of it until a silent node is fenced, and"
    goal += " one until its leases\nhave surely ended."
    return goal + (f" While etcd had no leader, a session's longest pause was {max(gaps):.0f} ms." if gaps else "")


def _refusals(found: _Found) -> str:
    rows = [
        [
            f"{one['asked_part']:.0%}",
            one["order"],
            f"{one['refused_percent']:.2f} %",
            f"{one['asked_again_percent']:.1f} %",
            f"{one['used_percent']:.1f} %",
        ]
        for one in found["refusals"]
    ]
    nodes = found["refusals"][0]["nodes"]
    head = [f"{nodes:,} nodes: memory asked for", "order", "refused", "another node asked", "memory used"]
    return table(head, rows)


def _beats(found: _Found) -> str:
    rows = [
        [
            f"{one['nodes']:,}",
            f"{one['beats_per_s']:.0f} of {one['beats_wanted_per_s']:.0f}",
            # A figure that etcd does not report is left out.
            *(f"{one[name]:.1f} ms" if one[name] is not None else MISSING for name in BEAT_TIMES),
            ", ".join(f"{cores:.2f}" for cores in one["etcd_cores"]),
            f"{max(one['etcd_us_per_write'])} us",
            MISSING if one["etcd_bytes_per_beat"] is None else f"{one['etcd_bytes_per_beat']} B",
        ]
        for one in found["beats"]
    ]
    head = ["nodes that beat", "beats a second", "p50", "p99", "claim p50", "p99", "plain put p50"]
    return table([*head, "etcd's cores, by member", "a write", "a beat leaves"], rows)
