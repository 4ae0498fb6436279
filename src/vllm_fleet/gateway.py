"""What a gateway balances over, and whether it can show clients the certificate that it was given."""

from __future__ import annotations

import datetime as dt
import ipaddress
import itertools
import zlib
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes


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
        {host: {"model": served name, "contract": what its card promises or None, "servers": [{"name", "id", "replica",
        "address", "port", "places"}]}}, in the order of `serves`. `places` is how many requests the replica works on at
        once. `id` is HAProxy's: a function of the name, so that every gateway sends a conversation to the same replica,
        and a host that comes or goes moves no other's.

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
        # A release that a host goes back to may be from before plans had one.
        "contract": plan["model"].get("contract"),
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


def certificate_problem(
    certificate_pem: str, key_pem: str, names: Sequence[str], now: dt.datetime | None = None
) -> str | None:
    """Say why clients would refuse a certificate, or HAProxy would, before it is anywhere.

    Args:
        certificate_pem: The certificate and then its chain.
        key_pem: Its private key, not encrypted.
        names: Host names and addresses that clients use.
        now: The moment to judge at; None is the present.

    Returns:
        One or two sentences with what to do, or None. No part of the key is in them.
    """
    try:
        chain = _read_chain(certificate_pem)
        _require_key(chain, _read_key(key_pem))
        _require_order(chain)
        _require_time(chain, now or dt.datetime.now(dt.UTC))
        _require_names(chain[0], names)
    except GatewayError as error:
        return str(error)
    return None


def _read_chain(text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        raise GatewayError(
            "The certificate is no PEM text with a BEGIN CERTIFICATE line. Give the certificate and then its chain."
        ) from None


def _read_key(text: str) -> PublicKeyTypes:
    try:
        return serialization.load_pem_private_key(text.encode(), password=None).public_key()
    except TypeError:
        raise GatewayError(
            "The private key is encrypted, and nobody is there to type its password. Decrypt it, and keep it in a "
            "vaulted file."
        ) from None
    except ValueError:
        raise GatewayError(
            "The private key is no PEM text with a BEGIN PRIVATE KEY line. Give the one of the certificate."
        ) from None


def _require_key(chain: Sequence[x509.Certificate], key: PublicKeyTypes) -> None:
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    keys = [link.public_key().public_bytes(*form) for link in chain]
    ours = key.public_bytes(*form)
    if ours not in keys:
        raise GatewayError(
            f"The private key does not belong to the certificate of {_subject(chain[0])}. Give the one that it was "
            "requested with."
        )
    if keys[0] != ours:
        raise GatewayError(
            f"The certificate of {_subject(chain[0])} stands before the one that the key belongs to. Put the "
            "gateway's own first, then who signed it."
        )


def _require_order(chain: Sequence[x509.Certificate]) -> None:
    for link, issuer in itertools.pairwise(chain):
        if link.issuer != issuer.subject:
            raise GatewayError(
                f"The chain is broken: after {_subject(link)} comes {_subject(issuer)}, and not its issuer "
                f"{link.issuer.rfc4514_string()}."
            )


def _require_time(chain: Sequence[x509.Certificate], now: dt.datetime) -> None:
    for link in chain:
        if now > link.not_valid_after_utc:
            raise GatewayError(
                f"The certificate of {_subject(link)} expired on {link.not_valid_after_utc:%Y-%m-%d %H:%M} UTC. "
                "Renew it."
            )
        if now < link.not_valid_before_utc:
            raise GatewayError(
                f"The certificate of {_subject(link)} is valid from {link.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on. "
                "Wait, or set the controller's clock."
            )


def _require_names(certificate: x509.Certificate, names: Sequence[str]) -> None:
    strangers = [name for name in names if not _valid_for(certificate, name)]
    if strangers:
        raise GatewayError(
            f"The certificate of {_subject(certificate)} is not valid for {', '.join(strangers)}. Give one that "
            "is, or set model_gateway_tls_names to the names that clients use."
        )


def _subject(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string()


def _valid_for(certificate: x509.Certificate, name: str) -> bool:
    """As RFC 6125 has it: the alternative names decide, and a star stands for the first label only."""
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    try:
        return ipaddress.ip_address(name) in alternatives.get_values_for_type(x509.IPAddress)
    except ValueError:
        known = [known.lower() for known in alternatives.get_values_for_type(x509.DNSName)]
        return name.lower() in known or "*." + name.lower().partition(".")[2] in known


def by_address_family(addresses: Sequence[str]) -> dict[str, list[str]]:
    """Sort addresses and networks for a firewall that keeps a set of each family.

    Args:
        addresses: IPv4 and IPv6 addresses, or networks such as 10.0.0.0/24.

    Returns:
        {"ipv4": [...], "ipv6": [...]}, sorted, each once.

    Raises:
        GatewayError: One of them is neither; a firewall does not look names up.
    """
    networks = set()
    for address in addresses:
        try:
            networks.add(ipaddress.ip_network(address, strict=False))
        except ValueError:
            raise GatewayError(
                f"{address!r} is no address and no network, and a firewall does not look names up. Set "
                "vllm_plan_bind_address of the gateways to their addresses on the fleet network, or "
                "replica_firewall_sources to a list of addresses."
            ) from None
    of_4 = sorted(network for network in networks if isinstance(network, ipaddress.IPv4Network))
    of_6 = sorted(network for network in networks if isinstance(network, ipaddress.IPv6Network))
    return {"ipv4": [_shortest(network) for network in of_4], "ipv6": [_shortest(network) for network in of_6]}


def _shortest(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> str:
    return str(network.network_address if network.num_addresses == 1 else network)
