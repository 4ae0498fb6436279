"""Prints where the processes of systemd units run and where their memory lies, by the kernel's own account.

For each unit: the distinct Cpus_allowed_list of its threads, its cgroup's CPUs, the memory policy of its mappings, and
anonymous memory by node.
"""

import json
import re
import sys
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/system.slice")

units = []
for name in sys.argv[1:]:
    cpus, policies, mib = set(), set(), {"0": 0.0, "1": 0.0}
    for pid in (CGROUPS / name / "cgroup.procs").read_text().split():
        for task in Path(f"/proc/{pid}/task").iterdir():
            cpus.add(re.search(r"Cpus_allowed_list:\s*(\S+)", (task / "status").read_text())[1])
        for mapping in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
            policies.add(mapping.split()[1])
            if " anon=" in mapping and " file=" not in mapping:
                size_kib = int(re.search(r"kernelpagesize_kB=(\d+)", mapping)[1])
                for node, pages in re.findall(r" N(\d+)=(\d+)", mapping):
                    mib[node] += int(pages) * size_kib / 1024
    units.append(
        {
            "unit": name,
            "threads_cpus": " ".join(sorted(cpus)),
            "cgroup_cpus": (CGROUPS / name / "cpuset.cpus.effective").read_text().strip(),
            "policy": " ".join(sorted(policies)),
            "anonymous_mib": {node: round(size, 1) for node, size in mib.items()},
        }
    )
print(json.dumps(units))
