"""What a gateway balances over: the replicas of this run's plans, and of hosts that this run did not reach."""

from __future__ import annotations

import ipaddress
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MAX_SERVER_ID = 2**31 - 1  # HAProxy's


class GatewayError(ValueError):
    """The hosts of one gateway do not make one endpoint; the text says which and what to do."""


def backends(
    plans: Mapping[str, Mapping[str, Any]],
    previous: Mapping[str, Mapping[str, Any]],
    serves: Sequence[str],
    gateway_host: str,
) -> dict[str, dict[str, Any]]:
    """Choose each serving host's entry for a gateway.

    A host that this run planned is entered by its plan. One that this run did not
    reach (down, or outside --limit) keeps its former entry, so that it is not dropped
    from the endpoint by a deploy that never saw it. One that left the inventory goes.

    Args:
        plans: Plan (contract 3) by host name, for the hosts of this run.
        previous: What this function returned at the last deploy of this gateway.
        serves: Names of the hosts whose replicas the gateway balances over.
        gateway_host: The gateway's own name.

    Returns:
        {host: {"model": served name, "servers": [{"name", "id", "replica", "address", "port", "places"}]}}, in the order
        of `serves`. `places` is how many requests the replica works on at once. `id` is HAProxy's: a function of the
        name, so that every gateway sends a conversation to the same replica, and a host that comes or goes moves no
        other's.

    Raises:
        GatewayError: Hosts serve different model names, or a replica listens on the
            loopback address of another host.
    """
    entries = {
        host: _entry(host, plans[host]) if host in plans else dict(previous[host])
        for host in serves
        if host in plans or host in previous
    }
    models = {entry["model"] for entry in entries.values()}
    if len(models) > 1:
        listed = "; ".join(
            f"{host} serves {entry['model']}{'' if host in plans else ' (not reached in this run)'}"
            for host, entry in entries.items()
        )
        raise GatewayError(
            f"The gateway on {gateway_host} would balance over hosts that serve different models ({listed}). One "
            "endpoint answers for one model. Where a host was not reached, include it in the run or take it out of the "
            "inventory; hosts that are to serve another model need gateways of their own (model_gateway_serves)."
        )
    for host, entry in entries.items():
        for server in entry["servers"]:
            if host != gateway_host and ipaddress.ip_address(server["address"]).is_loopback:
                raise GatewayError(
                    f"Replica {server['name']} of {host} listens on {server['address']}, which the gateway on "
                    f"{gateway_host} cannot reach. Set vllm_plan_bind_address of {host} to its address on the "
                    "fleet network."
                )
    return _with_ids(entries)


def _entry(host: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": plan["model"]["served_name"],
        "servers": [
            {
                "name": f"{host}.{replica['name']}",
                "replica": replica["name"],
                "address": replica["bind_address"],
                "port": replica["port"],
                "places": replica["max_num_seqs"],
            }
            for replica in plan["replicas"]
        ],
    }


def _with_ids(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give every server its number; of two names that share a checksum, the later one takes the next."""
    ids: dict[int, str] = {}
    for name in sorted(server["name"] for entry in entries.values() for server in entry["servers"]):
        number = zlib.crc32(name.encode()) % MAX_SERVER_ID + 1
        while number in ids:
            number = number % MAX_SERVER_ID + 1
        ids[number] = name
    by_name = {name: number for number, name in ids.items()}
    return {
        host: {**entry, "servers": [{**server, "id": by_name[server["name"]]} for server in entry["servers"]]}
        for host, entry in entries.items()
    }
