"""What is read of a host before its driver changes: packages, locks, sources, keys, and what apt says."""

import ast
import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fleet.target.apt_view import (
    AptError,
    AptView,
    conflicting_sources,
    fingerprints,
    mirror,
    parse_simulation,
    repository_addresses,
    retired_key_files,
)
from vllm_fleet.target.driver_guard import GuardError, differences, hold, write
from vllm_fleet.target.driver_probe import (
    dpkg_state,
    is_driver_package,
    lock_holders,
    policy_origins,
    read_driver_host,
    read_repositories,
    upstream_version,
    wait_for_locks,
)
from vllm_fleet.target.driver_snapshot import Snapshot, SnapshotError

_PLUGINS = Path(__file__).parents[2] / "plugins"
Answers = dict[str, tuple[int, str, str] | str]


def answering(answers: Answers) -> Callable[[Sequence[str]], tuple[int, str, str]]:
    """A `run` that knows the answers to commands by their beginning; all others are missing programs."""

    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        line = " ".join(argv)
        for start, answer in answers.items():
            if line.startswith(start):
                return (0, answer, "") if isinstance(answer, str) else answer
        return 127, "", f"{argv[0]}: not found"

    return run


# --- packages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "upstream"),
    [
        ("580.126.09-1", "580.126.09"),
        ("580.126.09-0ubuntu0.24.04.1", "580.126.09"),
        ("550.163.01-2", "550.163.01"),
        ("595.84-1ubuntu1", "595.84"),
        ("1:580.95.05-1", "580.95.05"),
        ("2025.10.14-1", None),
        ("1.17.8-1", None),
        ("12.4.1-3", None),
        ("20240109+1", None),
        ("6.8.0-45.45+1", None),
    ],
)
def test_the_drivers_version_in_a_packages(version: str, upstream: str | None) -> None:
    assert upstream_version(version) == upstream


@pytest.mark.parametrize(
    ("name", "version", "belongs"),
    [
        ("nvidia-kernel-open-dkms", "580.126.09-1", True),
        ("libnvidia-compute-580-server", "580.126.09-0ubuntu0.24.04.1", True),
        ("libcuda1", "550.163.01-2", True),
        ("firmware-nvidia-gsp", "550.163.01-2", True),
        ("linux-modules-nvidia-580-server-open-generic", "6.8.0-45.45+1", True),
        ("nvidia-fabricmanager-580", "580.126.09-1", True),
        ("nvidia-container-toolkit", "1.17.8-1", False),
        ("libnvidia-container1", "1.17.8-1", False),
        ("nvidia-cuda-toolkit", "12.4.131~12.4.1-2", False),
        ("nvidia-modprobe", "570.133.07-1", False),
        ("nvidia-settings", "535.171.04-1", False),
        ("nvidia-kernel-common", "20240109+1", False),
        ("nvidia-driver-pinning-580", "580-1", False),
        ("libnvidia-egl-wayland1", "1:1.1.18-1", False),
        ("postgresql-17", "580.1-1", False),
    ],
)
def test_which_packages_belong_to_a_driver(name: str, version: str, *, belongs: bool) -> None:
    assert is_driver_package(name, version) is belongs


def test_dpkg_tells_holds_and_what_it_left_unfinished() -> None:
    rows = [
        "libcuda1\t580.126.09-1\tamd64\thold\tinstalled\tok",
        "nvidia-driver-cuda\t580.126.09-1\tamd64\tinstall\thalf-configured\tok",
        "nvidia-kernel-dkms\t550.163.01-2\tamd64\tdeinstall\tconfig-files\tok",
        "linux-image-amd64\t6.1.119-1\tamd64\tinstall\tinstalled\tok",
        "dkms\t3.0.10-8\tall\tinstall\tinstalled\tok",
        "bash\t5.2-1\tamd64\tinstall\tinstalled\treinstreq",
    ]
    state = dpkg_state(answering({"dpkg-query --show": "\n".join(rows)}))
    assert [(one["name"], one["held"]) for one in state["packages"]] == [
        ("libcuda1", True),
        ("nvidia-driver-cuda", False),
    ]
    assert state["kernel_packages"] == [{"name": "linux-image-amd64", "held": False}]
    assert state["tools"] == ["dkms"]
    assert state["broken"] == ["nvidia-driver-cuda: half-configured", "bash: installed, reinstreq"]


def test_apt_tells_where_a_package_came_from() -> None:
    policy = """libcuda1:
  Installed: 580.126.09-1
  Candidate: 580.126.09-1
  Version table:
     590.48.01-1 -1
        500 https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64  Packages
 *** 580.126.09-1 1001
       1001 https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64  Packages
        100 /var/lib/dpkg/status
nvidia-smi:
  Installed: 535.1-1
  Candidate: 535.1-1
  Version table:
 *** 535.1-1 100
        100 /var/lib/dpkg/status
"""
    assert policy_origins(policy) == {
        "libcuda1": "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64 ",
        "nvidia-smi": None,
    }


# --- the host -------------------------------------------------------------------------------------------------------


def test_the_holder_of_a_lock_is_named(tmp_path: Path) -> None:
    """Another process holds it: a lock of one's own is none to wait for."""
    lock = tmp_path / "var/lib/dpkg/lock-frontend"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert lock_holders(str(tmp_path)) == []
    script = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); "
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        (found,) = lock_holders(str(tmp_path))
        assert found["pid"] == holder.pid
        assert found["lock"] == "/var/lib/dpkg/lock-frontend"
        assert found["program"].startswith("python")
        assert f"pid {holder.pid}" in found["said"]
        assert len(wait_for_locks(0.01, str(tmp_path))) == 1
    finally:
        holder.kill()
        holder.wait()
    assert wait_for_locks(5, str(tmp_path)) == []


def make_host(root: Path) -> None:
    """A host's files: Debian 12 with a driver from packages, one library, sources and a snapshot."""
    files = {
        "etc/os-release": 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n',
        "etc/apt/sources.list": "deb http://deb/debian bookworm main\n# deb http://off/x /\n",
        "etc/apt/sources.list.d/cuda.list": "deb [signed-by=/k] http://nvidia/repo/ /\n",
        "etc/apt/sources.list.d/note.txt": "http://elsewhere/\n",
        "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "",
        "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.126.09": "",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n",
        "proc/sys/kernel/random/boot_id": "d7c7\n",
        "var/lib/vllm-fleet/gpu_driver/previous/manifest.json": '{"worked": true}',
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "sys").mkdir()


def test_a_host_is_read(tmp_path: Path) -> None:
    make_host(tmp_path)
    answers: Answers = {
        "dpkg-query --show": "libcuda1\t580.126.09-1\tamd64\tinstall\tinstalled\tok\n",
        "dpkg-query --search": "libnvidia-ml1: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.126.09\n",
        "dpkg --print-architecture": "amd64\n",
        "systemctl list-units": "apt-daily.timer loaded active waiting x\nvllm-minimax-m2-5-0.service loaded active "
        "running x\nvllm-gateway.service loaded active running x\n",
        "uname -r": "6.1.0-28-amd64\n",
    }
    facts = read_driver_host(
        answering(answers),
        root=str(tmp_path),
        sysfs_root=str(tmp_path / "sys"),
        procfs_root=str(tmp_path / "proc"),
        files=["/etc/apt/sources.list", "/etc/absent"],
    )
    assert facts["distribution"] == {"id": "debian", "version": "12", "codename": "bookworm", "architecture": "amd64"}
    assert facts["library"] == {"version": "580.126.09", "packaged": True}
    assert facts["loaded_version"] == "580.95.05"
    assert facts["timers"] == ["apt-daily.timer"]
    assert facts["serving"] == ["vllm-minimax-m2-5-0.service"]
    assert facts["snapshot"] == {"worked": True}
    assert facts["boot_id"] == "d7c7"
    assert facts["files"]["/etc/absent"] is None
    assert facts["files"]["/etc/apt/sources.list"].startswith("deb http://deb/debian")
    assert json.loads(json.dumps(facts)) == facts


def test_source_files_are_listed_with_what_they_name(tmp_path: Path) -> None:
    make_host(tmp_path)
    assert read_repositories(str(tmp_path)) == [
        {"file": "/etc/apt/sources.list", "uris": ["http://deb/debian"]},
        {"file": "/etc/apt/sources.list.d/cuda.list", "uris": ["http://nvidia/repo"]},
    ]


# --- a private view of apt ------------------------------------------------------------------------------------------


def test_sources_that_name_the_repository_are_replaced_or_pointed_out(tmp_path: Path) -> None:
    make_host(tmp_path)
    ours = mirror("http://nvidia/repo", "/", [], "-----BEGIN PGP PUBLIC KEY BLOCK-----", "vllm-fleet-gpu-driver")
    assert repository_addresses(ours) == ["http://nvidia/repo"]
    assert conflicting_sources(read_repositories(str(tmp_path)), ours) == ("/etc/apt/sources.list.d/cuda.list",)
    mixed = tmp_path / "etc/apt/sources.list"
    mixed.write_text("deb http://deb/debian bookworm main\ndeb http://nvidia/repo/ /\n", encoding="utf-8")
    with pytest.raises(AptError, match=r"/etc/apt/sources.list names http://nvidia/repo beside other repositories"):
        conflicting_sources(read_repositories(str(tmp_path)), ours)


def test_a_view_leaves_out_what_is_replaced_and_reads_its_own_keys(tmp_path: Path) -> None:
    make_host(tmp_path)
    ours = mirror("http://nvidia/repo", "/", [], "-----BEGIN KEY", "own").replacing(
        ["/etc/apt/sources.list.d/cuda.list"]
    )
    scratch = tmp_path / "scratch"
    view = AptView(answering({}), str(scratch), str(tmp_path))
    view.prepare(ours)
    assert sorted(path.name for path in (scratch / "sources.list.d").iterdir()) == ["note.txt", "own.sources"]
    text = (scratch / "sources.list.d/own.sources").read_text(encoding="utf-8")
    assert f"Signed-By: {scratch}/keys/own.asc" in text
    assert (scratch / "keys/own.asc").read_bytes() == b"-----BEGIN KEY"
    assert not (tmp_path / "etc/apt/keyrings").exists()  # nothing of it is the host's


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            (
                "W: GPG error: http://nvidia/repo InRelease: The following signatures couldn't be verified because the "
                "public key is not available: NO_PUBKEY A4B469963BF863CC"
            ),
            "is signed with key A4B469963BF863CC, which the keyring does not hold",
        ),
        (
            (
                "E: http://nvidia/repo InRelease: Sub-process /usr/bin/sqv returned an error code (1): "
                "Signing key on EB69 is not bound: SHA1 is not considered secure since 2026-02-01T00:00:00Z"
            ),
            "Debian 13 no longer takes",
        ),
        ("E: Failed to fetch http://nvidia/repo/InRelease  404  Not Found", "could not be fetched"),
    ],
)
def test_what_is_wrong_with_a_repository_is_said_in_a_sentence(tmp_path: Path, said: str, message: str) -> None:
    view = AptView(answering({"apt-get": (100, "", said)}), str(tmp_path))
    with pytest.raises(AptError, match=message):
        view.update(["http://nvidia/repo"])


def test_trouble_with_other_repositories_is_not_ours(tmp_path: Path) -> None:
    said = "W: GPG error: http://plex/repo InRelease: NO_PUBKEY 1234"
    AptView(answering({"apt-get": (100, "", said)}), str(tmp_path)).update(["http://nvidia/repo"])


def test_held_broken_packages_are_said_in_apts_words(tmp_path: Path) -> None:
    output = """Some packages could not be installed. This may mean that you have requested an impossible situation
The following packages have unmet dependencies:
 nvidia-driver-cuda : Depends: libcuda1 (= 580.126.09-1) but 570.211.01-1 is to be installed
"""
    answer = (100, output, "E: Unable to correct problems, you have held broken packages.\n")
    with pytest.raises(AptError, match=r"Depends: libcuda1.*held broken packages.*apt-mark showhold"):
        AptView(answering({"apt-get": answer}), str(tmp_path)).simulate(["nvidia-driver-cuda=580.126.09-1"])


def test_a_simulation_is_read() -> None:
    output = """NOTE: This is only a simulation!
Remv nvidia-kernel-dkms [550.163.01-2]
Inst firmware-nvidia-gsp [550.163.01-2] (580.126.09-1 NVIDIA CUDA:. [amd64])
Inst nvidia-kernel-open-dkms (580.126.09-1 NVIDIA CUDA:. [amd64]) []
Conf firmware-nvidia-gsp (580.126.09-1 NVIDIA CUDA:. [amd64])
"""
    assert parse_simulation(output) == {
        "install": [
            {"name": "firmware-nvidia-gsp", "from": "550.163.01-2", "to": "580.126.09-1"},
            {"name": "nvidia-kernel-open-dkms", "from": None, "to": "580.126.09-1"},
        ],
        "remove": [{"name": "nvidia-kernel-dkms", "from": "550.163.01-2"}],
    }


def test_candidates_are_those_of_the_repository_that_belong_to_a_driver(tmp_path: Path) -> None:
    def run(argv: Sequence[str]) -> tuple[int, str, str]:
        if "pkgnames" in argv:
            return 0, "libcuda1\n" if argv[-1] == "libcuda" else "", ""
        return (
            0,
            (
                "  libcuda1 | 580.126.09-1 | http://nvidia/repo  Packages\n"
                "  libcuda1 | 535.261.03-1 | http://deb/debian bookworm/non-free amd64 Packages\n"
                "nvidia-container-toolkit | 1.17.8-1 | http://nvidia/repo  Packages\n"
            ),
            "",
        )

    found = AptView(run, str(tmp_path)).candidates(["http://nvidia/repo"])
    assert found == [{"name": "libcuda1", "version": "580.126.09-1", "repository": "http://nvidia/repo"}]


# The public key packet of an ed25519 key, whose number is nought.
_KEY = base64.b64decode("mDMEZ0wxgBYJKwYBBAHaRw8BAQdAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")


def test_fingerprints_are_those_of_the_public_keys() -> None:
    body = _KEY[2 : 2 + _KEY[1]]
    expected = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()  # noqa: S324
    assert fingerprints(_KEY) == [expected]
    new_format = bytes([0xC6, len(body)]) + body
    assert fingerprints(new_format + _KEY) == [expected, expected]
    assert fingerprints(b"not a key") == []


def test_only_files_whose_every_key_is_retired_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "etc/apt/trusted.gpg.d"
    folder.mkdir(parents=True)
    (folder / "cuda.gpg").write_bytes(_KEY)
    other = bytearray(_KEY)
    other[-1] ^= 1
    (folder / "both.gpg").write_bytes(_KEY + bytes(other))
    (retired,) = fingerprints(_KEY)
    assert retired_key_files([retired], str(tmp_path)) == ["/etc/apt/trusted.gpg.d/cuda.gpg"]
    assert retired_key_files([], str(tmp_path)) == []


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_a_change_without_a_way_back_is_not_begun(tmp_path: Path) -> None:
    snapshot = Snapshot(
        answering({"sh -c": (100, "", "E: Can't find it"), "apt-get": (100, "", "")}),
        str(tmp_path / "previous"),
        str(tmp_path),
    )
    replaced: dict[str, Any] = {"install": [], "remove": [{"name": "libcuda1", "from": "570.211.01-1"}]}
    with pytest.raises(SnapshotError, match=r"libcuda1 570.211.01-1.*no way back.*Nothing was changed"):
        snapshot.save(replaced, [], worked=True)
    assert not snapshot.exists


def test_files_come_back_as_they_were_and_an_interrupted_changes_snapshot_is_kept(tmp_path: Path) -> None:
    there, absent = tmp_path / "etc/a.conf", tmp_path / "etc/b.conf"
    there.parent.mkdir()
    there.write_text("before", encoding="utf-8")
    there.chmod(0o640)
    snapshot = Snapshot(answering({}), str(tmp_path / "previous"), str(tmp_path))
    nothing: dict[str, Any] = {"install": [], "remove": []}
    snapshot.save(nothing, ["/etc/a.conf", "/etc/b.conf"], worked=True)
    there.write_text("during", encoding="utf-8")
    absent.write_text("during", encoding="utf-8")
    snapshot.save(nothing, ["/etc/a.conf", "/etc/b.conf"], worked=False)
    assert snapshot.restore() == {"differences": [], "worked": True}
    assert there.read_text(encoding="utf-8") == "before"
    assert there.stat().st_mode & 0o777 == 0o640
    assert not absent.exists()
    snapshot.drop()
    assert snapshot.restore() == {"differences": [], "worked": False}


# --- guards ---------------------------------------------------------------------------------------------------------


def test_guards_are_written_once_and_removed_where_null(tmp_path: Path) -> None:
    stale = tmp_path / "etc/kernel/postinst.d/zz-hook"
    stale.parent.mkdir(parents=True)
    stale.write_text("old", encoding="utf-8")
    wanted = {
        "/etc/modprobe.d/a.conf": "blacklist nouveau\n",
        "/etc/kernel/postinst.d/zz-hook": None,
        "/etc/gone": None,
    }
    changes = differences(wanted, str(tmp_path))
    assert [(one.path, one.before, one.after) for one in changes] == [
        ("/etc/modprobe.d/a.conf", None, "blacklist nouveau\n"),
        ("/etc/kernel/postinst.d/zz-hook", "old", None),
    ]
    write(changes, str(tmp_path))
    assert differences(wanted, str(tmp_path)) == []
    assert not stale.exists()
    assert (tmp_path / "etc/modprobe.d/a.conf").stat().st_mode & 0o777 == 0o644


def test_only_a_script_may_be_run(tmp_path: Path) -> None:
    write(differences({"/etc/hook": "#!/bin/sh\n"}, str(tmp_path)), str(tmp_path))
    assert (tmp_path / "etc/hook").stat().st_mode & 0o777 == 0o755


def test_only_free_packages_are_held() -> None:
    rows = (
        "libcuda1\t580.126.09-1\tamd64\thold\tinstalled\tok\nnvidia-smi\t580.126.09-1\tamd64\tinstall\tinstalled\tok\n"
    )
    run = answering({"dpkg-query": rows, "apt-mark hold nvidia-smi": ""})
    assert hold(run, ["libcuda1", "nvidia-smi"]) == ["nvidia-smi"]
    with pytest.raises(GuardError, match="apt-mark hold failed: E: no such"):
        hold(answering({"dpkg-query": rows, "apt-mark": (100, "", "E: no such\n")}), ["nvidia-smi"])
    assert hold(answering({"dpkg-query": rows}), ["nvidia-smi"], check=True) == ["nvidia-smi"]


# --- the modules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "module_utils/apt_view.py",
        "module_utils/driver_guard.py",
        "module_utils/driver_probe.py",
        "module_utils/driver_snapshot.py",
        "module_utils/gpu_generations.py",
        "modules/driver_facts.py",
        "modules/driver_guard.py",
        "modules/driver_packages.py",
        "modules/driver_snapshot.py",
    ],
)
def test_target_code_is_python_3_9_and_needs_only_the_standard_library(name: str) -> None:
    tree = ast.parse((_PLUGINS / name).read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0}
    foreign = {module.split(".")[0] for module in imported} - set(sys.stdlib_module_names)
    assert foreign <= ({"ansible"} if name.startswith("modules/") else set())


def test_driver_facts_documents_what_it_returns(tmp_path: Path) -> None:
    source = (_PLUGINS / "modules/driver_facts.py").read_text(encoding="utf-8")
    text = next(
        node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", "") == "RETURN"
        and isinstance(node.value, ast.Constant)
    )
    make_host(tmp_path)
    facts = read_driver_host(answering({}), root=str(tmp_path), sysfs_root=str(tmp_path / "sys"))
    assert set(yaml.safe_load(text)["facts"]["contains"]) == set(facts) - {"schema"}
