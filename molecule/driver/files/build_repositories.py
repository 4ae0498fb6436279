#!/usr/bin/env python3
"""Build the repositories of the scenario: small packages with the names, versions and dependencies of the real ones.

    build_repositories.py FOLDER

FOLDER/debian, ubuntu: what the distribution has. FOLDER/nvidia: NVIDIA's for Debian, FOLDER/nvidia_ubuntu for Ubuntu,
both flat and with NVIDIA's Release fields. FOLDER/withdrawn: NVIDIA's, of which a package is listed and gone.
FOLDER/rotated: NVIDIA's, signed with another key than its keyring holds. FOLDER/former: a version of which no other has
anything any more. FOLDER/keys: the keys.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

STAND_IN = Path(__file__).parent / "stand_in"
KERNELS = {"debian": ("6.1.0-28-amd64", "6.1.0-31-amd64"), "ubuntu": ("6.8.0-45-generic",)}


@dataclass(frozen=True)
class Package:
    """A binary package: fields of its control file, files by path, and scripts by name."""

    name: str
    version: str
    depends: str = ""
    conflicts: str = ""
    provides: str = ""
    files: dict[str, str] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    architecture: str = "amd64"

    def build(self, folder: Path) -> Path:
        """Write the .deb; runs of the same input give the same bytes."""
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            control = [f"Package: {self.name}", f"Version: {self.version}", f"Architecture: {self.architecture}"]
            control += ["Maintainer: vllm-fleet <lab@localhost>", f"Description: stand-in for {self.name}"]
            for title, value in (
                ("Depends", self.depends),
                ("Conflicts", self.conflicts),
                ("Replaces", self.conflicts),
                ("Provides", self.provides),
            ):
                control += [f"{title}: {value}"] if value else []
            (root / "DEBIAN").mkdir(mode=0o755)
            (root / "DEBIAN" / "control").write_text("\n".join(control) + "\n", encoding="utf-8")
            for name, text in self.scripts.items():
                script = root / "DEBIAN" / name
                script.write_text("#!/bin/sh\nset -e\n" + text, encoding="utf-8")
                script.chmod(0o755)
            for path, text in self.files.items():
                place = root / path.lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")
                place.chmod(0o755 if text.startswith("#!") else 0o644)
            target = folder / f"{self.name}_{self.version.replace(':', '%3a')}_{self.architecture}.deb"
            subprocess.run(
                ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(root), str(target)],
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "SOURCE_DATE_EPOCH": "1764547200"},
            )
        return target


def tool(name: str) -> str:
    """A stand-in program."""
    return (STAND_IN / name).read_text(encoding="utf-8")


# --- packages -------------------------------------------------------------------------------------------------------


def kernel(release: str, kind: str) -> list[Package]:
    """A kernel's image and headers: no code, only what tells that they are there."""
    modules = f"/lib/modules/{release}"
    run_hooks = f"run-parts --arg={release} --arg=/boot/vmlinuz-{release} /etc/kernel/%s.d\n"
    return [
        Package(
            f"linux-image-{release}",
            "6.1.119-1",
            files={f"/boot/vmlinuz-{release}": release, f"{modules}/modules.builtin": ""},
            scripts={
                "postinst": f"touch {modules}/modules.dep\nupdate-initramfs -u -k {release}\n" + run_hooks % "postinst"
            },
        ),
        Package(
            f"linux-headers-{release}",
            "6.1.119-1",
            files={f"{modules}/build/Makefile": "# headers\n"},
            scripts={"postinst": f"[ ! -x /usr/sbin/dkms ] || dkms autoinstall -k {release}\n"},
        ),
        Package(f"linux-image-{kind}", "6.1.119-1"),
        Package(f"linux-headers-{kind}", "6.1.119-1"),
    ]


def other_software() -> list[Package]:
    """What the other roles would install, so that a check of the whole deploy finds it."""
    return [Package(name, "1.0") for name in ("gcc", "g++", "libnuma1", "python3-dev", "python3-venv", "haproxy")]


def system_tools() -> list[Package]:
    """Programs at the edge of the host: what they would ask of a kernel is in files under /opt/stand_in."""
    return [
        Package("dpkg-repack", "1.52", files={"/usr/bin/dpkg-repack": tool("dpkg-repack")}, architecture="all"),
        Package("dkms", "3.0.10-8", files={"/usr/sbin/dkms": tool("dkms")}, architecture="all"),
        Package("mokutil", "0.6.0-2", files={"/usr/bin/mokutil": tool("mokutil")}),
        Package(
            "initramfs-tools",
            "0.142",
            files={"/usr/sbin/update-initramfs": tool("update-initramfs"), "/usr/bin/lsinitramfs": tool("lsinitramfs")},
            architecture="all",
        ),
        Package(
            "openssl",
            "3.0.15-1",
            files={"/usr/bin/openssl": '#!/bin/sh\n[ "$1" = passwd ] && echo "\\$6\\$hash"\nexit 0\n'},
        ),
    ]


def module_source(package: str, upstream: str, version: str, licence: str, **fields: str) -> Package:
    """A dkms package: what its module will say of itself, and the scripts that have it built."""
    source = f"/usr/src/nvidia-{upstream}"
    return Package(
        package,
        version,
        files={
            f"{source}/dkms.conf": f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{upstream}"\nAUTOINSTALL="yes"\n',
            f"{source}/module": f"version:        {upstream}\nlicense:        {licence}\n",
        },
        scripts={
            # As dh_dkms writes it: the build of one kernel that fails does not fail the installation, except on demand.
            "postinst": f"! grep -qsx {upstream} /opt/stand_in/fail_postinst || exit 7\n"
            f"dkms install -m nvidia -v {upstream} --all || true\n",
            "prerm": f"dkms remove -m nvidia -v {upstream} --all || true\n",
        },
        **fields,
    )


def smi(upstream: str) -> dict[str, str]:
    """The library by its name, and nvidia-smi, which compares it with the loaded module."""
    return {f"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{upstream}": upstream}


def nvidia_debian(upstream: str) -> list[Package]:
    """A version of the driver as NVIDIA's repository for Debian has it."""
    version = f"{upstream}-1"
    same = f"(= {version})"
    both = {"depends": f"firmware-nvidia-gsp {same}, dkms (>= 3.0)", "provides": f"nvidia-kernel-{upstream}"}
    return [
        module_source(
            "nvidia-kernel-open-dkms",
            upstream,
            version,
            "Dual MIT/GPL",
            conflicts="nvidia-kernel-dkms, nvidia-open-kernel-dkms",
            **both,
        ),
        module_source("nvidia-kernel-dkms", upstream, version, "NVIDIA", conflicts="nvidia-kernel-open-dkms", **both),
        Package("firmware-nvidia-gsp", version),
        Package("libnvidia-ml1", version, files=smi(upstream)),
        Package("libcuda1", version, depends=f"libnvidia-ml1 {same}"),
        Package(
            "nvidia-driver-cuda",
            version,
            depends=f"libcuda1 {same}, libnvidia-ml1 {same}, nvidia-kernel-{upstream}",
            files={"/usr/bin/nvidia-smi": tool("nvidia-smi")},
            conflicts="nvidia-smi",
        ),
        Package("nvidia-persistenced", version, depends="libnvidia-ml1"),
        # Loose, as the real one: without preferences it would bring the newest branch.
        Package(
            "nvidia-open", version, depends=f"nvidia-driver-cuda (>= {version}), nvidia-kernel-open-dkms (>= {version})"
        ),
        Package(
            "nvidia-fabricmanager" if upstream.startswith("590.") else f"nvidia-fabricmanager-{upstream[:3]}",
            version,
            provides="nvidia-fabricmanager",
            conflicts="nvidia-fabricmanager",
            files={
                "/lib/systemd/system/nvidia-fabricmanager.service": "[Service]\nExecStart=/bin/sleep infinity\n"
                "[Install]\nWantedBy=multi-user.target\n"
            },
        ),
    ]


def debian_own(upstream: str) -> list[Package]:
    """Debian's own driver: other names, and a persistence daemon with a revision of its own."""
    version = f"{upstream}-2"
    same = f"(= {version})"
    return [
        module_source(
            "nvidia-open-kernel-dkms", upstream, version, "Dual MIT/GPL", depends=f"firmware-nvidia-gsp {same}, dkms"
        ),
        Package("firmware-nvidia-gsp", version),
        Package("libnvidia-ml1", version, files=smi(upstream)),
        Package("libcuda1", version, depends=f"libnvidia-ml1 {same}"),
        Package(
            "nvidia-smi", version, depends=f"libnvidia-ml1 {same}", files={"/usr/bin/nvidia-smi": tool("nvidia-smi")}
        ),
        Package("nvidia-persistenced", f"{upstream}-1", depends="libnvidia-ml1"),
    ]


def ubuntu_names(branch: str, flavour: str, upstream: str, revision: str) -> list[Package]:
    """The driver with the branch in the names: Ubuntu's own, and NVIDIA's for Ubuntu up to 580."""
    version = f"{upstream}-{revision}"
    same = f"(= {version})"
    name = f"{branch}{flavour}"
    others = ", ".join(f"%s-{branch}{other}" for other in ("-server", "") if other != flavour)
    packages = [
        Package(f"libnvidia-compute-{name}", version, files=smi(upstream), conflicts=others % "libnvidia-compute"),
        Package(
            f"nvidia-utils-{name}",
            version,
            depends=f"libnvidia-compute-{name} {same}",
            files={"/usr/bin/nvidia-smi": tool("nvidia-smi")},
            conflicts=others % "nvidia-utils",
        ),
        Package(f"nvidia-compute-utils-{name}", version, depends=f"libnvidia-compute-{name} {same}"),
        module_source(f"nvidia-dkms-{name}-open", upstream, version, "Dual MIT/GPL", depends="dkms"),
    ]
    if flavour:
        packages.append(
            Package(
                f"nvidia-headless-no-dkms-{name}-open",
                version,
                depends=f"libnvidia-compute-{name} {same}, nvidia-compute-utils-{name} {same}",
            )
        )
        for release in KERNELS["ubuntu"]:
            module = f"/lib/modules/{release}/kernel/nvidia-{name}-open/nvidia.ko"
            text = f"version:        {upstream}\nlicense:        Dual MIT/GPL\nvermagic:       {release} SMP\n"
            packages.append(
                Package(
                    f"linux-modules-nvidia-{name}-open-{release}",
                    "6.8.0-45.45+1",
                    depends=f"linux-image-{release}",
                    files={module: text + "signer:         Canonical Ltd. Kernel Module Signing\n"},
                    scripts={
                        "postinst": f"echo kernel/nvidia-{name}-open/nvidia.ko: >>/lib/modules/{release}/modules.dep\n",
                        "prerm": f"sed -i /nvidia.ko:/d /lib/modules/{release}/modules.dep\n",
                    },
                )
            )
        packages.append(
            Package(
                f"linux-modules-nvidia-{name}-open-generic",
                "6.8.0-45.45+1",
                depends=f"linux-modules-nvidia-{name}-open-{KERNELS['ubuntu'][-1]}",
            )
        )
    return packages


def keyring(name: str, key: bytes) -> Package:
    """NVIDIA's keyring package for a repository."""
    return Package(
        "cuda-keyring",
        "1.1-1",
        files={
            f"/etc/apt/sources.list.d/cuda-{name}-x86_64.list": "deb "
            f"[signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] http://localhost:8088/{name}/ /\n",
            "/etc/apt/preferences.d/cuda-repository-pin-600": "Package: *\nPin: release l=NVIDIA CUDA\n"
            "Pin-Priority: 600\n",
            "/usr/share/keyrings/cuda-archive-keyring.gpg": key.decode("latin-1"),
        },
        architecture="all",
    )


# --- repositories ---------------------------------------------------------------------------------------------------


class Signer:
    """Keys of the scenario in a keyring of their own."""

    def __init__(self, folder: Path) -> None:
        """Make the folder of the public keys, and one for the secret ones."""
        self._folder = folder
        self._home = Path(tempfile.mkdtemp(prefix="gpg"))
        folder.mkdir(parents=True)

    def make(self, name: str) -> None:
        """Make a key and write its public part, armoured and binary, and its fingerprint."""
        self._gpg("--batch", "--passphrase", "", "--quick-generate-key", f"{name}@lab", "ed25519", "sign", "never")
        (self._folder / f"{name}.asc").write_bytes(self._gpg("--armor", "--export", f"{name}@lab"))
        (self._folder / f"{name}.gpg").write_bytes(self._gpg("--export", f"{name}@lab"))
        listed = self._gpg("--with-colons", "--fingerprint", f"{name}@lab").decode()
        fingerprint = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))
        (self._folder / f"{name}.fingerprint").write_text(fingerprint, encoding="ascii")

    def sign(self, name: str, release: Path) -> None:
        """Write InRelease beside a Release file."""
        self._gpg(
            "--local-user", f"{name}@lab", "--clearsign", "--output", str(release.with_name("InRelease")), str(release)
        )

    def close(self) -> None:
        """End gpg's agent and forget the secret keys."""
        subprocess.run(["gpgconf", "--homedir", str(self._home), "--kill", "all"], check=False)
        shutil.rmtree(self._home, ignore_errors=True)

    def _gpg(self, *arguments: str) -> bytes:
        command = ["gpg", "--homedir", str(self._home), "--quiet", "--yes", *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def index(folder: Path, origin: str, label: str) -> Path:
    """Write Packages and Release of a flat repository."""
    entries = []
    for deb in sorted(folder.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "--field", str(deb)], check=True, capture_output=True, text=True).stdout
        data = deb.read_bytes()
        entries.append(
            f"{control.rstrip()}\nFilename: ./{deb.name}\nSize: {len(data)}\n"
            f"SHA256: {hashlib.sha256(data).hexdigest()}\n"
        )
    packages = "\n".join(entries).encode()
    (folder / "Packages").write_bytes(packages)
    (folder / "Packages.gz").write_bytes(gzip.compress(packages, mtime=0))
    sums = [
        f" {hashlib.sha256((folder / name).read_bytes()).hexdigest()} {(folder / name).stat().st_size} {name}"
        for name in ("Packages", "Packages.gz")
    ]
    release = folder / "Release"
    fields = [f"Origin: {origin}", f"Label: {label}", "Architectures: amd64", "Date: Mon, 01 Dec 2025 00:00:00 UTC"]
    release.write_text("\n".join([*fields, "SHA256:", *sums, ""]), encoding="utf-8")
    return release


def main() -> None:
    """Build everything into the folder that is named."""
    root = Path(sys.argv[1])
    shutil.rmtree(root, ignore_errors=True)
    signer = Signer(root / "keys")
    for name in ("current", "rotated", "retired"):
        signer.make(name)
    drivers = [
        package
        for version in ("570.211.01", "580.95.05", "580.126.09", "590.48.01")
        for package in nvidia_debian(version)
    ]
    kernels = {
        system: [p for release in KERNELS[system] for p in kernel(release, kind)]
        for system, kind in (("debian", "amd64"), ("ubuntu", "generic"))
    }
    contents = {
        "debian": (
            "Debian",
            "Debian",
            [*system_tools(), *other_software(), *kernels["debian"], *debian_own("550.163.01")],
        ),
        "ubuntu": (
            "Ubuntu",
            "Ubuntu",
            [*system_tools(), *kernels["ubuntu"], *ubuntu_names("580", "-server", "580.126.09", "0ubuntu0.24.04.1")],
        ),
        "nvidia": ("NVIDIA", "NVIDIA CUDA", drivers),
        "withdrawn": ("NVIDIA", "NVIDIA CUDA", drivers),
        "rotated": ("NVIDIA", "NVIDIA CUDA", drivers),
        "former": ("NVIDIA", "NVIDIA CUDA", nvidia_debian("570.195.03")),
        "nvidia_ubuntu": ("NVIDIA", "NVIDIA CUDA", ubuntu_names("580", "", "580.126.09", "0ubuntu1")),
    }
    for name, (origin, label, packages) in contents.items():
        folder = root / name
        folder.mkdir()
        for package in {package.name + package.version: package for package in packages}.values():
            package.build(folder)
        release = index(folder, origin, label)
        signer.sign("rotated" if name == "rotated" else "current", release)
        if origin == "NVIDIA":
            deb = build_keyring(folder, name, (root / "keys" / "current.gpg").read_bytes())
            (folder / "keyring.sha256").write_text(hashlib.sha256(deb.read_bytes()).hexdigest(), encoding="ascii")
    next((root / "withdrawn").glob("libcuda1_580.126.09*")).unlink()
    signer.close()
    (root / "complete").touch()


def build_keyring(folder: Path, name: str, key: bytes) -> Path:
    """Build the keyring package; its key is binary, which `Package` does not write."""
    package = keyring(name, b"")
    deb = package.build(folder)
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(["dpkg-deb", "--raw-extract", str(deb), f"{temporary}/x"], check=True)
        (Path(temporary) / "x/usr/share/keyrings/cuda-archive-keyring.gpg").write_bytes(key)
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "-Znone", "--build", f"{temporary}/x", str(deb)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return deb


if __name__ == "__main__":
    main()
