"""All problems of all hosts as one table: what `playbooks/doctor.yml` prints."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

WIDTH = 120
_SEVERITIES = ("error", "warning")  # in the order of the table


@dataclass(frozen=True)
class Finding:
    """One problem of one host."""

    host: str
    severity: str
    code: str
    message: str
    remedy: str

    @classmethod
    def of(cls, host: str, entry: Mapping[str, Any]) -> Self:
        """Read one entry of the `problems` of a topology."""
        return cls(host, *(str(entry.get(key, "")) for key in ("severity", "code", "message", "remedy")))


def examine(results: Mapping[str, Mapping[str, Any]]) -> tuple[Finding, ...]:
    """Collect the problems of every host: errors first, then by host.

    Args:
        results: By host what the module `gpu_topology` returned, or Ansible in its place: with `unreachable` where the
            host did not answer, without `ansible_facts` where the module did not run.
    """
    findings: list[Finding] = []
    for host, result in results.items():
        facts = result.get("ansible_facts", {}).get("gpu_topology")
        said = " ".join(str(result.get("msg") or "no message").split())
        if result.get("unreachable"):
            remedy = "Check that it is up, its address in the inventory, and SSH access."
            findings.append(Finding(host, "error", "unreachable", said, remedy))
        elif facts is None:
            remedy = "Run this again with -vvv; the probe needs Python 3.9 or later on the host, and root."
            findings.append(Finding(host, "error", "no_result", f"The probe did not run: {said}", remedy))
        else:
            findings += [Finding.of(host, entry) for entry in facts["problems"]]
    order = {severity: place for place, severity in enumerate(_SEVERITIES)}
    return tuple(sorted(findings, key=lambda found: (order.get(found.severity, len(order)), found.host)))


def render(findings: Sequence[Finding], hosts: int) -> list[str]:
    """The table as lines of at most 120 characters.

    Args:
        findings: As `examine` returns them.
        hosts: How many hosts were asked.
    """
    errors = sum(found.severity == "error" for found in findings)
    counts = {"host": hosts, "error": errors, "warning": len(findings) - errors}
    asked, *found_of = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()]
    summary = f"{asked}: {', '.join(found_of)}"
    if not findings:
        return [summary]
    names = ("host", "severity", "code")
    widths = [max(len(name), *(len(getattr(found, name)) for found in findings)) for name in names]
    left = sum(widths) + 2 * len(names)
    lines = ["  ".join([*map(str.ljust, names, widths), "message, remedy"]), "-" * WIDTH]
    for found in findings:
        start = "  ".join([*(getattr(found, name).ljust(width) for name, width in zip(names, widths, strict=True)), ""])
        room = max(WIDTH - left, 40)
        wrapped = textwrap.wrap(found.message, room) or [""]
        wrapped += textwrap.wrap(found.remedy, room, initial_indent="-> ", subsequent_indent="   ")
        lines += [(start if number == 0 else " " * left) + text for number, text in enumerate(wrapped)]
    return [*lines, "-" * WIDTH, summary]


def report(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the playbook needs: the table, and whether to fail.

    Returns:
        `lines`: the table. `errors`, `warnings`: their numbers. `findings`: the rows as data.
    """
    findings = examine(results)
    errors = sum(found.severity == "error" for found in findings)
    return {
        "lines": render(findings, len(results)),
        "errors": errors,
        "warnings": len(findings) - errors,
        "findings": [asdict(found) for found in findings],
    }
