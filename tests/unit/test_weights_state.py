"""A look at a model's folder: verified or not, usable or not, what may go."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path

import pytest

from vllm_fleet.target.weights import state
from vllm_fleet.target.weights.files import MANIFEST, Manifest, WeightsError, digest, gib, manifest_path, safe_name

ID, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}',
    "model-1.safetensors": b"weights",
    "code/modeling_tiny.py": b"import torch\n",
}


def verified(folder: Path, manifest: Path | None = None, **changed: object) -> Manifest:
    """Make a folder as a job leaves it."""
    result = Manifest(id=ID, commit=COMMIT, compared="publisher", complete=True)
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        result.add(name, digest(path))
    for name, value in changed.items():
        setattr(result, name, value)
    (manifest or folder / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
    result.write(manifest or folder / MANIFEST)
    return result


def look(folder: Path, manifest: Path | None = None, exclude: tuple[str, ...] = ()) -> state.Look:
    return state.look(folder, manifest or folder / MANIFEST, repository=ID, commit=COMMIT, exclude=list(exclude))


def test_what_was_verified_is_told_in_a_sentence(tmp_path: Path) -> None:
    verified(tmp_path)
    seen = look(tmp_path)
    assert seen.verified
    assert seen.summary("/srv/m") == (
        "/srv/m: 4 files, 66 bytes, compared with the repository's own checksums. Python files, not run unless the "
        "card lists them: code/modeling_tiny.py."
    )


def test_every_difference_is_noticed(tmp_path: Path) -> None:
    verified(tmp_path)
    (tmp_path / "config.json").unlink()
    os.utime(tmp_path / "model-1.safetensors", ns=(1, 1))
    (tmp_path / "tokenizer.json").touch()
    seen = look(tmp_path)
    assert not seen.verified
    assert seen.why == ("config.json missing; model-1.safetensors changed since verified; tokenizer.json added since")


def test_a_longer_file_of_the_same_time_is_noticed(tmp_path: Path) -> None:
    verified(tmp_path)
    path = tmp_path / "config.json"
    before = path.stat()
    path.write_bytes(b"{} ")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert look(tmp_path).why == "config.json changed since verified"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"complete": False}, "begun, 4 files verified so far"),
        ({"commit": "f" * 40}, f"verified as org/tiny at {'f' * 40}"),
        ({"exclude": ["*.md"]}, "verified with other model_weights_exclude"),
    ],
)
def test_another_manifest_verifies_nothing(tmp_path: Path, changed: dict[str, object], why: str) -> None:
    verified(tmp_path, **changed)
    assert look(tmp_path).why == why


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "unknown": 1}'])
def test_a_manifest_that_is_not_whole_counts_as_none(tmp_path: Path, text: str) -> None:
    verified(tmp_path)
    (tmp_path / MANIFEST).write_text(text)
    assert look(tmp_path).why == "not verified yet"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert look(tmp_path / "none").why == "not there yet"


def test_a_shared_folder_is_taken_by_the_manifest_of_the_host_that_filled_it(tmp_path: Path) -> None:
    verified(tmp_path / "nfs")
    record = manifest_path(str(tmp_path / "nfs"), str(tmp_path), in_place=True)
    assert look(tmp_path / "nfs", record).verified
    (tmp_path / "nfs/config.json").write_bytes(b"[]")
    assert not look(tmp_path / "nfs", record).verified


def test_links_as_in_a_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1").write_bytes(b"{}")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to("../blobs/1")
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/gone")
    assert list(look(tmp_path / "snapshot").found) == ["config.json"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "it holds no model file, and config.json"),
        (["config.json", "a.bin"], "it holds config.json, and config.json with"),
        (["a.safetensors"], "it holds a.safetensors"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, names: list[str], told: str) -> None:
    with pytest.raises(WeightsError, match=f"{told}.*Set model_weights_folder"):
        state.require_model(tmp_path, names, ID)


def test_files_that_the_index_names_and_nobody_brought(tmp_path: Path) -> None:
    verified(tmp_path)
    state.require_model(tmp_path, list(FILES), ID)
    with pytest.raises(WeightsError, match=r"incomplete.*not there: model-1\.safetensors\."):
        state.require_model(tmp_path, [*(set(FILES) - {"model-1.safetensors"}), "model-2.safetensors"], ID)
    (tmp_path / "model.safetensors.index.json").write_text("<html>")
    with pytest.raises(WeightsError, match="cannot be read"):
        state.require_model(tmp_path, list(FILES), ID)


def test_files_are_really_opened_as_the_engines_user(tmp_path: Path) -> None:
    """Root may read anything, the engine's user may not: a mode that looks right to root proves nothing."""
    verified(tmp_path)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    paths = [str(tmp_path / name) for name in FILES]
    assert state.unreadable(paths, "no-such-user-yet") == []
    (tmp_path / "config.json").chmod(0)
    (tmp_path / "code").chmod(0)
    refused = dict(state.unreadable(paths, "no-such-user-yet"))
    (tmp_path / "code").chmod(0o755)
    assert refused == {
        str(tmp_path / "config.json"): "Permission denied",
        str(tmp_path / "code/modeling_tiny.py"): f"Permission denied, it may not pass through {tmp_path}/code",
    }


@pytest.mark.parametrize(
    ("folder", "setting"),
    [("/home/me/m", "ProtectHome="), ("/root", "ProtectHome="), ("/tmp/m", "PrivateTmp=")],  # noqa: S108
)
def test_places_that_the_units_hide_are_refused(folder: str, setting: str) -> None:
    with pytest.raises(WeightsError, match=rf"cannot see \({setting}\)"):
        state.require_usable(Path(folder), [], "vllm")


def test_code_runs_only_as_it_was_reviewed(tmp_path: Path) -> None:
    verified(tmp_path)
    seen = look(tmp_path)
    sha256 = hashlib.sha256(FILES["code/modeling_tiny.py"]).hexdigest()
    state.require_reviewed(seen, {})  # none is run
    state.require_reviewed(seen, {"code/modeling_tiny.py": sha256})
    for allowed in ({"code/modeling_tiny.py": "0" * 64}, {"modeling_tiny.py": sha256}):
        with pytest.raises(WeightsError, match=r"does not allow: code/modeling_tiny\.py"):
            state.require_reviewed(seen, allowed)


def test_former_downloads_go_but_never_one_in_use(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    downloads = {}
    for age, name in enumerate(["now", "newest", "older", "oldest", "used", "busy"]):
        downloads[name] = root / "org--tiny" / name
        verified(downloads[name])
        os.utime(downloads[name] / MANIFEST, (time.time() - age, time.time() - age))
    (root / "org--tiny/mine").mkdir()  # no download of ours
    units = tmp_path / "units"
    units.mkdir()
    (units / "vllm-a.service").write_text(f"ExecStart=vllm serve {downloads['used']} --port 1\n")
    with (downloads["busy"] / f"{MANIFEST}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        going = state.prunable(root, downloads["now"], 1, [f"{units}/*.service"])
    assert going == [downloads["older"], downloads["oldest"]]
    for folder in going:
        state.remove(folder)
    assert sorted(path.name for path in root.glob("*/*")) == ["busy", "mine", "newest", "now", "used"]


@pytest.mark.parametrize("name", ["config.json", "a/b.safetensors", "a..b", ".gitattributes", "ü.txt"])
def test_ordinary_names_are_safe(name: str) -> None:
    assert safe_name(name)


@pytest.mark.parametrize(
    ("size", "written"), [(0, "0 bytes"), (1536, "1.5 KiB"), (5 * 1024**2, "5.0 MiB"), (230_103_924_736, "214.3 GiB")]
)
def test_sizes_are_written_for_people(size: int, written: str) -> None:
    assert gib(size) == written
