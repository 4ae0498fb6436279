"""What earlier tests on a host found, and whether it still holds: the file that the checks leave for the probe.

A verdict holds under the circumstances that it was measured under. Another set of GPUs, another driver, or for
transfers another IOMMU mode or PCIe ACS state make it say nothing about the host as it is now: it then counts as
untested, and the next deploy tests again.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

from typing import Any, Optional

from .gpu_topology import Problem, problem

__all__ = ["UNTESTED", "circumstances", "command", "due", "hold_against", "summary", "usable"]

UNTESTED: dict[str, Any] = {
    "p2p": {"verdict": "untested", "detail": None},
    "disk_read_mib_s": None,
    "kernel_build": {"verdict": "untested", "detail": None},
}

# What must be as it was for a verdict to hold, and how to say that it is not.
_DEPENDS_ON = {
    "p2p": {
        "gpus": "the host has other GPUs",
        "driver": "the driver is another",
        "iommu": "the IOMMU mode is another",
        "acs_redirect": "other bridges redirect transfers (PCIe ACS)",
        "runtime": "the environment is another",
    },
    "kernel_build": {
        "gpus": "the host has other GPUs",
        "driver": "the driver is another",
        "runtime": "the environment is another",
    },
}
_DEPLOY = "Deploy again: what was not tested under the present circumstances is tested then."
_REMEDIES = {
    "p2p": "See docs/tuning.md: IOMMU to passthrough, ACS redirection off, Resizable BAR on. Until then the plan sends "
    "NCCL through host memory.",
    "kernel_build": "The engine builds kernels at its first start and would fail there: docs/tuning.md says where the "
    "compiler comes from.",
}


def circumstances(topology: dict[str, Any], boot_id: Optional[str], runtime: Optional[str] = None) -> dict[str, Any]:
    """What a verdict is measured under.

    Args:
        topology: The fact `gpu_topology`.
        boot_id: The kernel's id of this boot, None when unknown.
        runtime: Name of the engine's environment, None for whoever does not know it.
    """
    pcie = topology["pcie"]
    return {
        "gpus": sorted(str(gpu["uuid"]) for gpu in topology["gpus"]),
        "driver": topology["driver"]["version"],
        "iommu": pcie["iommu"],
        "acs_redirect": pcie["acs_redirect"],
        "boot_id": boot_id,
        "runtime": runtime,
    }


def _changed(name: str, measured: dict[str, Any], now: dict[str, Any]) -> Optional[str]:
    """Why a verdict does not hold any more, None when it does.

    A value that is unknown on one side says nothing, but ACS: which bridges redirect can change at each boot, so there
    unknown counts as changed once the boot is another.
    """
    booted = None not in (measured.get("boot_id"), now["boot_id"]) and measured["boot_id"] != now["boot_id"]
    for key, words in _DEPENDS_ON[name].items():
        then, today = measured.get(key), now[key]
        if None in (then, today):
            if key == "acs_redirect" and booted:
                return "the host was booted, and whether ACS redirects is unknown"
        elif then != today:
            return words
    return None


def hold_against(checks: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """What of the saved checks holds now, and what is wrong with the host by them.

    Args:
        checks: The saved file's content; a verdict without its circumstances is taken as it stands.
        now: See `circumstances`.
    """
    found: list[Problem] = []
    held = {**UNTESTED, **checks}
    for name, remedy in _REMEDIES.items():
        saved = held[name]
        if not isinstance(saved, dict) or "verdict" not in saved:
            held[name] = UNTESTED[name]
            continue
        why = _changed(name, saved.get("measured_under") or {}, now)
        if why and saved["verdict"] != "untested":
            said = f"{saved['verdict']} when it was last tested, but {why} since"
            held[name] = {"verdict": "untested", "detail": said}
            found.append(problem("warning", "check_outdated", f"{_title(name)}: {said}; untested now.", _DEPLOY))
        elif saved["verdict"] == "broken":
            severity = "warning" if name == "p2p" else "error"
            found.append(problem(severity, f"{name}_broken", f"{_title(name)}: broken: {saved['detail']}.", remedy))
            fallback = saved.get("fallback") or {}
            if fallback.get("verdict") == "broken":
                message = f"Transfers through host memory are broken too: {fallback['detail']}."
                cure = "No replica of more than one GPU can work here: reboot, then look at the cards and the IOMMU."
                found.append(problem("error", "p2p_fallback_broken", message, cure))
    return held, found


def _title(name: str) -> str:
    return {"p2p": "Peer-to-peer transfers", "kernel_build": "Building kernels"}[name]


def due(name: str, checks: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether to test (again): never tested, outdated, or broken at an earlier boot, which may have mended it."""
    saved = checks.get(name)
    if not isinstance(saved, dict) or saved.get("verdict") not in ("ok", "broken"):
        return True
    measured = saved.get("measured_under") or {}
    rebooted = measured.get("boot_id") != now["boot_id"]
    return _changed(name, measured, now) is not None or (saved["verdict"] == "broken" and rebooted)


# --- testing anew ---------------------------------------------------------------------------------------------------

_START_SECONDS = 180
_COMPILING = 5  # how much longer than a transfer a step of the build may take

# What the engine's unit may and may not do (roles/vllm_service). Its user is taken where it is there already.
_PROPERTIES = {
    "DynamicUser": "yes",
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "LimitMEMLOCK": "infinity",
    "TimeoutStopSec": "10",
}


def usable(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole GPUs that the driver sees; those in MIG mode or lost would only fail."""
    return [
        gpu
        for gpu in gpus
        if gpu["uuid"]
        and not gpu["mig"]["enabled"]
        and not any(entry["severity"] == "error" for entry in gpu["problems"])
    ]


def command(check: str, gpus: list[dict[str, Any]], given: dict[str, Any]) -> list[str]:
    """A check as a command: in a transient unit that may do what the engine's may, and that ends in any case.

    Args:
        check: `p2p` or `kernel_build`.
        gpus: GPUs of the topology to try.
        given: Parameters of the module `gpu_checks`.
    """
    environment, cuda_home = given["environment"], given["cuda_home"]
    step_seconds = given["step_seconds"] * (_COMPILING if check == "kernel_build" else 1)
    at_most = 2 * (_START_SECONDS + given["total_seconds"]) + 60  # transfers are tried twice, the second time apart
    properties = {**_PROPERTIES, "User": given["user"], "RuntimeMaxSec": at_most}
    variables = {
        "PATH": f"{environment}/venv/bin:{cuda_home}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "CUDA_HOME": cuda_home,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu["uuid"] for gpu in gpus),
        "HOME": "/tmp",  # noqa: S108  (private to the unit)
        "USER": given["user"],
        "NCCL_IB_DISABLE": "1",
    }
    name = check.replace("_", "-")
    words = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--service-type=exec"]
    words += [f"--unit=vllm-fleet-check-{name}"]
    words += [f"--property={key}={value}" for key, value in properties.items()]
    words += [f"--setenv={key}={value}" for key, value in variables.items()]
    words += [f"{environment}/venv/bin/python", given["script"], name, f"--start-seconds={_START_SECONDS}"]
    words += [f"--step-seconds={step_seconds}", f"--total-seconds={given['total_seconds']}"]
    if check == "p2p":
        words += [f"--device=cuda:{index}" for index in range(len(gpus))]
        return words + [f"--name=GPU {gpu['pci_bus_id'] or gpu['uuid']}" for gpu in gpus]
    capabilities = {gpu["compute_capability"] for gpu in gpus if gpu["compute_capability"]}
    return words + [f"--capability={capability}" for capability in sorted(capabilities)]


def summary(checks: dict[str, Any]) -> list[str]:
    """The saved checks in one line each."""
    fallback = (checks.get("p2p") or {}).get("fallback")
    verdicts = [
        ("peer-to-peer transfers", checks.get("p2p")),
        ("transfers through host memory", fallback),
        ("building kernels", checks.get("kernel_build")),
    ]
    lines = [f"{name}: {result['verdict']}: {result['detail']}" for name, result in verdicts if result]
    disk = checks.get("disk_read")
    return lines + ([f"reading weights: {checks.get('disk_read_mib_s')} MiB/s: {disk['detail']}"] if disk else [])
