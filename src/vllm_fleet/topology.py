"""What a host has: a typed, frozen view of the `gpu_topology` fact.

Only what a plan may depend on is read. Memory in use and the processes that hold it are left out on purpose: the same
hardware always gets the same plan.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vllm_fleet.errors import BadInputError
from vllm_fleet.gpus import GpuFacts, Rates, facts_for

SCHEMA = 1
DISK_READ_MIB_S_UNKNOWN = 500.0
# Errors of the driver, not of the GPU: a plan made before the driver is set right must still count the GPU.
_MENDED_BY_DRIVER_ROLE = {"proprietary_module"}


@dataclass(frozen=True)
class Gpu:
    """One GPU. `None` means that the host could not tell."""

    index: int
    uuid: str | None
    pci_bus_id: str | None
    pci_device: str | None
    name: str
    compute_capability: str | None
    memory_total_mib: int | None
    memory_reserved_mib: int | None
    numa_nodes: tuple[int, ...]
    pcie_switches: tuple[str, ...]
    unified_memory: bool
    mig_enabled: bool
    mig_instances: int
    errors: tuple[str, ...]

    @property
    def identity(self) -> str:
        """The UUID, or the PCI bus id while no driver can name it."""
        return self.uuid or self.pci_bus_id or str(self.index)

    @property
    def numa_node(self) -> int | None:
        """The node, when it is known and only one."""
        return self.numa_nodes[0] if len(self.numa_nodes) == 1 else None

    @property
    def kind(self) -> tuple[str | None, str, str | None, int | None]:
        """What GPUs of one replica must share: PCI device, name, compute capability, memory."""
        return (self.pci_device, self.name, self.compute_capability, self.memory_total_mib)

    @property
    def rates(self) -> Rates | None:
        """What its data sheet promises, where the model is known."""
        known = facts_for(self.pci_device or "")
        return known.rates if known else None

    @property
    def generation(self) -> tuple[int, int] | None:
        """Compute capability as numbers, (12, 0) for an RTX PRO 6000."""
        if self.compute_capability is None:
            return None
        major, _, minor = self.compute_capability.partition(".")
        return (int(major), int(minor or 0))


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node. `cpus` are online, allowed and not isolated."""

    id: int
    cpus: str
    memory_total_mib: int | None
    bindable: bool


@dataclass(frozen=True)
class Topology:
    """One host. GPUs are in PCI bus order, links keyed by pairs of positions in that order, smaller first."""

    architecture: str | None
    driver_state: str
    driver_version: str | None
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    numa_nodes: Mapping[int, NumaNode]
    iommu: str
    acs_redirect: tuple[str, ...]
    p2p_verdict: str
    p2p_detail: str | None
    disk_read_mib_s: float | None

    @property
    def read_mib_s(self) -> float:
        """How fast weights are read: as measured, or what a plain SATA disk gives."""
        return self.disk_read_mib_s or DISK_READ_MIB_S_UNKNOWN

    def link(self, a: int, b: int) -> str | None:
        """The link between two GPU positions ("PIX", "SYS", "NV18"), or None when unknown."""
        return self.links.get((min(a, b), max(a, b)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "topology") -> Self:
        """Read the fact `gpu_topology`.

        Args:
            data: The fact, or a mapping that holds it under `gpu_topology` or `ansible_facts`.
            source: What error messages call the input.

        Raises:
            BadInputError: A field is missing or of the wrong kind; the message names it and the remedy.
        """
        data = _unwrap(data, source)
        if data.get("schema") != SCHEMA:
            raise BadInputError(
                f"{source}: schema is {data.get('schema')!r}, and this planner reads schema {SCHEMA}. Collect the "
                "facts again with the gpu_topology module of this version."
            )
        raw_gpus = _list(data, "gpus", source)
        # Bus order, not the order given: renumbering indices must not change a plan. A GPU without a bus id comes last.
        bus_ids = [_field(gpu, "pci_bus_id", f"{source}: gpus[{i}]") for i, gpu in enumerate(raw_gpus)]
        order = sorted(range(len(raw_gpus)), key=lambda i: (bus_ids[i] is None, bus_ids[i] or ""))
        position = {old: new for new, old in enumerate(order)}
        gpus = tuple(_gpu(raw_gpus[i], position[i], f"{source}: gpus[{i}]") for i in order)
        _check_unique(gpus, source)
        nodes = [_numa_node(n, f"{source}: numa_nodes[{i}]") for i, n in enumerate(_list(data, "numa_nodes", source))]
        driver = _mapping(data, "driver", source)
        pcie = data.get("pcie") or {}
        checks = data.get("checks") or {}
        p2p = checks.get("p2p") or {}
        return cls(
            architecture=data.get("architecture"),
            driver_state=str(_field(driver, "state", f"{source}: driver")),
            driver_version=driver.get("version"),
            gpus=gpus,
            links=_links(_mapping(data, "links", source), position, source),
            numa_nodes={n.id: n for n in nodes},
            iommu=pcie.get("iommu") or "unknown",
            acs_redirect=tuple(pcie.get("acs_redirect") or ()),
            p2p_verdict=p2p.get("verdict") or "untested",
            p2p_detail=p2p.get("detail"),
            disk_read_mib_s=checks.get("disk_read_mib_s"),
        )


def read(path: str | Path) -> dict[str, Any]:
    """Read a topology from a JSON file, or from a folder that `capture.yml` saved, or from a tar archive of one.

    Raises:
        BadInputError: Nothing is there, or it is not JSON.
    """
    path = Path(path)
    if path.is_dir() or (path.name.endswith((".tar", ".tar.gz", ".tgz")) and path.exists()):
        from vllm_fleet.target.host_probe import read_capture  # noqa: PLC0415  only a capture needs the probe

        captured: dict[str, Any] = read_capture(str(path))
        return captured
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(
            f"{path}: no such file or folder. Give the gpu_topology fact as a JSON file, or a folder saved by "
            "playbooks/capture.yml."
        ) from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: not readable as JSON ({error}). Give the gpu_topology fact as JSON.") from None
    return dict(_unwrap(data, str(path)))


def load(path: str | Path) -> Topology:
    """Read a topology file or capture folder into its typed view."""
    return Topology.from_dict(read(path), str(path))


def _unwrap(data: Any, source: str) -> Mapping[str, Any]:
    for key in ("ansible_facts", "gpu_topology"):
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    if not isinstance(data, Mapping):
        raise BadInputError(f"{source}: expected a mapping (the gpu_topology fact), found {type(data).__name__}.")
    return data


def _field(data: Any, key: str, source: str) -> Any:
    if not isinstance(data, Mapping):
        raise BadInputError(f"{source}: expected a mapping, found {type(data).__name__}. Collect the facts again.")
    if key not in data:
        raise BadInputError(
            f"{source}: the field {key!r} is missing. Collect the facts again with the gpu_topology module, which "
            "writes null for what a host cannot tell."
        )
    return data[key]


def _mapping(data: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    value = _field(data, key, source)
    if not isinstance(value, Mapping):
        raise BadInputError(f"{source}: {key} must be a mapping, found {type(value).__name__}.")
    return value


def _list(data: Mapping[str, Any], key: str, source: str) -> Sequence[Any]:
    value = _field(data, key, source)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise BadInputError(f"{source}: {key} must be a list, found {type(value).__name__}.")
    return value


def _mib(data: Mapping[str, Any], key: str, source: str) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadInputError(f"{source}: {key} must be a whole number of MiB or null, found {value!r}.")
    return value


def _gpu(data: Any, position: int, source: str) -> Gpu:
    known = facts_for(_field(data, "pci_device", source) or "") or GpuFacts(None, None, None, None)
    mig = data.get("mig") or {}
    numa_nodes = _list(data, "numa_nodes", source)
    total = _mib(data, "memory_total_mib", source)
    reserved = _mib(data, "memory_reserved_mib", source)
    if total is not None and reserved is not None and reserved >= total:
        raise BadInputError(f"{source}: memory_reserved_mib {reserved} is not less than memory_total_mib {total}.")
    name = _field(data, "name", source) or known.name
    capability = data.get("compute_capability") or known.compute_capability
    if capability is not None and not str(capability).replace(".", "", 1).isdigit():
        raise BadInputError(f"{source}: compute_capability must look like '12.0', found {capability!r}.")
    return Gpu(
        index=position if (index := _field(data, "index", source)) is None else int(index),
        uuid=_field(data, "uuid", source),
        pci_bus_id=data["pci_bus_id"],
        pci_device=data["pci_device"],
        name=str(name or f"PCI device {data['pci_device']}"),
        compute_capability=None if capability is None else str(capability),
        memory_total_mib=known.memory_total_mib if total is None else total,
        memory_reserved_mib=known.memory_reserved_mib if total is None else reserved,
        numa_nodes=tuple(int(n) for n in numa_nodes),
        pcie_switches=tuple((data.get("pcie") or {}).get("switches") or ()),
        unified_memory=bool(data.get("unified_memory")),
        mig_enabled=bool(mig.get("enabled")),
        mig_instances=len(mig.get("instances") or ()),
        errors=tuple(
            str(p.get("message") or p.get("code"))
            for p in data.get("problems") or ()
            if isinstance(p, Mapping) and p.get("severity") == "error" and p.get("code") not in _MENDED_BY_DRIVER_ROLE
        ),
    )


def _numa_node(data: Any, source: str) -> NumaNode:
    return NumaNode(
        id=int(_field(data, "id", source)),
        cpus=str(_field(data, "cpus", source) or ""),
        memory_total_mib=_mib(data, "memory_total_mib", source),
        bindable=bool(_field(data, "bindable", source)),
    )


def _links(data: Mapping[str, Any], position: Mapping[int, int], source: str) -> dict[tuple[int, int], str]:
    links = {}
    for pair, kind in data.items():
        first, _, second = str(pair).partition("-")
        try:
            a, b = sorted((position[int(first)], position[int(second)]))
        except (ValueError, KeyError):
            raise BadInputError(
                f"{source}: links has the key {pair!r}; expected two positions of `gpus`, such as '0-1'."
            ) from None
        if kind is not None:
            links[a, b] = str(kind)
    return links


def _check_unique(gpus: Sequence[Gpu], source: str) -> None:
    for what, values in (
        ("uuid", [g.uuid for g in gpus if g.uuid]),
        ("pci_bus_id", [g.pci_bus_id for g in gpus if g.pci_bus_id]),
        ("index", [str(g.index) for g in gpus]),
    ):
        if len(set(values)) != len(values):
            twice = next(v for v in values if values.count(v) > 1)
            raise BadInputError(f"{source}: two GPUs have the {what} {twice}. Collect the facts again.")
