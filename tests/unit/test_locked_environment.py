"""Environments made from locks by the real uv, from small wheels, with no index to ask."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from wheels import build_wheel, lock_of

from vllm_fleet.bundle import write_manifest
from vllm_fleet.target import locked_environment
from vllm_fleet.target.locked_environment import (
    EnvironmentMakingError,
    Pruning,
    Wanted,
    damaged,
    locked_packages,
    locked_size_mib,
    make,
    prunable,
    prune,
    redacted,
    settings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

REAL_UV = Path(sys.executable).parent / "uv"
LONG = "# a line of a package that is large enough to be cut\n" * 200

# Makes an environment in a process of its own, as Ansible does, so that it can be killed.
MAKE = """
import json, sys
from pathlib import Path
from vllm_fleet.target.locked_environment import Wanted, make
given = json.loads(sys.argv[1])
paths = {name: Path(given[name]) for name in ("path", "uv", "cache", "bundle")}
print(make(Wanted(**{**given, **paths}))["changed"])
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A folder as playbooks/bundle.yml makes one, with wheels of one and of two packages."""
    folder = tmp_path / "bundle"
    greeting = build_wheel(folder / "wheels", "greeting", "1.0", {"greeting.py": f"{LONG}TEXT = 'hello'\n"})
    newer = build_wheel(folder / "wheels", "greeting", "2.0", {"greeting.py": f"{LONG}TEXT = 'good day'\n"})
    common = build_wheel(folder / "wheels", "common", "1.0", {"common/__init__.py": LONG})
    (folder / "locks").mkdir()
    (folder / "locks" / "uv.txt").write_text("uv==0\n")
    (folder / "locks" / "old.txt").write_text(lock_of(greeting, common))
    (folder / "locks" / "new.txt").write_text(lock_of(newer, common))
    return folder


@pytest.fixture
def wanted(tmp_path: Path, bundle: Path) -> Wanted:
    """The older environment, with the uv of this test's own environment."""
    root = tmp_path / "runtimes"
    uv = root / "uv-0"
    (uv / "venv" / "bin").mkdir(parents=True)
    (uv / "venv" / "bin" / "uv").symlink_to(REAL_UV)
    (uv / "complete").touch()
    return Wanted(
        path=root / "vllm-old",
        lock=(bundle / "locks" / "old.txt").read_text(),
        uv=uv,
        uv_lock="uv==0\n",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        cache=root / "uv-cache",
        bundle=bundle,
        wait_seconds=60,
    )


@pytest.fixture
def instead_of_uv(wanted: Wanted) -> Callable[[str], None]:
    """Puts a shell script in uv's place; $UV is the real one."""

    def put(script: str) -> None:
        place = wanted.uv / "venv" / "bin" / "uv"
        place.unlink(missing_ok=True)
        place.write_text(f"#!/bin/bash\nUV={REAL_UV}\n{script}\n")
        place.chmod(0o755)

    return put


def other(wanted: Wanted, name: str = "new") -> Wanted:
    assert wanted.bundle
    lock = (wanted.bundle / "locks" / f"{name}.txt").read_text()
    return replace(wanted, path=wanted.path.with_name(f"vllm-{name}"), lock=lock)


def says(wanted: Wanted) -> str:
    """What the package in an environment says."""
    python = wanted.path / "venv" / "bin" / "python"
    command = [python, "-c", "import common, greeting; print(greeting.TEXT)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def start(wanted: Wanted) -> subprocess.Popen[str]:
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(wanted).items()}
    return subprocess.Popen([sys.executable, "-c", MAKE, json.dumps(given)], stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_holds_what_the_lock_names_and_a_second_run_changes_nothing(wanted: Wanted) -> None:
    assert make(wanted)["changed"] is True
    assert wanted.is_complete
    assert says(wanted) == "hello"
    installed = {path.name for path in wanted.path.glob("venv/lib/python*/site-packages/*.dist-info")}
    assert installed == {"greeting-1.0.dist-info", "common-1.0.dist-info"}
    before = (wanted.path / "complete").stat().st_mtime_ns
    assert make(wanted)["changed"] is False
    assert (wanted.path / "complete").stat().st_mtime_ns == before


def test_everyone_may_read_it_however_strict_the_installers_mask_is(wanted: Wanted) -> None:
    former = os.umask(0o077)
    try:
        make(wanted)
    finally:
        os.umask(former)
    closed = [path for path in wanted.path.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o044 != 0o044]
    assert closed == []


def test_a_wheel_that_is_not_the_locked_one_is_refused(wanted: Wanted, bundle: Path) -> None:
    build_wheel(bundle / "wheels", "greeting", "1.0", {"greeting.py": "TEXT = 'something else'\n"})
    with pytest.raises(EnvironmentMakingError, match=r"(?s)uv pip sync.*failed.*greeting"):
        make(wanted)
    assert not wanted.is_complete


def test_a_killed_uv_leaves_nothing_that_counts_and_the_next_run_finishes(
    wanted: Wanted, instead_of_uv: Callable[[str], None]
) -> None:
    instead_of_uv('[[ "$1 $2" == "pip sync" ]] && { $UV "$@"; kill -9 $$; }; exec $UV "$@"')
    with pytest.raises(EnvironmentMakingError, match=r"was killed \(signal 9\)"):
        make(wanted)
    assert not wanted.is_complete
    instead_of_uv('exec $UV "$@"')
    assert make(wanted)["changed"] is True
    assert says(wanted) == "hello"


def test_a_run_that_was_killed_is_waited_for_as_long_as_its_uv_works(
    wanted: Wanted, instead_of_uv: Callable[[str], None], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    instead_of_uv(
        f'[[ "$1 $2" == "pip sync" ]] && {{ echo start >>{log}; sleep 2; $UV "$@"; echo end >>{log}; exit; }}; '
        'exec $UV "$@"'
    )
    first = start(wanted)
    wait_for(log.exists)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not wanted.is_complete
    assert make(wanted)["changed"] is True
    assert log.read_text().split() == ["start", "end", "start", "end"]  # never two at once
    assert says(wanted) == "hello"


def test_of_two_runs_at_once_one_does_the_work(wanted: Wanted) -> None:
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: start(wanted).communicate(timeout=60)[0].strip(), range(2)))
    assert sorted(answers) == ["False", "True"]
    assert says(wanted) == "hello"


def test_a_run_that_waits_too_long_names_who_holds_the_place(
    wanted: Wanted, instead_of_uv: Callable[[str], None], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    instead_of_uv(f'[[ "$1 $2" == "pip sync" ]] && {{ echo start >>{log}; sleep 30; }}; exec $UV "$@"')
    first = start(wanted)
    try:
        wait_for(log.exists)
        with pytest.raises(EnvironmentMakingError, match=f"(?s)Another run.*process {first.pid}"):
            make(replace(wanted, wait_seconds=0))
    finally:
        subprocess.run(["pkill", "-KILL", "-P", str(first.pid)], check=False)
        first.kill()
        first.wait()


def test_files_that_lost_their_content_are_installed_anew(wanted: Wanted) -> None:
    make(other(wanted))  # fills the cache, from which the next environment is linked
    shared = other(wanted).path / f"venv/lib/python{wanted.python}/site-packages/common/__init__.py"
    with shared.open("r+") as file:
        file.truncate(100)  # as a loss of power may, in the cache too
    damage = damaged(other(wanted).path / "venv")
    assert damage == [{"package": "common", "file": f"common/__init__.py has 100 bytes of {len(LONG)}"}]
    make(wanted)
    assert damaged(wanted.path / "venv") == []
    assert (wanted.path / f"venv/lib/python{wanted.python}/site-packages/common/__init__.py").stat().st_size == len(
        LONG
    )


def test_files_that_break_again_end_in_an_error_that_names_them(
    wanted: Wanted, instead_of_uv: Callable[[str], None], tmp_path: Path
) -> None:
    files = f"{wanted.path}/venv/lib/python{wanted.python}/site-packages"
    instead_of_uv(
        f'$UV "$@" || exit; [[ "$1 $2" == "pip sync" ]] || exit 0; [[ ! -e {tmp_path}/again ]] || '
        f"rm {files}/greeting.py; touch {tmp_path}/again; rm -f {files}/common/__init__.py"
    )
    with pytest.raises(EnvironmentMakingError, match=r"wheels list: greeting: greeting.py is missing\."):
        make(wanted)
    assert not wanted.is_complete


def test_a_wheel_that_lists_sizes_its_files_never_had_is_taken_as_it_is(wanted: Wanted, bundle: Path) -> None:
    odd = build_wheel(bundle / "wheels", "odd", "1.0", {"odd.py": "X = 1\n"}, listed_sizes={"odd.py": 999})
    lock = lock_of(odd)
    (bundle / "locks" / "odd.txt").write_text(lock)
    assert make(replace(wanted, lock=lock))["changed"] is True


def test_too_little_room_is_said_before_anything_is_there(wanted: Wanted) -> None:
    lock = "# Size: 1 MiB to download, about 999999999 MiB installed.\n" + wanted.lock
    assert wanted.bundle
    (wanted.bundle / "locks" / "old.txt").write_text(lock)
    with pytest.raises(EnvironmentMakingError) as error:
        make(replace(wanted, lock=lock))
    assert f"{wanted.path} (the environment): vllm-old needs 976562.5 GiB" in str(error.value)
    assert "GiB are free" in str(error.value)
    assert not wanted.path.exists()


def test_a_cache_on_another_disk_is_checked_too(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = "# Size: 1 MiB to download, about 50 MiB installed.\n" + wanted.lock
    shm = Path("/dev/shm/vllm-fleet-test-cache")  # noqa: S108  another file system, nothing is written there
    monkeypatch.setattr(locked_environment, "free_mib", lambda path: 10 if path == shm else 1000)
    with pytest.raises(
        EnvironmentMakingError, match=r"shm/vllm-fleet-test-cache \(uv's cache\).*vllm_runtime_uv_cache"
    ):
        locked_environment.check_space(replace(wanted, lock=lock, cache=shm))
    monkeypatch.setattr(locked_environment, "free_mib", lambda _: 60)
    locked_environment.check_space(replace(wanted, lock=lock))
    monkeypatch.setenv("UV_LINK_MODE", "copy")
    with pytest.raises(EnvironmentMakingError, match=r"needs 0\.1 GiB"):
        locked_environment.check_space(replace(wanted, lock=lock))


def test_a_full_disk_is_called_one(wanted: Wanted, instead_of_uv: Callable[[str], None]) -> None:
    instead_of_uv(
        '[[ "$1 $2" == "pip sync" ]] && { echo "No space left on device (os error 28)" >&2; exit 2; }; exec $UV "$@"'
    )
    with pytest.raises(EnvironmentMakingError, match="The disk is full"):
        make(wanted)


def test_a_bundle_for_other_locks_is_refused(wanted: Wanted, bundle: Path) -> None:
    with pytest.raises(EnvironmentMakingError, match=r"made for other locks \(new.txt, old.txt, uv.txt\).*bundle.yml"):
        make(replace(wanted, lock=wanted.lock + "# another\n"))
    shutil.rmtree(bundle / "locks")
    with pytest.raises(EnvironmentMakingError, match="no folder locks/"):
        make(wanted)
    assert not wanted.path.exists()


def test_a_python_that_is_not_there_is_named_with_what_to_do(wanted: Wanted) -> None:
    with pytest.raises(EnvironmentMakingError, match=r"no Python 3.99.*bundle_python.*python has none"):
        make(replace(wanted, python="3.99"))
    with pytest.raises(EnvironmentMakingError, match=r"no Python 3.99.*vllm_runtime_python_downloads"):
        make(replace(wanted, python="3.99", bundle=None, python_downloads=False))


def test_the_bundles_python_is_used_where_the_host_has_none(
    wanted: Wanted, instead_of_uv: Callable[[str], None], bundle: Path
) -> None:
    (bundle / "python" / "cpython-3.99.1-linux-x86_64-gnu" / "bin").mkdir(parents=True)
    place = wanted.path.parent / "python" / "cpython-3.99.1-linux-x86_64-gnu" / "bin"
    # uv looks into that folder; this one knows no such Python until it is there, and then gives its own.
    instead_of_uv(
        f'if [[ "$1 $2" == "python find" ]]; then [[ $UV_PYTHON_INSTALL_DIR == {place.parents[1]} && -d {place} ]] && '
        f'echo {sys.executable} || exit 2; else exec $UV "$@"; fi'
    )
    (bundle / "python" / "cpython-3.99.1-linux-x86_64-gnu" / "bin" / "python3.99").write_text("a program\n")
    (bundle / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(EnvironmentMakingError, match=r"python3.99 is not the file that the bundle was made with"):
        make(replace(wanted, python="3.99"))
    assert not place.exists()
    write_manifest(bundle)
    assert make(replace(wanted, python="3.99"))["python"] == sys.executable


def test_addresses_with_passwords_are_in_no_argument_and_no_message(
    wanted: Wanted, instead_of_uv: Callable[[str], None], tmp_path: Path
) -> None:
    address = "https://reader:very-secret@mirror.invalid/simple"
    arguments = tmp_path / "arguments"
    instead_of_uv(
        f'echo "$@" >>{arguments}; [[ "$1 $2" == "pip sync" ]] || exec $UV "$@"; '
        'echo "error: $UV_DEFAULT_INDEX says no" >&2; exit 2'
    )
    pages = ("https://reader:very-secret@pages.invalid/wheels",)
    with pytest.raises(EnvironmentMakingError, match=r"https://\*\*\*\*@mirror.invalid/simple says no") as error:
        make(replace(wanted, bundle=None, index_url=address, find_links=pages))
    assert "very-secret" not in str(error.value)
    assert "very-secret" not in arguments.read_text()
    assert settings(replace(wanted, bundle=None, index_url=address))["PIP_INDEX_URL"] == address
    assert "PIP_INDEX_URL" not in settings(replace(wanted, index_url=address))  # a bundle asks nobody
    assert redacted("token abc at https://abc@host", ["https://abc@host"]) == "token **** at https://****@host"


def test_pruning_keeps_what_is_used_and_the_newest_of_the_rest(wanted: Wanted, tmp_path: Path) -> None:
    root = wanted.path.parent
    for age, name in enumerate(["vllm-used", "vllm-a", "vllm-b", "vllm-c", "vllm-running", "vllm-old"]):
        (root / name / "venv").mkdir(parents=True)
        (root / name / "lock.txt").touch()
        (root / name / "complete").touch()
        os.utime(root / name / "complete", (age, age))
    (root / "vllm-half" / "venv").mkdir(parents=True)
    (root / "vllm-half" / "lock.txt").touch()
    units = tmp_path / "units"
    units.mkdir()
    (units / "vllm-0.service").write_text(f"ExecStart={root}/vllm-used/venv/bin/vllm serve\n")
    processes = tmp_path / "proc"
    (processes / "7").mkdir(parents=True)
    (processes / "7" / "cmdline").write_bytes(f"{root}/vllm-running/venv/bin/python\0-m\0x\0".encode())
    pruning = Pruning(root, "vllm-old", keep=1, named_by=(f"{units}/*.service",))
    assert [path.name for path in prunable(pruning, processes)] == ["vllm-half", "vllm-a", "vllm-b"]
    assert [path.name for path in prunable(replace(pruning, keep=0), processes)] == [
        "vllm-half",
        "vllm-a",
        "vllm-b",
        "vllm-c",
    ]
    assert [path.name for path in prunable(replace(pruning, keep=9), processes)] == ["vllm-half"]


def test_pruning_frees_the_cache_of_what_no_other_environment_has(wanted: Wanted, tmp_path: Path) -> None:
    newer, caches = other(wanted), tmp_path / "caches"
    make(wanted)
    (caches / "vllm-old").mkdir(parents=True)
    make(newer)

    def cached(text: str) -> bool:
        return any(text in path.read_text() for path in wanted.cache.rglob("*.py"))

    assert cached("'hello'")
    gone = prune(Pruning(wanted.path.parent, newer.path.name, keep=0, caches=caches), newer)
    assert gone == [str(wanted.path)]
    assert not wanted.path.exists()
    assert not (caches / "vllm-old").exists()
    assert not cached("'hello'")
    assert any(path.parent.name == "common" for path in wanted.cache.rglob("__init__.py"))  # the newer one has it too
    assert says(newer) == "good day"
    assert prune(Pruning(wanted.path.parent, newer.path.name, keep=0), newer) == []


def test_a_lock_tells_its_packages_and_its_size(wanted: Wanted) -> None:
    assert locked_packages(wanted.lock) == {"common": "1.0", "greeting": "1.0"}
    assert locked_packages("Torch_Thing.x==2.13.0+cpu \\\n    --hash=sha256:0\n    # via y==1\n") == {
        "torch-thing-x": "2.13.0+cpu"
    }
    assert locked_size_mib(wanted.lock) is None
    assert locked_size_mib("# Size: 12 MiB to download, about 34 MiB installed.\n") == (12, 34)
