"""The wheels behind a lock, as uv names them and pip brings them, and the checksums of a bundle."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import build_wheel, lock_of

from vllm_fleet import bundle

PYLOCK = """
lock-version = "1.0"
[[packages]]
name = "compiled"
version = "1.0"
wheels = [
  { url = "http://a.invalid/compiled-1.0-py3-none-any.whl", size = 1, hashes = { sha256 = "aa" } },
  { url = "http://a.invalid/compiled-1.0-cp9-abi3-linux_x86_64.manylinux1_x86_64.whl", size = 2, hashes.sha256 = "bb" },
]
[[packages]]
name = "plain"
version = "2.0"
wheels = [{ url = "https://a.invalid/plain-2.0-py3-none-any.whl", size = 20, hashes = { sha256 = "cc" } }]
"""


def test_the_compiled_wheel_is_taken_where_several_fit() -> None:
    first, second = bundle.chosen(bundle.wheels(PYLOCK))
    assert (first.sha256, first.size, first.platforms) == ("bb", 2, {"linux_x86_64", "manylinux1_x86_64"})
    assert second.requirement == "plain @ https://a.invalid/plain-2.0-py3-none-any.whl --hash=sha256:cc"


def test_a_locks_wheels_come_by_uv_and_pip_for_another_python(tmp_path: Path) -> None:
    """The real uv and a real pip, from a folder: what bundle.yml runs, for a Python that this is not."""
    source = tmp_path / "source"
    wheel = build_wheel(source, "greeting", "1.0+local", {"greeting.py": "TEXT = 'hello'\n"})
    build_wheel(source, "greeting", "2.0", {"greeting.py": "TEXT = 'not asked for'\n"})
    lock, pylock, folder = tmp_path / "lock.txt", tmp_path / "pylock.toml", tmp_path / "wheels"
    lock.write_text(lock_of(wheel))
    command = [Path(sys.executable).parent / "uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes"]
    command += [
        "--no-index",
        "--find-links",
        source,
        "--format=pylock.toml",
        "--python-version=3.13",
        "-o",
        pylock,
        lock,
    ]
    subprocess.run(command, check=True, env={**os.environ, "UV_FIND_LINKS": ""})
    subprocess.run(["/usr/bin/python3", "-m", "venv", tmp_path / "venv"], check=True)
    arguments = ["wheels", "--pip", str(tmp_path / "venv/bin/pip"), "--python=3.13", str(pylock), str(folder)]
    bundle.main(arguments)
    assert [path.name for path in folder.iterdir()] == [wheel.name]
    wheel.write_bytes(wheel.read_bytes() + b"x")  # another file under that name
    (folder / wheel.name).unlink()
    with pytest.raises(SystemExit):
        bundle.main(arguments)
    assert list(folder.iterdir()) == []


def test_the_manifest_names_every_file_and_is_written_when_one_changes(tmp_path: Path) -> None:
    model = tmp_path / "models" / "a--b" / "0"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert bundle.write_manifest(tmp_path) is True
    written = json.loads((tmp_path / "manifest.json").read_text())
    # printf '{}' | sha256sum
    sha256 = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert written == {"schema": 1, "files": {"models/a--b/0/config.json": {"sha256": sha256, "size_bytes": 2}}}
    assert bundle.write_manifest(tmp_path) is False
    (model / "config.json").write_text("[]")
    assert bundle.write_manifest(tmp_path) is True
    (model / "config.json").unlink()
    assert bundle.write_manifest(tmp_path) is True
    assert bundle.manifest_files(tmp_path) == {}


def test_a_model_is_brought_once_and_again_when_a_file_is_missing(tmp_path: Path) -> None:
    client, asked = tmp_path / "hf", tmp_path / "asked"
    client.write_text(
        f'#!/bin/sh\necho "$@" >>{asked}\nmkdir -p "$6/.cache/huggingface"\nprintf "{{}}" >"$6/config.json"\n'
    )
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    folder = tmp_path / "bundle"
    place = folder / "models" / "a--b" / "c0ffee"

    def bring() -> bool:
        changed = bundle.bring_model(str(client), "a/b", "c0ffee", folder, ["original/*"])
        bundle.write_manifest(folder)
        return changed

    assert bring() is True
    assert asked.read_text() == f"download a/b --revision c0ffee --local-dir {place} --exclude original/*\n"
    assert [path.name for path in place.iterdir()] == ["config.json"]
    assert bring() is False
    (place / "config.json").write_text("{")
    assert bring() is True
    assert bundle.bring_model(str(client), "a/b", "beef", folder) is True  # another commit
