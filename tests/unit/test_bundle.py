"""The wheels behind a lock, as uv names them and pip brings them, and the checksums of a bundle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, MODEL, HubServer
from wheels import build_wheel, lock_of

from vllm_fleet import bundle
from vllm_fleet.target.weights.files import MANIFEST, Manifest

HF = shutil.which("hf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

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


def test_a_model_is_brought_once_verified_and_mended_when_a_file_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    place = folder / "models" / "org--tiny" / COMMIT

    with HubServer() as hub:
        arguments = ["model", f"--hf={HF}", f"--endpoint={hub.url}", "--leave-out=original/*", MODEL, COMMIT]

        def bring() -> None:
            bundle.main([*arguments, str(folder)])
            bundle.write_manifest(folder)

        bring()
        assert {name: (place / name).read_bytes() for name in hub.files} == hub.files
        assert Manifest.read(place / MANIFEST).compared == "publisher"
        contents = hub.asked("content")
        bring()
        assert hub.asked("content") == contents
        (place / "config.json").unlink()
        bring()
        assert (place / "config.json").read_bytes() == hub.files["config.json"]
        assert bundle.write_manifest(folder) is False


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    token = tmp_path / "no-token"
    with pytest.raises(SystemExit) as ended:
        bundle.main(
            ["model", f"--hf={HF}", "--endpoint=http://a", f"--token-file={token}", MODEL, COMMIT, str(tmp_path)]
        )
    assert str(token) in str(ended.value)


def test_a_model_that_cannot_be_had_is_refused_in_one_paragraph(tmp_path: Path) -> None:
    with HubServer() as hub, pytest.raises(SystemExit) as ended:
        bundle.main(["model", f"--hf={HF}", f"--endpoint={hub.url}", MODEL, "f" * 40, str(tmp_path)])
    assert MODEL in str(ended.value)
    assert "\n" not in str(ended.value)
