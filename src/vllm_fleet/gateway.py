"""What a gateway balances over: the replicas of this run's plans, and of hosts that this run did not reach."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
        {host: {"model": served name, "servers": [{"name", "address", "port"}]}}, in the order of `serves`.

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
    return entries


def _entry(host: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": plan["model"]["served_name"],
        "servers": [
            {"name": f"{host}.{replica['name']}", "address": replica["bind_address"], "port": replica["port"]}
            for replica in plan["replicas"]
        ],
    }
