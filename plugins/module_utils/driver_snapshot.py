"""Keeps what a driver change replaces, and puts it back: packages, holds and files as they were.

A snapshot is a folder that outlives the play, so an interrupted change is taken back by the next run or by hand.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any, Optional, Sequence

from .driver_probe import dpkg_state
from .kernel_modules import Run, probe_kernels

__all__ = ["Snapshot", "SnapshotError"]

_INSTALLED = "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"


class SnapshotError(Exception):
    """The former driver could not be kept or put back: one paragraph."""


class Snapshot:
    """One snapshot.

    Args:
        run: Runs a command, returns exit code, output and error text.
        folder: Where it is kept.
        root: Where the host's file system is.
        apt_options: Options of apt-get by which it knows more sources than the host's.
    """

    def __init__(self, run: Run, folder: str, root: str = "/", apt_options: Sequence[str] = ()) -> None:
        """Name the folder; `save` makes it."""
        self._run = run
        self._apt = ["apt-get", *apt_options, "--quiet"]
        self._folder = Path(folder)
        self._root = Path(root)
        self._manifest = self._folder / "manifest.json"

    @property
    def exists(self) -> bool:
        """Whether a change is under way, or was interrupted."""
        return self._manifest.is_file()

    def save(self, transaction: dict[str, Any], files: Sequence[str], *, worked: bool) -> dict[str, Any]:
        """Keep the packages that a transaction replaces or removes, the driver's holds, and files.

        Args:
            transaction: `install` and `remove` records as apt's simulation gives them.
            files: Paths that the change may write or remove.
            worked: Whether the driver works now.

        Raises:
            SnapshotError: A package can neither be fetched again nor packed from what is installed.
        """
        if self.exists:  # of an interrupted change: what it kept is the state to go back to
            return self._read()
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / "packages").mkdir(parents=True, mode=0o700)
        replaced = [record for record in transaction["install"] + transaction["remove"] if record["from"]]
        for record in replaced:
            self._keep(record["name"], record["from"])
        state = dpkg_state(self._run)
        kept: dict[str, Any] = {
            "worked": worked,
            "replaced": [{"name": record["name"], "version": record["from"]} for record in replaced],
            "added": [record["name"] for record in transaction["install"] if not record["from"]],
            "driver": {package["name"]: package["version"] for package in state["packages"]},
            "held": [package["name"] for package in state["packages"] + state["kernel_packages"] if package["held"]],
            "modules": self._modules(),
            "files": {path: self._file(path) for path in files},
        }
        # Written last, under another name first: half a manifest must not look like one.
        draft = self._manifest.with_suffix(".new")
        draft.write_text(json.dumps(kept), encoding="utf-8")
        os.replace(draft, self._manifest)  # noqa: PTH105  (atomic, and says so)
        return kept

    def restore(self) -> dict[str, Any]:
        """Put everything back.

        Returns:
            `differences`: what is still other than before, in sentences; empty when all is as it was. `worked`: whether
            the driver worked then. Without a snapshot nothing was changed yet, and nothing is done.
        """
        if not self.exists:
            return {"differences": [], "worked": False}
        kept = self._read()
        for path, content in kept["files"].items():
            self._write(path, content)
        packages = sorted(str(path) for path in (self._folder / "packages").glob("*.deb"))
        self._install(packages, self._present(kept["added"]))
        state = dpkg_state(self._run)
        held = {package["name"] for package in state["packages"] + state["kernel_packages"] if package["held"]}
        for action, names in (("hold", set(kept["held"]) - held), ("unhold", held - set(kept["held"]))):
            if names:
                self._run(["apt-mark", action, *sorted(names)])
        self._rebuild_initramfs()
        return {"differences": self._differences(kept), "worked": kept["worked"]}

    def drop(self) -> None:
        """The change is done: nothing to go back to."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads(self._manifest.read_text(encoding="utf-8"))
        return kept

    def _keep(self, name: str, version: str) -> None:
        """Fetch the package again, or pack what is installed."""
        folder = self._folder / "packages"
        before = set(folder.glob("*.deb"))
        command = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(folder)]
        code, _, error = self._run([*command, *self._apt, "download", f"{name}={version}"])
        if code == 0 and set(folder.glob("*.deb")) - before:
            return
        if not _program("dpkg-repack"):
            self._run([*self._apt, "--assume-yes", "--no-install-recommends", "install", "dpkg-repack"])
        code, _, repack_error = self._run([*command, "dpkg-repack", name])
        if code != 0 or not set(folder.glob("*.deb")) - before:
            raise SnapshotError(
                f"{name} {version}, which the change replaces, could not be kept, so there would be no way back: no "
                f"source has it any more ({_line(error)}), and it cannot be packed from what is installed "
                f"({_line(repack_error)}). Install dpkg-repack, or put the package into a repository. Nothing was "
                "changed."
            )

    def _modules(self) -> dict[str, Optional[str]]:
        kernels = probe_kernels(self._run, str(self._root))["kernels"]
        return {kernel["release"]: (kernel["nvidia"] or {}).get("version") for kernel in kernels}

    def _file(self, path: str) -> Optional[dict[str, Any]]:
        place = self._root / path.lstrip("/")
        try:
            return {
                "content": base64.b64encode(place.read_bytes()).decode(),
                "mode": place.stat().st_mode & 0o7777,
            }
        except OSError:
            return None

    def _write(self, path: str, content: Optional[dict[str, Any]]) -> None:
        place = self._root / path.lstrip("/")
        if content is None:
            place.unlink(missing_ok=True)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(base64.b64decode(content["content"]))
        place.chmod(content["mode"])

    def _present(self, names: Sequence[str]) -> list[str]:
        """Those of the packages that dpkg has in any state."""
        plain = [name.partition(":")[0] for name in names]
        if not plain:
            return []
        _, output, _ = self._run(["dpkg-query", "--show", "--showformat", _INSTALLED, *plain])
        rows = (line.split("\t") for line in output.splitlines())
        return sorted({row[1] for row in rows if len(row) > 1 and row[0].strip() not in ("un", "rc", "pn")})

    def _install(self, packages: Sequence[str], added: Sequence[str]) -> None:
        """Install the kept packages and remove the added ones, first by apt, then by dpkg where apt cannot."""
        settings = ["-o", "Dir::Etc::preferences=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null"]
        command = ["apt-get", *settings, "--assume-yes", "--quiet", "--no-install-recommends", "--allow-downgrades"]
        command += ["--allow-change-held-packages", "--purge", "-o", "Dpkg::Options::=--force-confold", "install"]
        command += [*packages, *(f"{name}-" for name in added)]
        quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_MODE=l"]
        if not packages and not added:
            return
        code, _, _ = self._run([*quiet, *command])
        if code == 0:
            return
        if added:
            self._run([*quiet, "dpkg", "--purge", "--force-depends", "--force-remove-reinstreq", *added])
        if packages:
            self._run([*quiet, "dpkg", "--install", "--force-downgrade", "--force-confold", *packages])
        self._run([*quiet, "dpkg", "--configure", "-a"])

    def _rebuild_initramfs(self) -> None:
        for program, arguments in (
            ("update-initramfs", ["-u", "-k", "all"]),
            ("dracut", ["--regenerate-all", "--force"]),
        ):
            if _program(program):
                self._run([program, *arguments])
                return

    def _differences(self, kept: dict[str, Any]) -> list[str]:
        state = dpkg_state(self._run)
        found = [f"dpkg left {entry}." for entry in state["broken"]]
        now = {package["name"]: package["version"] for package in state["packages"]}
        found += [
            f"{name} is {now.get(name) or 'gone'} and was {kept['driver'].get(name) or 'not there'}."
            for name in sorted(now.keys() | kept["driver"].keys())
            if now.get(name) != kept["driver"].get(name)
        ]
        for release, version in self._modules().items():
            if release in kept["modules"] and version != kept["modules"][release]:
                was = kept["modules"][release] or "none"
                found.append(f"The module of kernel {release} is {version or 'gone'} and was {was}.")
        return found


def _program(name: str) -> bool:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def _line(text: str) -> str:
    return " ".join(text.split())[-200:] or "no message"
