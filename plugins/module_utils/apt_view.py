"""A private view of apt: the host's packages with other sources, keys and preferences, all in a scratch folder.

What apt says there it would say after the change, so held packages, a rotated key, a withdrawn branch and a missing
file show before anything on the host is touched. The change itself runs in the same view: what was simulated is what
is done.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from .driver_probe import is_driver_package, wait_for_locks
from .kernel_modules import Run  # noqa: TC001  (a plain import on every Python)

__all__ = ["AptError", "AptView", "fingerprints", "parse_simulation", "unpack_keyring"]

# What apt-cache can list by: beginnings of the driver's package names.
_PREFIXES = (
    "nvidia-",
    "libnvidia-",
    "libcuda",
    "libnv",
    "firmware-nvidia",
    "cuda-drivers",
    "linux-modules-nvidia-",
    "nvlsm",
)
_NAMES_AT_ONCE = 500
# Lines of apt that tell a person what is wrong; the rest is progress.
_TELLING = re.compile(
    r"^(?:E: .*|W: .*|Err.*| .*(?:Depends:|Conflicts:|Breaks:|PreDepends:).*|The following .*unmet.*)$", re.MULTILINE
)


class AptError(Exception):
    """apt refuses: one paragraph, with apt's own words."""


@dataclass(frozen=True)
class Repository:
    """Where the driver comes from: source files by name, and the keys that they name, as bytes by path on the host."""

    sources: dict[str, str]
    keys: dict[str, bytes]
    replaces: tuple[str, ...] = ()  # source files of the host that are left out

    def replacing(self, files: Sequence[str]) -> Repository:
        """The same, in place of these source files of the host."""
        return Repository(self.sources, self.keys, tuple(files))

    def files(self) -> dict[str, str]:
        """Content by path of what the host gets."""
        sources = {f"/etc/apt/sources.list.d/{name}": text for name, text in self.sources.items()}
        return {**{path: key.decode("utf-8", "replace") for path, key in self.keys.items()}, **sources}


class AptView:
    """One view. `apt` is what precedes a command of apt-get or apt-cache in it.

    Args:
        run: Runs a command, returns exit code, output and error text.
        scratch: Folder that is the view's own.
        root: Where the host's file system is.
    """

    def __init__(self, run: Run, scratch: str, root: str = "/") -> None:
        """Name the folders; `prepare` makes them."""
        self._run = run
        self._scratch = Path(scratch)
        self._host = Path(root)
        self.preferences = self._scratch / "preferences.d" / "00-vllm-fleet-gpu-driver"
        self.archives = self._scratch / "archives"

    @property
    def options(self) -> list[str]:
        """Options by which apt sees the view instead of the host."""
        settings = {
            "Dir::Etc::sourcelist": self._scratch / "sources.list",
            "Dir::Etc::sourceparts": self._scratch / "sources.list.d",
            "Dir::Etc::preferencesparts": self._scratch / "preferences.d",
            "Dir::State::lists": self._scratch / "lists",
            "Dir::Cache::archives": self.archives,
            # Its own, or each of many calls would parse all lists anew (1.1 s instead of 0.06 s).
            "Dir::Cache::pkgcache": self._scratch / "pkgcache.bin",
            "Dir::Cache::srcpkgcache": self._scratch / "srcpkgcache.bin",
            "APT::Sandbox::User": "root",  # its unprivileged user may not read the scratch folder
            "APT::Get::List-Cleanup": "false",
        }
        return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]

    def prepare(self, repository: Repository, managed: Sequence[str] = ()) -> None:
        """Make the folders and fill them with the host's sources, preferences and lists, and the repository's.

        Args:
            repository: What is added, and what of the host's is left out.
            managed: Files of the host that the change will write anew, so they are left out too.
        """
        # The packages that an earlier view fetched are checked by apt anyway, so they need not be fetched again.
        for name in ("sources.list.d", "preferences.d", "keys", "lists"):
            shutil.rmtree(self._scratch / name, ignore_errors=True)
        for name in ("sources.list.d", "preferences.d", "keys", "lists/partial", "archives/partial"):
            (self._scratch / name).mkdir(parents=True, exist_ok=True, mode=0o755)
        left_out = {*repository.replaces, *managed}
        apt = self._host / "etc/apt"
        for folder in ("sources.list.d", "preferences.d"):
            for path in sorted((apt / folder).glob("*")):
                if f"/{path.relative_to(self._host)}" not in left_out and path.is_file():
                    shutil.copyfile(path, self._scratch / folder / path.name)
        listed = apt / "sources.list"
        text = (
            listed.read_text(encoding="utf-8") if listed.is_file() and "/etc/apt/sources.list" not in left_out else ""
        )
        (self._scratch / "sources.list").write_text(text, encoding="utf-8")
        for path in (self._host / "var/lib/apt/lists").glob("*"):
            if path.is_file() and path.name != "lock":
                shutil.copy2(path, self._scratch / "lists" / path.name)
        for name, text in repository.sources.items():
            for place, key in repository.keys.items():
                own = self._scratch / "keys" / Path(place).name
                own.write_bytes(key)
                text = text.replace(place, str(own))  # noqa: PLW2901  (one replacement after another)
            (self._scratch / "sources.list.d" / name).write_text(text, encoding="utf-8")

    def write_preferences(self, text: str) -> None:
        """Put the preferences of the change into the view."""
        self.preferences.write_text(text, encoding="utf-8")

    def update(self, addresses: Sequence[str]) -> None:
        """Fetch the package lists.

        Args:
            addresses: The repository's. Trouble with any other is not this change's to report.

        Raises:
            AptError: The lists of the repository could not be had.
        """
        code, output, error = self._run(["apt-get", *self.options, "update", "-q"])
        said = [line for line in _TELLING.findall(output + "\n" + error) if any(uri in line for uri in addresses)]
        key = re.search(r"NO_PUBKEY (\S+)", "\n".join(said))
        if key:
            raise AptError(
                f"The repository {addresses[0]} is signed with key {key[1]}, which the keyring does not hold: its "
                "owner has changed the key. Give the new keyring (gpu_driver_keyring_url with its "
                "gpu_driver_keyring_checksum, or gpu_driver_mirror_key). Nothing was changed."
            )
        if any("SHA1 is not considered secure" in line or "is not bound" in line for line in said):
            raise AptError(
                f"apt rejects the key of {addresses[0]}: it is bound by a SHA-1 signature, which Debian 13 no longer "
                "takes. Use the repository made for this release, or a mirror signed with a key of yours "
                f"(gpu_driver_source: mirror). Nothing was changed. apt says: {_words(said)}"
            )
        failed = [line for line in said if line.startswith(("E:", "W:", "Err"))]
        if failed or (code != 0 and not addresses):
            raise AptError(
                f"The package lists of {addresses[0] if addresses else 'this host'} could not be fetched. Check the "
                "address, the network or proxy, and the key. Nothing was changed. apt says: "
                + _words(failed or [error])
            )

    def addresses(self, origins: Sequence[str] = ()) -> list[str]:
        """Addresses of the view's repositories; with `origins`, of those whose Release file names one of them."""
        _, output, _ = self._run(
            ["apt-get", *self.options, "indextargets", "--format", "$(REPO_URI)|$(ORIGIN)", "Created-By: Packages"]
        )
        pairs = [line.partition("|")[::2] for line in output.splitlines()]
        return sorted({uri.rstrip("/") for uri, origin in pairs if not origins or origin in origins})

    def candidates(self, addresses: Sequence[str]) -> list[dict[str, str]]:
        """Every version of the driver's packages that these repositories have, the newest of a name first."""
        names: list[str] = []
        for prefix in _PREFIXES:
            names += self._run(["apt-cache", *self.options, "pkgnames", prefix])[1].split()
        found = []
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some = sorted(set(names[start : start + _NAMES_AT_ONCE]))
            _, output, _ = self._run(["apt-cache", *self.options, "madison", *some])
            for line in output.splitlines():
                name, version, place = ([part.strip() for part in line.split("|")] + ["", ""])[:3]
                address = place.split(" ")[0].rstrip("/")
                known = is_driver_package(name, version) or name == "nvlsm"
                if known and place.endswith("Packages") and address in addresses:
                    found.append({"name": name, "version": version, "repository": address})
        return found

    def install_command(self, arguments: Sequence[str], *extra: str) -> list[str]:
        """The apt-get command that does the change in one transaction; `name-` removes."""
        return [
            "apt-get",
            *self.options,
            "--assume-yes",
            "--quiet",
            "--no-install-recommends",
            "--allow-downgrades",
            "--allow-change-held-packages",
            "-o",
            "Dpkg::Options::=--force-confold",
            "-o",
            "DPkg::Lock::Timeout=600",
            *extra,
            "install",
            *arguments,
        ]

    def simulate(self, arguments: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """What the transaction would do.

        Raises:
            AptError: apt cannot do it, for example because of held packages.
        """
        code, output, error = self._run(self.install_command(arguments, "--simulate"))
        if code != 0:
            said = _TELLING.findall(output + "\n" + error)
            raise AptError(
                f"apt cannot install this driver: {_words(said or [error, output])} Nothing was changed. Held packages "
                "are listed by `apt-mark showhold`; `apt-mark unhold NAME` lets one go."
            )
        return parse_simulation(output)

    def download(self, arguments: Sequence[str]) -> None:
        """Fetch all packages of the transaction.

        Raises:
            AptError: One of them cannot be had.
        """
        code, output, error = self._run(self.install_command(arguments, "--download-only"))
        if code != 0:
            said = [line for line in _TELLING.findall(output + "\n" + error) if not line.startswith("W:")]
            raise AptError(
                "A package of this driver cannot be fetched, although the repository lists it: the branch was "
                "withdrawn, or the mirror is incomplete. Choose another gpu_driver_version, or wait until the mirror "
                f"is whole. Nothing was changed. apt says: {_words(said or [error])}"
            )


def _words(lines: Sequence[str]) -> str:
    text = " ".join(" ".join(line.split()) for line in lines if line.strip())
    return (text[:900] + " …" if len(text) > 900 else text).rstrip(".") + "."  # noqa: PLR2004


def parse_simulation(output: str) -> dict[str, list[dict[str, Any]]]:
    """Read `apt-get --simulate install`.

    Returns:
        `install` and `remove`: records with name, `from` (null: not installed) and, for installs, `to`.
    """
    install = [
        {"name": match[1], "from": match[2], "to": match[3]}
        for match in re.finditer(r"^Inst (\S+)(?: \[(\S+)\])? \((\S+)", output, re.MULTILINE)
    ]
    remove = [
        {"name": match[1], "from": match[2]}
        for match in re.finditer(r"^(?:Remv|Purg) (\S+)(?: \[(\S+)\])?", output, re.MULTILINE)
    ]
    return {"install": install, "remove": remove}


def require_no_other(seconds: float, root: str = "/") -> None:
    """Wait until no other package manager is at work.

    Raises:
        AptError: One still is; it is named.
    """
    holders = wait_for_locks(seconds, root)
    if holders:
        raise AptError(
            f"After {seconds:.0f} s another package manager is still at work: "
            f"{', '.join(holder['said'] for holder in holders)}. Let it finish, or find out why it hangs; then run "
            "this again. Nothing was changed."
        )


# --- keys -----------------------------------------------------------------------------------------------------------


def unpack_keyring(run: Run, url: str, checksum: str, scratch: str) -> tuple[str, Repository]:
    """Fetch a keyring package, prove it by its SHA-256 and read what it would install.

    Returns:
        Path of the package, and its sources and keys.

    Raises:
        AptError: It cannot be fetched, or is another file than the one that was meant.
    """
    folder = Path(scratch)
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    package = folder / "keyring.deb"
    if not package.is_file() or hashlib.sha256(package.read_bytes()).hexdigest() != checksum:
        code, output, error = run(["/usr/lib/apt/apt-helper", "download-file", url, str(package)])
        if code != 0:
            raise AptError(
                f"The keyring {url} cannot be fetched. Check the address and the network or proxy, or use a mirror "
                f"(gpu_driver_source: mirror). Nothing was changed. apt says: {_words([error or output])}"
            )
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        if found != checksum:
            package.unlink()
            raise AptError(
                f"The keyring {url} has SHA-256 {found}, not {checksum}. Find out why before you set "
                "gpu_driver_keyring_checksum to it: a new keyring of its owner, or a file that was tampered with. "
                "Nothing was changed."
            )
    tree = folder / "keyring"
    shutil.rmtree(tree, ignore_errors=True)
    run(["dpkg-deb", "--extract", str(package), str(tree)])
    sources = sorted((tree / "etc/apt/sources.list.d").glob("*"))
    keys = sorted((tree / "usr/share/keyrings").glob("*"))
    if not sources or not keys:
        raise AptError(
            f"The keyring {url} holds no source or no key; it is no keyring of a repository. Nothing was changed."
        )
    return str(package), Repository(
        sources={path.name: path.read_text(encoding="utf-8") for path in sources},
        keys={f"/{path.relative_to(tree)}": path.read_bytes() for path in keys},
    )


def fingerprints(data: bytes) -> list[str]:
    """Fingerprints of the version 4 public keys in a binary keyring (RFC 4880, 4.2 and 12.2)."""
    found = []
    position = 0
    while position < len(data):
        header = data[position]
        if not header & 0x80:
            break
        if header & 0x40:  # new format
            tag, first = header & 0x3F, data[position + 1] if position + 1 < len(data) else 255
            if first < 192:  # noqa: PLR2004
                length, start = first, position + 2
            elif first < 224:  # noqa: PLR2004
                length, start = ((first - 192) << 8) + data[position + 2] + 192, position + 3
            else:
                length, start = int.from_bytes(data[position + 2 : position + 6], "big"), position + 6
        else:
            tag, size = (header >> 2) & 0x0F, 1 << (header & 0x03)
            length, start = int.from_bytes(data[position + 1 : position + 1 + size], "big"), position + 1 + size
        body = data[start : start + length]
        if tag == 6 and body[:1] == b"\x04":  # noqa: PLR2004  (a public key)
            digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body)  # noqa: S324  (as the standard says)
            found.append(digest.hexdigest().upper())
        position = start + max(length, 1)
    return found


def retired_key_files(retired: Sequence[str], root: str = "/") -> list[str]:
    """Files in apt's trusted folder all of whose keys are retired."""
    wanted = {key.upper().replace(" ", "") for key in retired}
    found = []
    for path in sorted((Path(root) / "etc/apt/trusted.gpg.d").glob("*.gpg")):
        keys = fingerprints(path.read_bytes()) if os.access(path, os.R_OK) else []
        if keys and all(key in wanted for key in keys):
            found.append(f"/{path.relative_to(root)}")
    return found


def mirror(url: str, suite: str, components: Sequence[str], key: str, name: str) -> Repository:
    """A mirror as a repository: one source file in deb822 form, and its key."""
    place = f"/etc/apt/keyrings/{name}.{'asc' if key.lstrip().startswith('-----BEGIN') else 'gpg'}"
    lines = ["Types: deb", f"URIs: {url}", f"Suites: {suite}"]
    lines += [f"Components: {' '.join(components)}"] if components else []
    lines += [f"Signed-By: {place}", ""]
    return Repository(sources={f"{name}.sources": "\n".join(lines)}, keys={place: key.encode()})


def conflicting_sources(repositories: Sequence[dict[str, Any]], repository: Repository) -> tuple[str, ...]:
    """Source files of the host that name an address of the repository: apt takes no address with two keys.

    Raises:
        AptError: Such a file also names others, so it cannot be replaced as a whole.
    """
    own = set(repository_addresses(repository))
    ours = {f"/etc/apt/sources.list.d/{name}" for name in repository.sources}
    conflicting = []
    for entry in repositories:
        if entry["file"] in ours or not own & set(entry["uris"]):
            continue
        if set(entry["uris"]) - own:
            raise AptError(
                f"{entry['file']} names {', '.join(sorted(own & set(entry['uris'])))} beside other repositories, and "
                "apt takes no address with two keys. Remove that line; the role adds the repository with its own key. "
                "Nothing was changed."
            )
        conflicting.append(entry["file"])
    return tuple(conflicting)


def repository_addresses(repository: Repository) -> list[str]:
    """The addresses that its sources name."""
    text = "\n".join(repository.sources.values())
    return sorted({uri.rstrip("/") for uri in re.findall(r"(?:https?|file|copy)://?[^\s\]]+", text)})
