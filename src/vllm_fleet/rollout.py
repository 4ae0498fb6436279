"""What a rollout decides: which replicas change and what must make room, whether a gate passes, whose turn it is.

Pure functions over what hosts and gateways report (modules fleet_state, gateway_servers, speed_probe). The playbooks
ask them by the filters in plugins/filter/rollout.py, and do what they say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

JOURNAL_PATTERN = re.compile(
    r"error|failed|waiting:|gave up|refused|not started|crash|killed|out of memory", re.IGNORECASE
)
JOURNAL_NOISE = re.compile(r'^\s+File "|Traceback \(most recent')
JOURNAL_LINES = 12
LINE_LENGTH = 300


def steps(state: Mapping[str, Any], plan: Mapping[str, Any], units: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Say what it takes to bring a host from what it runs to a release, one replica at a time.

    A replica whose unit is the release's, came to serve and runs is left alone. Before one starts, whoever else holds
    one of its GPUs or its port must be out of the way; the others go on serving meanwhile.

    Args:
        state: What fleet_state found on the host.
        plan: The release's plan (contract 3).
        units: Checksum of each unit in the release's folder, by the unit's name.

    Returns:
        `steps`, in the order of the plan: {"replica": its entry of the plan, "why", "displaces": [names]}; and
        `removed`: names of the replicas that no step displaces and the release no longer has.
    """
    present = dict(state["replicas"])
    wanted = [replica["name"] for replica in plan["replicas"]]
    found = []
    for replica in plan["replicas"]:
        why = _due(present.get(replica["name"]), units.get(replica["unit"]))
        if why is None:
            continue
        displaced = [name for name, other in present.items() if name != replica["name"] and _in_the_way(other, replica)]
        for name in displaced:
            del present[name]
        found.append({"replica": replica, "why": why, "displaces": displaced})
    return {"steps": found, "removed": [name for name in present if name not in wanted]}


def _due(present: Mapping[str, Any] | None, checksum: str | None) -> str | None:
    """Why a replica must be switched; None when there is nothing to do."""
    if present is None:
        return "it is not there yet"
    if checksum is None or present["installed"] != checksum:
        return "its unit changes"
    if present["applied"] != checksum:
        return "its unit was installed and has not come to serve"
    if present["active"] != "active":
        return f"it is {present['active']}"
    return None


def _in_the_way(other: Mapping[str, Any], replica: Mapping[str, Any]) -> bool:
    """Whether a replica holds what another needs; one of which nothing is known is taken to."""
    entry = other.get("replica")
    if not entry:
        return True
    same_port = (entry["bind_address"], entry["port"]) == (replica["bind_address"], replica["port"])
    return same_port or bool(set(entry.get("gpus") or ()) & set(replica.get("gpus") or ()))


def sentence(step: Mapping[str, Any]) -> str:
    """A step in words."""
    gone = f", and {', '.join(step['displaces'])} makes room" if step["displaces"] else ""
    return f"{step['replica']['name']} is switched ({step['why']}{gone})"


def phase(state: Mapping[str, Any], todo: Mapping[str, Sequence[Any]], drained: Sequence[str]) -> str:
    """Which part of a switch a host belongs to: `steady` (nothing to do), `idle` (nobody is served) or `serving`."""
    if not todo["steps"] and not todo["removed"] and not drained:
        return "steady"
    running = any(entry["active"] not in ("inactive", "failed") for entry in state["replicas"].values())
    return "serving" if running else "idle"


def serving(state: Mapping[str, Any]) -> dict[str, Any]:
    """What gateways may send requests to: the replicas whose unit is as it last came to serve, with their models."""
    return {
        "replicas": [
            {**entry["replica"], "model": entry["model"]["served_name"]}
            for entry in state["replicas"].values()
            if entry["replica"] and entry["installed"] == entry["applied"]
        ]
    }


def drained(gateways: Sequence[Mapping[str, Any]], host: str) -> list[str]:
    """Names of a host's replicas that are drained in a gateway, from what gateway_servers reports of each."""
    names = {
        name.removeprefix(f"{host}.")
        for gateway in gateways
        for name, server in gateway.get("servers", {}).items()
        if server["drained"] and name.rpartition(".")[0] == host
    }
    return sorted(names)


def restoration(
    before: Mapping[str, Any], now: Mapping[str, Any], only: Sequence[str] | None = None
) -> dict[str, list[Any]]:
    """Say what brings a host back to what it was, wherever a switch was broken off.

    Args:
        before: What fleet_state found before.
        now: What it finds now.
        only: The replicas to put right; None for all.

    Returns:
        `remove`: units that were not there. `restore`: {"replica", "release"} of each that is not as it was, of those
        that came to serve; another would fail as it did before.
    """

    def meant(name: str) -> bool:
        return only is None or name in only

    remove = [
        entry["unit"] for name, entry in now["replicas"].items() if meant(name) and name not in before["replicas"]
    ]
    restore = []
    for name, was in before["replicas"].items():
        entry = now["replicas"].get(name) or {}
        same = entry.get("installed") == was["installed"] and entry.get("active") == was["active"]
        if meant(name) and not same and was["served"] and was["replica"]:
            restore.append({"replica": was["replica"], "release": was["served"]})
    return {"remove": remove, "restore": restore}


def gate(before: Mapping[str, Any] | None, after: Mapping[str, Any], tolerance_percent: float) -> list[str]:
    """Compare a replica's speed with what it was, both measured while it had nothing else to do.

    Args:
        before: What speed_probe measured of the former release on the same replica; None or empty without one.
        after: The same of the new one.
        tolerance_percent: How much slower it may be.

    Returns:
        A sentence for each number that is worse than tolerated.
    """
    if not before or before.get("model") != after.get("model"):
        return []
    complaints = []
    least = before["tokens_per_second"] * (1 - tolerance_percent / 100)
    if after["tokens_per_second"] < least:
        complaints.append(
            f"it brings {after['tokens_per_second']:.1f} tokens/s where the former release brought "
            f"{before['tokens_per_second']:.1f} (tolerated: {least:.1f})"
        )
    # Below a tenth of a second the clock of a loaded host decides, not the engine.
    most = max(before["first_token_seconds"] * (1 + tolerance_percent / 100), before["first_token_seconds"] + 0.1)
    if after["first_token_seconds"] > most:
        complaints.append(
            f"its first token takes {after['first_token_seconds']:.3f} s where it took "
            f"{before['first_token_seconds']:.3f} s (tolerated: {most:.3f} s)"
        )
    return complaints


def journal(lines: Sequence[str]) -> list[str]:
    """The lines of a unit's journal that say why it failed; its last ones where none does."""
    telling = [line for line in lines if JOURNAL_PATTERN.search(line) and not JOURNAL_NOISE.search(line)]
    short = [line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + "..." for line in telling or lines]
    return list(dict.fromkeys(short))[-JOURNAL_LINES:]


def rollback_target(state: Mapping[str, Any], release: str | None = None) -> str | None:
    """The release that a host goes back to.

    Args:
        state: What fleet_state found.
        release: One that the user names.

    Returns:
        The named one if the host has it. Where a switch was begun and not ended (a replica is installed from, or came
        to serve, another release than the current), the current one; else the one before it. None when there is none.
    """
    kept = state["releases"]
    if release:
        return release if release in kept else None
    current = state["current"]
    begun = any(
        entry["release"] != current or entry["applied"] != entry["installed"] for entry in state["replicas"].values()
    )
    if current in kept and begun:
        return str(current)
    previous = state["previous"]
    return str(previous) if previous in kept and previous != current else None


def running_requests(gateways: Sequence[Mapping[str, Any]], running: int | None) -> str:
    """Name the requests that a drained replica still works on.

    Args:
        gateways: Of each gateway `item`, its name, and `requests`, as gateway_servers reports them.
        running: What the engine counts, None where it does not say.
    """
    named = [(gateway["item"], request) for gateway in gateways for request in gateway["requests"]]
    named.sort(key=lambda pair: -pair[1]["age_seconds"])
    listed = "; ".join(
        f"from {request['client']} through {gateway}, for {request['age_seconds']} s" for gateway, request in named
    )
    count = "an unknown number of" if running is None else str(running)
    rest = (running or 0) - len(named)
    more = f"; {rest} more that came before the gateway's last reload or past it" if named and rest > 0 else ""
    return f"{count} running requests ({listed or 'none that a gateway can name'}{more})"


def lock_refusal(holder: Mapping[str, Any], me: Mapping[str, Any], *, alive: bool, path: str, host: str) -> str:
    """Say why a rollout may not begin while another holds the lock; empty when it may take the lock over.

    Args:
        holder: Who has it: {"user", "controller", "pid", "since", "playbook"}.
        me: The same of this run.
        alive: Whether the holder's process still runs, where that can be known: on this controller.
        path: The lock's file.
        host: The host where it lies.
    """
    mine = (holder.get("user"), holder.get("controller")) == (me["user"], me["controller"])
    if mine and not alive:
        return ""
    who = (
        f"{holder.get('user')} on {holder.get('controller')} (process {holder.get('pid')}) has been at it since "
        f"{holder.get('since')} with {holder.get('playbook')}"
    )
    if mine:
        return f"Another rollout is under way: {who}. Wait for it, or end it."
    return (
        f"Another rollout is under way: {who}. Wait for it. If that process is gone (ask there: ps -p "
        f"{holder.get('pid')}), its user runs the same command again there, which finishes or reverses the work; where "
        f"nobody can, remove {path} on {host} and run this again."
    )


# --- Status -----------------------------------------------------------------------------------------------------------


def status(hosts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One row per replica, and what differs from what should be.

    Args:
        hosts: By host: `state` (fleet_state), `health` (the health agent's answers), `wanted` (the inventory's plan,
            or {"error"}), `runtime` and `weights` as the inventory has them, `drained` names; or {"unreachable": true}.

    Returns:
        {"lines": the table, "drift": how many findings, "rows": the same as data}.
    """
    rows = [row for host, seen in hosts.items() for row in _host_rows(host, seen)]
    header = ("host", "replica", "release", "model", "engine", "state", "up", "differs from the inventory")
    cells = [
        header,
        *(
            (
                row["host"],
                row["replica"] or "-",
                row["release"] or "-",
                row["model"] or "-",
                row["engine"] or "-",
                row["state"],
                uptime(row["up_seconds"]),
                "; ".join(row["drift"]) or "-",
            )
            for row in rows
        ),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header) - 1)]
    lines = [
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip() for line in cells
    ]
    drift = sum(len(row["drift"]) for row in rows)
    return {"lines": lines, "drift": drift, "rows": rows}


def _row(host: str, state: str, drift: Sequence[str], **known: Any) -> dict[str, Any]:
    row = dict.fromkeys(("replica", "release", "model", "engine", "up_seconds"))
    return {"host": host, **row, "state": state, "drift": list(drift), **known}


def _host_rows(host: str, seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    if seen.get("unreachable"):
        return [_row(host, "unreachable", ["the host does not answer"])]
    state, wanted = seen["state"], seen.get("wanted") or {}
    if wanted.get("error"):
        return [_row(host, "unknown", [f"it cannot be planned for: {wanted['error'].splitlines()[0]}"])]
    health = {answer["name"]: answer for answer in seen.get("health") or []}
    planned = {replica["name"]: replica for replica in wanted.get("replicas", ())}
    rows = []
    for name, entry in sorted(state["replicas"].items()):
        answer = health.get(name) or {}
        drift = [
            *_not_serving(entry, answer),
            *_not_current(entry, state),
            *_not_as_planned(name, entry, planned, seen),
        ]
        if name in (seen.get("drained") or ()):
            drift.append("it is drained")
        serves = {"replica": name, "release": entry["release"], "model": _model(entry["model"])}
        serves |= {"engine": entry["vllm_version"], "up_seconds": entry["up_seconds"]}
        rows.append(_row(host, answer.get("state") or entry["active"], drift, **serves))
    missing = [name for name in planned if name not in state["replicas"]]
    rows += [_row(host, "absent", ["it is planned and not there"], replica=name) for name in missing]
    return rows or [_row(host, "absent", ["nothing is deployed"])]


def _not_serving(entry: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str]:
    if entry["active"] != "active":
        return [f"its unit is {entry['active']}"]
    if answer and answer["state"] not in ("ready", "busy"):
        return [f"it is {answer['state']}: {answer['reason']}"]
    return []


def _not_current(entry: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    if entry["applied"] != entry["installed"]:
        return ["a switch was begun and not ended: run the same playbook again"]
    if entry["release"] != state["current"]:
        return [f"the host's current release is {state['current']}"]
    return []


def _not_as_planned(
    name: str, entry: Mapping[str, Any], planned: Mapping[str, Mapping[str, Any]], seen: Mapping[str, Any]
) -> list[str]:
    """What the next rollout would change, in words."""
    wanted = seen.get("wanted") or {}
    if not planned:
        return []
    if name not in planned:
        return ["the inventory does not plan it"]
    drift = [
        f"{what} is {now}, planned: {then}"
        for what, now, then in (
            ("its model", _model(entry["model"]), _model(wanted["model"])),
            ("its vLLM", entry["vllm_version"], wanted["vllm_version"]),
            ("its weights", entry["weights"], seen.get("weights")),
        )
        if then is not None and now != then
    ]
    is_now = entry["replica"] or {}
    settings = ("gpus", "cpus", "numa_nodes", "bind_address", "port", "args", "env")
    changed = [setting for setting in settings if is_now.get(setting) != planned[name].get(setting)]
    return drift or ([f"changed in the plan: {', '.join(changed)}"] if changed else [])


def _model(model: Mapping[str, Any] | None) -> str | None:
    return f"{model['served_name']} ({model['id']}@{(model.get('revision') or 'unpinned')[:8]})" if model else None


def uptime(seconds: float | None) -> str:
    """A duration as people say it: 3d4h, 5h12m, 7m, 12s."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m" if minutes else f"{whole}s"
