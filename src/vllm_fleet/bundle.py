"""The wheels behind a lock, and the folder that carries them into a network without an index.

uv knows where each wheel of a lock lies, how large it is and which of them fit a host: it writes that as a pylock.toml
(packaging specifications, "pylock.toml specification"). pip downloads them, for another Python or architecture too.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vllm_fleet.target.weights import files as weights
from vllm_fleet.target.weights.job import Report, run
from vllm_fleet.target.weights.sources import Job

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """One file of a lock: where it lies, its size in bytes (0: not known) and its hash."""

    package: str
    url: str
    size: int
    sha256: str

    @property
    def platforms(self) -> set[str]:
        """Platform tags in the file's name (packaging specifications, "File name convention")."""
        return set(unquote(self.url).removesuffix(".whl").rsplit("-", 1)[1].split("."))

    @property
    def requirement(self) -> str:
        """As pip takes it."""
        return f"{self.package} @ {self.url} --hash=sha256:{self.sha256}"


def wheels(pylock: str) -> list[list[Wheel]]:
    """Read a pylock.toml: for each package the wheels that fit the host it was made for."""
    return [
        [_wheel(package["name"], entry) for entry in package["wheels"]] for package in tomllib.loads(pylock)["packages"]
    ]


def _wheel(package: str, entry: dict[str, Any]) -> Wheel:
    """A wheel of a local folder has a path, and no size."""
    url = entry.get("url") or Path(entry["path"]).absolute().as_uri()
    local = Path(unquote(urlsplit(url).path))
    size = entry.get("size") or (local.stat().st_size if url.startswith("file:") and local.exists() else 0)
    return Wheel(package, url, size, entry["hashes"]["sha256"])


def chosen(choices: Iterable[list[Wheel]]) -> list[Wheel]:
    """One wheel of each package: the largest of those that fit, since that is the compiled one."""
    return [max(fitting, key=lambda wheel: wheel.size) for fitting in choices]


def download(pip: str, python: str, folder: Path, wanted: Iterable[Wheel]) -> None:
    """Download wheels for a Python version ("3.12") into `folder`; those that are there stay.

    Raises:
        subprocess.CalledProcessError: pip's message is on standard error.
    """
    wanted = list(wanted)
    platforms = sorted({tag for wheel in wanted for tag in wheel.platforms} - {"any"})
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("".join(f"{wheel.requirement}\n" for wheel in wanted))
        requirements.flush()
        command = [pip, "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        command += [f"--python-version={python}", *(f"--platform={tag}" for tag in platforms)]
        subprocess.run([*command, f"--dest={folder}", f"--requirement={requirements.name}"], check=True)


def bring_model(
    hf: str,
    endpoint: str,
    repository: str,
    commit: str,
    folder: Path,
    *,
    token_file: Path | None = None,
    leave_out: Iterable[str] = (),
) -> bool:
    """Bring a repository at a commit into a bundle; whether anything was missing.

    By the job that brings models to hosts: resumed, watched, and held against the repository's checksums.

    Args:
        hf: The client that transfers.
        endpoint: The server that has the repository.
        repository: Its name.
        commit: Its commit.
        folder: The bundle.
        token_file: A file that holds the token which the server asks for.
        leave_out: Patterns of files.

    Raises:
        WeightsError: It cannot be done; what was verified until then is kept.
    """
    place = folder / "models" / repository.replace("/", "--") / commit
    manifest = place / weights.MANIFEST
    place.mkdir(parents=True, exist_ok=True)
    before = manifest.read_bytes() if manifest.exists() else b""
    options: dict[str, Any] = {"hf": hf, "endpoint": endpoint, "exclude": list(leave_out)}
    with tempfile.TemporaryDirectory() as home:
        run(
            Job(kind="hub", id=repository, commit=commit, folder=str(place), manifest=str(manifest), **options),
            Report(),
            token_file=token_file,
            home=Path(home),
        )
    return manifest.read_bytes() != before


def manifest_files(folder: Path) -> dict[str, dict[str, Any]]:
    """{path in the bundle: {sha256, size_bytes}} of a bundle's manifest; empty where there is none."""
    manifest = folder / MANIFEST
    return dict(json.loads(manifest.read_text(encoding="utf-8"))["files"]) if manifest.exists() else {}


def write_manifest(folder: Path) -> bool:
    """Write the size and SHA-256 of every file of a bundle; whether that changed anything.

    A file that has kept its size and is older than the manifest is not read again: models are hundreds of GB.
    """
    manifest = folder / MANIFEST
    known, files = manifest_files(folder), {}
    written = manifest.stat().st_mtime_ns if known else 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest):
        name, status = path.relative_to(folder).as_posix(), path.stat()
        entry = known.get(name)
        if entry is None or entry["size_bytes"] != status.st_size or status.st_mtime_ns >= written:
            entry = {"sha256": sha256_of(path), "size_bytes": status.st_size}
        files[name] = entry
    if files == known:
        return False
    draft = manifest.with_suffix(".draft")
    draft.write_text(json.dumps({"schema": 1, "files": files}, indent=1) + "\n", encoding="utf-8")
    draft.rename(manifest)
    return True


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _run(options: argparse.Namespace) -> bool:
    if options.command == "manifest":
        return write_manifest(options.folder)
    if options.command == "model":
        return bring_model(
            options.hf,
            options.endpoint,
            options.repository,
            options.commit,
            options.folder,
            token_file=options.token_file,
            leave_out=options.leave_out,
        )
    before = set(options.folder.glob("*.whl"))
    wanted = chosen(wheels(options.pylock.read_text(encoding="utf-8")))
    download(options.pip, options.python, options.folder, wanted)
    return set(options.folder.glob("*.whl")) != before


def main(arguments: list[str] | None = None) -> None:
    """Print what was done: `changed` or `unchanged`."""
    parser = argparse.ArgumentParser(prog="python -m vllm_fleet.bundle", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("wheels", help="download the wheels of a pylock.toml")
    fetch.add_argument("--pip", required=True)
    fetch.add_argument("--python", required=True, help='version of the hosts\' Python, such as "3.12"')
    fetch.add_argument("pylock", type=Path)
    fetch.add_argument("folder", type=Path)
    model = commands.add_parser("model", help="download a model's files")
    model.add_argument("--hf", required=True)
    model.add_argument("--endpoint", required=True, help="address of the server")
    model.add_argument("--token-file", type=Path, help="holds the token that the server asks for")
    model.add_argument("--leave-out", action="append", default=[], help="pattern of files")
    model.add_argument("repository")
    model.add_argument("commit")
    model.add_argument("folder", type=Path)
    manifest = commands.add_parser("manifest", help="write the checksums of a bundle")
    manifest.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        changed = _run(options)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the program that failed has said why
    except weights.WeightsError as error:
        sys.exit(str(error))
    except OSError as error:  # such as a disk that is full, or a token's file that is not there
        sys.exit(f"{options.folder}: {error}. What was verified is kept; mend that, and run the same again.")
    print("changed" if changed else "unchanged")  # noqa: T201  this is how it answers


if __name__ == "__main__":
    main()
