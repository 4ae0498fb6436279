"""Which kernels a host can boot, which of them have a working NVIDIA module, and what would keep it from loading.

Reads only: /boot, /lib/modules, modprobe.d, dkms, the boot loader's settings, the initramfs and secure boot. What a
tool prints is the truth (modinfo, dkms, mokutil, lsinitramfs); files are read where there is no tool.

Standard library only, Python 3.9: this runs on target hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence

from .gpu_topology import Problem, problem

__all__ = [
    "MISSING_PROGRAM",
    "Run",
    "parse_dkms_status",
    "parse_grub_menu",
    "parse_modinfo",
    "probe_kernels",
    "run_command",
]

Run = Callable[[Sequence[str]], tuple[int, str, str]]

MISSING_PROGRAM = 127  # what a shell says where there is no such program
_TIMED_OUT = 124  # what timeout(1) says
_MOST_LINKS = 40  # as the kernel has it (MAXSYMLINKS)
_LOOKUP_SECONDS = 120.0  # listing an initramfs takes a second, and ten times that on an emulated CPU

# Kernel modules that bind an NVIDIA GPU before NVIDIA's can, under every name that they have had.
_RIVALS = {"nouveau": ("nouveau",), "nova_core": ("nova_core",), "nova_drm": ("nova_drm", "nova")}

# Where kmod looks for its settings, the first of several files of one name in force (modprobe.d(5)).
_MODPROBE_FOLDERS = ("etc/modprobe.d", "run/modprobe.d", "usr/local/lib/modprobe.d", "usr/lib/modprobe.d")
_BLOCKED_BY = re.compile(r"(?:/usr)?(?:/bin/)?(?:false|true)\b")

# What the driver's main module is called: `nvidia` by NVIDIA and Ubuntu, nvidia-current, nvidia-current-open,
# nvidia-tesla-535 and the like by Debian, whose modprobe.d leads the one to the other.
_DRIVER_FILE = re.compile(
    r"^(?:[^:\n]*/)?(nvidia(?:[-_](?:current|open|tesla|legacy|\d+(?:xx)?))*)\.ko(?:\.\w+)?:", re.MULTILINE
)

_EFI_GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"  # UEFI specification, 3.3
_SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"  # shim's MokVars.txt
_EFI_ATTRIBUTE_BYTES = 4  # stand before the value in efivarfs


class _Host:
    """The host's files, and its programs by `run`."""

    def __init__(self, run: Run, root: str) -> None:
        self.run = run
        self._root = Path(root)
        self.problems: list[Problem] = []

    def path(self, path: str) -> Path:
        """Where `path` is, its links followed inside the root: most links of Debian's alternatives are absolute."""
        place, rest, links = self._root, path.split("/"), _MOST_LINKS
        while rest:
            part = rest.pop(0)
            if part == "..":
                place = self._root if place == self._root else place.parent
            elif links and part and (place / part).is_symlink():
                links -= 1
                target = str((place / part).readlink())
                place = self._root if target.startswith("/") else place
                rest = target.split("/") + rest
            else:
                place = place / part
        return place

    def data(self, path: str) -> Optional[bytes]:
        try:
            return self.path(path).read_bytes()
        except OSError:
            return None

    def text(self, path: str) -> str:
        return (self.data(path) or b"").decode("utf-8", "replace")

    def names(self, path: str) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def warn(self, code: str, message: str, remedy: str) -> None:
        self.problems.append(problem("warning", code, message, remedy))

    def fail(self, code: str, message: str, remedy: str) -> None:
        self.problems.append(problem("error", code, message, remedy))


def run_command(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a program of this host in the C locale: (exit status, standard output, standard error).

    Never raises: status 127 where there is no such program, 124 where it did not end within two minutes.
    """
    environment = {**os.environ, "LC_ALL": "C", "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    try:
        done = subprocess.run(
            list(argv), capture_output=True, check=False, env=environment, timeout=_LOOKUP_SECONDS
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _TIMED_OUT, "", "{0} did not end within {1:.0f} s".format(argv[0], _LOOKUP_SECONDS)
    except OSError as error:
        return MISSING_PROGRAM, "", str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def probe_kernels(run: Run, root: str = "/") -> dict[str, Any]:
    """Read a host's kernels and what the NVIDIA driver needs of them.

    Args:
        run: Runs a program of that host in the C locale, as `run_command` does: argv to (exit status, standard output,
            standard error), 127 for a program that is not there.
        root: Folder that holds the host's files.

    Returns:
        `kernels`, newest first: every kernel with an image in /boot and its modules, and the running one whether it has
        these (`bootable`) or not. `nvidia` is the module that `modprobe nvidia` would load there, `dkms` what dkms
        knows of NVIDIA's modules, where `broken` is also a build that failed, or a module other than the one built.
        `nouveau_in_initramfs` says whether nouveau can start from there: the module is in it, and no copy of the
        host's modprobe.d that blocks it; null where there is no initramfs or it cannot be listed.
        `secure_boot`, `mok` (the key that dkms signs with), `loaded`, `blocked` (by modprobe.d, with a blacklist line
        against loading by the bus and an install line against all other loading), and `problems`.
    """
    host = _Host(run, root)
    running = run(["uname", "-r"])[1].strip()
    settings = _modprobe_settings(host, _modprobe_files(host))
    releases = _bootable(host)
    next_boot = _next_boot(host, releases)
    loaded = _loaded(host)
    kernels = _kernels(host, settings, releases, running, next_boot)
    secure_boot = _secure_boot(host)
    probe = {
        "kernels": kernels,
        "secure_boot": secure_boot,
        "mok": _mok(host, secure_boot),
        "loaded": loaded,
        "blocked": {rival: all(map(settings.blocks, names)) for rival, names in _RIVALS.items()},
    }
    _judge(host, probe)
    return {**probe, "problems": host.problems}


# --- which kernels --------------------------------------------------------------------------------------------------


def _bootable(host: _Host) -> list[str]:
    """Releases of the kernels with an image and their modules, newest first."""
    releases = []
    for name in host.names("boot"):
        release = name[len("vmlinuz-") :]
        if not name.startswith("vmlinuz-") or name.endswith((".old", ".dpkg-new", ".dpkg-tmp")):
            continue
        if host.path("lib/modules/" + release).is_dir():
            releases.append(release)
        else:
            host.warn(
                "kernel_without_modules",
                f"Kernel {release} has an image in /boot and no folder in /lib/modules.",
                "Install its package again, or remove the image and update the boot loader.",
            )
    return sorted(releases, key=_version_key, reverse=True)


def _version_key(release: str) -> list[tuple[int, str]]:
    return [(int(number or 0), text) for number, text in re.findall(r"(\d+)|(\D+)", release)]


def _kernels(
    host: _Host, settings: _ModprobeSettings, releases: list[str], running: str, next_boot: set[str]
) -> list[dict[str, Any]]:
    listed = releases + ([running] if running and running not in releases else [])
    headers = {release: "linux-headers-" + release for release in listed}
    installed = {release for release in listed if host.path(f"lib/modules/{release}/build/Makefile").is_file()}
    offered = _candidates(host, [headers[release] for release in listed if release not in installed])
    packages = _image_packages(host, releases)
    dkms = _dkms(host, listed)
    return [
        {
            "release": release,
            "running": release == running,
            "bootable": release in releases,
            "next_boot": release in next_boot,
            "image_package": packages.get(release),
            "headers": "installed"
            if release in installed
            else "available"
            if headers[release] in offered
            else "missing",
            "headers_package": headers[release],
            "nvidia": _module(host, settings, release),
            "dkms": dkms[release],
            "nouveau_in_initramfs": _nouveau_in_initramfs(host, release),
        }
        for release in listed
    ]


def _image_packages(host: _Host, releases: list[str]) -> dict[str, str]:
    """Packages of the images, as `dpkg-query --search` prints them: `PACKAGE: PATH`."""
    if not releases:
        return {}
    _, output, _ = host.run(["dpkg-query", "--search", *("/boot/vmlinuz-" + release for release in releases)])
    return {
        match[2]: match[1].split(",")[0].split(":")[0]
        for match in re.finditer(r"^(\S[^\n]*): /boot/vmlinuz-(\S+)$", output, re.MULTILINE)
        if not match[1].startswith("diversion by")
    }


def _candidates(host: _Host, packages: list[str]) -> set[str]:
    """Those of the packages that apt could install."""
    if not packages:
        return set()
    _, output, _ = host.run(["apt-cache", "policy", *packages])
    return set(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (?!\(none\))", output, re.MULTILINE))


def _nouveau_in_initramfs(host: _Host, release: str) -> Optional[bool]:
    for name in ("initrd.img-" + release, f"initramfs-{release}.img"):
        if host.path("boot/" + name).is_file():
            break
    else:
        return None
    status, output, error = host.run(["lsinitramfs", "-l", "/boot/" + name])
    if status == MISSING_PROGRAM:
        status, output, error = host.run(["lsinitrd", "/boot/" + name])  # dracut without initramfs-tools
    if status != 0 or not output:
        host.warn(
            "initramfs_unreadable",
            f"/boot/{name} cannot be listed, so whether it loads nouveau is unknown: {error.strip()[-200:] or status}",
            "Run as root. Where the file is damaged, make it anew: update-initramfs -u -k " + release,
        )
        return None
    if not re.search(r"/nouveau\.ko(?:\.\w+)?$", output, re.MULTILINE):
        return False
    # Plymouth's hook takes every DRM driver along, blocked or not; the host's settings in it keep nouveau out then.
    return not _modprobe_settings(host, _copied_settings(host, output, "boot/" + name)).blocks("nouveau")


def _copied_settings(host: _Host, listing: str, image: str) -> list[str]:
    """Files of modprobe.d that an initramfs has a copy of, by its listing, which has no contents but sizes.

    A file of the same size is the copy, unless the host's was written after the image was made.
    """
    pattern = re.compile(r"^-.*?\s(\d+)\s+\w{3}\s+\d+\s+[\d:]+\s+(\S+)$", re.MULTILINE)
    sizes = {path: int(size) for size, path in pattern.findall(listing)}
    made = host.path(image).stat().st_mtime
    copied = []
    for path in _modprobe_files(host):
        with contextlib.suppress(OSError):  # a link to nowhere
            status = host.path(path).stat()
            if sizes.get(path) == status.st_size and status.st_mtime <= made:
                copied.append(path)
    return copied


# --- the module -----------------------------------------------------------------------------------------------------


def parse_modinfo(text: str) -> dict[str, str]:
    """Fields of `modinfo MODULE`; of a field that is there several times, the first."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"(\w+):[ \t]*(.*)$", line)
        if match:
            fields.setdefault(match[1], match[2].strip())
    return fields


def _module(host: _Host, settings: _ModprobeSettings, release: str) -> Optional[dict[str, Any]]:
    """What `modprobe nvidia` would load into that kernel, None where nothing."""
    there = _DRIVER_FILE.findall(host.text(f"lib/modules/{release}/modules.dep"))
    if not there:
        return None
    leads_to = settings.leads_to("nvidia")
    name = next((name for name in there if _normal(name) == leads_to), there[0])
    status, output, error = host.run(["modinfo", "-k", release, name])
    fields = parse_modinfo(output)
    if status != 0 or "filename" not in fields:
        host.warn(
            "module_unreadable",
            f"The module {name} of kernel {release} cannot be read: {error.strip()[-200:] or status}",
            f"Build it again (dkms install --force), or make the list of modules anew: depmod {release}",
        )
        return None
    licence = fields.get("license", "")
    return {
        "version": fields.get("version"),
        "licence": licence,
        "signer": fields.get("signer") or None,
        "path": fields["filename"],
        "vermagic": fields.get("vermagic", ""),
        "open": "MIT" in licence,  # "Dual MIT/GPL", and "NVIDIA" for the proprietary one
    }


class _ModprobeSettings(NamedTuple):
    """The lines of modprobe.d in force, by module (with underscores)."""

    blacklist: set[str]
    install: dict[str, str]
    alias: dict[str, str]

    def blocks(self, module: str) -> bool:
        return module in self.blacklist and bool(_BLOCKED_BY.match(self.install.get(module, "")))

    def leads_to(self, module: str) -> str:
        """The module that is loaded by this name: Debian's runs `modprobe -i nvidia-current-open`."""
        match = re.match(r"(?:\S*/)?modprobe\s(?:-\S+\s+)*([\w-]+)", self.install.get(module, ""))
        return _normal(match[1]) if match else self.alias.get(module, module)


def _normal(module: str) -> str:
    return module.replace("-", "_")


def _modprobe_files(host: _Host) -> list[str]:
    files: dict[str, str] = {}
    for folder in _MODPROBE_FOLDERS:
        for name in host.names(folder):
            if name.endswith(".conf"):
                files.setdefault(name, f"{folder}/{name}")
    return [files[name] for name in sorted(files)]


def _modprobe_settings(host: _Host, files: list[str]) -> _ModprobeSettings:
    settings = _ModprobeSettings(set(), {}, {})
    for path in files:
        for line in host.text(path).replace("\\\n", " ").splitlines():
            keyword, module, *rest = [*line.split(None, 2), "", ""]
            if keyword == "blacklist":
                settings.blacklist.add(_normal(module))
            elif keyword == "install":
                settings.install.setdefault(_normal(module), rest[0])
            elif keyword == "alias":
                settings.alias.setdefault(_normal(module), _normal(rest[0].strip()))
    return settings


def _loaded(host: _Host) -> dict[str, Any]:
    modules = {line.split(" ", 1)[0] for line in host.text("proc/modules").splitlines()}
    version = host.text("sys/module/nvidia/version").strip()
    if not version:
        match = re.search(
            r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", host.text("proc/driver/nvidia/version"), re.MULTILINE
        )
        version = match[1] if match else ""
    return {"nvidia": version or None, **{rival: bool(modules & set(names)) for rival, names in _RIVALS.items()}}


# --- dkms -----------------------------------------------------------------------------------------------------------


class _DkmsLine(NamedTuple):
    module: str
    version: str
    release: Optional[str]  # None for what is only added
    state: str
    remark: str


def parse_dkms_status(text: str) -> list[tuple[str, str, Optional[str], str, str]]:
    """Read `dkms status` into (module, version, kernel release, state, remark).

    Versions up to 2 print `module, version, release, architecture: state`, later ones `module/version, …`; what is only
    added, or broken, has no release. The remark is what follows in brackets, such as "WARNING! Diff between built and
    installed module!" (up to 3.1) or "Differences between built and installed modules".
    """
    lines: list[tuple[str, str, Optional[str], str, str]] = []
    for line in text.splitlines():
        match = re.match(
            r"([\w.+-]+)(?:/|, )([^\s,:]+)(?:, ([^\s,:]+)(?:, [^\s,:]+)?)?: ([a-z-]+)\s*(.*)$", line.strip()
        )
        if match:
            lines.append((match[1], match[2], match[3], match[4], match[5].strip("() ").replace(") (", "; ")))
    return lines


def _dkms(host: _Host, releases: list[str]) -> dict[str, list[dict[str, str]]]:
    """For each kernel, the state of NVIDIA's modules."""
    _, output, _ = host.run(["dkms", "status"])
    lines = [_DkmsLine(*line) for line in parse_dkms_status(output)]
    lines = [line for line in lines if re.match(r"nvidia(?!-fs\b|fb)", line.module)]
    found: dict[str, list[dict[str, str]]] = {release: [] for release in releases}
    for module, version in sorted({(line.module, line.version) for line in lines}):
        own = [line for line in lines if (line.module, line.version) == (module, version)]
        failed_release, failure = _failed_build(host, module, version)
        for release in releases:
            here = [line for line in own if line.release == release]
            if any(line.state == "broken" for line in own):
                state = "broken"
                _report_broken(host, module, version, release, "its source folder in /usr/src is gone")
            elif not here and release == failed_release:
                state = "broken"
                _report_broken(host, module, version, release, failure)
            elif not here:
                state = "added"
            elif re.search(r"diff|missing", here[0].remark, re.IGNORECASE):
                state = "broken"
                _report_broken(host, module, version, release, here[0].remark)
            else:
                state = "installed" if here[0].state.startswith("installed") else "built"
            found[release].append({"module": module, "version": version, "state": state})
    return found


def _failed_build(host: _Host, module: str, version: str) -> tuple[Optional[str], str]:
    """Kernel and first error of the last build, where it failed: only then does dkms leave its log in this folder."""
    path = f"/var/lib/dkms/{module}/{version}/build/make.log"
    log = host.text(path)
    release = re.match(r"DKMS .*make\.log for .* for kernel (\S+) \(", log)
    # The compiler's own words before make's, which only say that something failed.
    patterns = (r"^.*\berror: .*$", r"^.*(?:No such file or directory|not found).*$", r"^make.*\*\*\*.*$")
    error = next(filter(None, (re.search(pattern, log, re.MULTILINE | re.IGNORECASE) for pattern in patterns)), None)
    said = "its build failed{0}; see {1}".format(f" ({error[0].strip()[:200]})" if error else "", path)
    return (release[1] if release else None), said


def _report_broken(host: _Host, module: str, version: str, release: str, why: str) -> None:
    host.fail(
        "dkms_broken",
        f"{module} {version} for kernel {release} is broken: {why}.",
        f"Mend the cause, then: dkms install --force -m {module} -v {version} -k {release}",
    )


# --- what starts next -----------------------------------------------------------------------------------------------


@dataclass
class GrubEntry:
    """An entry of GRUB's menu, or a submenu with entries of its own; `names` are title and id."""

    names: tuple[str, ...]
    image: Optional[str] = None
    entries: list[GrubEntry] = field(default_factory=list)


def parse_grub_menu(text: str) -> tuple[str, list[GrubEntry]]:
    """Read a generated grub.cfg.

    Returns:
        What the variable `default` is set to when no entry was chosen for one boot only (a title, an id, a number, a
        path of these with `>`, or `${saved_entry}`), and the menu.
    """
    defaults = re.findall(r"^\s*set default=[\"']?(.*?)[\"']?\s*$", text, re.MULTILINE)
    menu = GrubEntry(())
    stack: list[Optional[GrubEntry]] = [menu]
    for line in map(str.strip, text.splitlines()):
        image = re.match(r"linux(?:efi|16)?\s+(?:\([^)]*\))?(\S+)", line)
        if line.startswith(("menuentry ", "submenu ")) and line.endswith("{"):
            entry = GrubEntry(_grub_names(line[:-1]))
            next(owner for owner in reversed(stack) if owner).entries.append(entry)
            stack.append(entry)
        elif line.endswith("{"):
            stack.append(None)  # a function
        elif line == "}" and len(stack) > 1:
            stack.pop()
        elif image and stack[-1]:
            stack[-1].image = image[1]
    chosen = [value for value in defaults if "next_entry" not in value]
    return (chosen[-1] if chosen else "0"), menu.entries


def _grub_names(line: str) -> tuple[str, ...]:
    try:
        words = shlex.split(line)
    except ValueError:
        return ()
    ids = [words[place] for place in range(2, len(words)) if words[place - 1] in ("--id", "$menuentry_id_option")]
    return tuple(words[1:2] + ids)


def _grub_image(entries: list[GrubEntry], choice: str) -> Optional[str]:
    """The image that GRUB loads for that choice: where it names no entry, GRUB takes the first."""
    first, _, rest = choice.partition(">")
    # A title may hold a `>`, which grub-mkconfig writes twice.
    named = [entry for entry in entries if first in entry.names or choice.replace(">>", ">") in entry.names]
    position = int(first) if first.isdigit() and int(first) < len(entries) else 0
    if not entries:
        return None
    entry = named[0] if named else entries[position]
    return _grub_image(entry.entries, rest) if entry.entries else entry.image


def _next_boot(host: _Host, releases: list[str]) -> set[str]:
    """Releases that the next boot may start: one, or all where the boot loader does not say."""
    if not releases:
        return set()
    image: Optional[str] = None
    if host.path("boot/grub/grub.cfg").is_file():
        said = "GRUB's menu (/boot/grub/grub.cfg)"
        saved = dict(line.partition("=")[::2] for line in host.text("boot/grub/grubenv").splitlines())
        default, menu = parse_grub_menu(host.text("boot/grub/grub.cfg"))
        last = saved.get("prev_saved_entry") or saved.get("saved_entry") or "0"
        choice = saved.get("next_entry") or (last if "saved_entry" in default else default)
        image = _grub_image(menu, choice)
    elif host.names("boot/loader/entries") or host.names("boot/efi/loader/entries"):
        said = "systemd-boot's default"
    else:
        # No boot loader of its own, as in a virtual machine that is given kernel and initramfs by these links.
        said = "no boot loader's settings, nor a link /vmlinuz"
        image = next((link for link in ("/vmlinuz", "/boot/vmlinuz") if host.path(link).is_file()), None)
    if image:
        # GRUB's name of it is a path on the file system of /boot, which may be one of its own.
        named = {host.path(image).name, host.path("boot/" + image).name}
        started = {release for release in releases if "vmlinuz-" + release in named}
        if started:
            return started
    if len(releases) > 1:
        host.warn(
            "next_boot_unknown",
            f"Which kernel starts next is unknown: {said} names none of {', '.join(releases)}.",
            "Each of them is taken for the next. Remove those that are not needed, or set GRUB_DEFAULT and run "
            "update-grub.",
        )
    return set(releases)


# --- secure boot ----------------------------------------------------------------------------------------------------


def _secure_boot(host: _Host) -> str:
    status, output, error = host.run(["mokutil", "--sb-state"])
    said = output + error
    if "validation is disabled in shim" in said or "SecureBoot disabled" in said:
        return "disabled"
    if "SecureBoot enabled" in said:
        return "enabled"
    if re.search(r"not supported on this system|doesn't support Secure Boot", said):
        return "unsupported"
    if not host.path("sys/firmware/efi").is_dir():
        return "unsupported"
    variables = "sys/firmware/efi/efivars/"
    state = host.data(f"{variables}SecureBoot-{_EFI_GLOBAL}")
    ignored = host.data(f"{variables}MokSBStateRT-{_SHIM}")
    if state is None or len(state) <= _EFI_ATTRIBUTE_BYTES:
        host.warn(
            "secure_boot_unknown",
            "This host boots by EFI, and its variable SecureBoot cannot be read"
            f" (mokutil --sb-state: {said.strip()[-200:] or status}).",
            "Install mokutil, and mount efivarfs: mount -t efivarfs efivarfs /sys/firmware/efi/efivars",
        )
        return "unknown"
    enforced = state[_EFI_ATTRIBUTE_BYTES] == 1 and not (ignored and ignored[-1] == 1)
    return "enabled" if enforced else "disabled"


def _mok(host: _Host, secure_boot: str) -> dict[str, Any]:
    """The machine owner's key that dkms signs with; without EFI there is nothing to enrol it in."""
    names = ["etc/dkms/framework.conf"]
    names += ["etc/dkms/framework.conf.d/" + name for name in host.names("etc/dkms/framework.conf.d")]
    settings = "\n".join(map(host.text, names))
    configured = re.findall(r"^\s*mok_certificate=[\"']?([^\"'\s#]+)", settings, re.MULTILINE)
    # Ubuntu's dkms takes the key that shim-signed makes; all others make their own.
    places = [*configured[-1:], "/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub"]
    certificate = next((path for path in places if host.path(path).is_file()), None)
    enrolled = pending = None
    if certificate and secure_boot != "unsupported":
        _, output, error = host.run(["mokutil", "--test-key", certificate])
        said = output + error
        if "is not enrolled" in said:
            enrolled = pending = False
        elif "is already in the enrollment request" in said:
            enrolled, pending = False, True
        elif re.search(r"is already (?:enrolled|in)", said):
            enrolled, pending = True, False
    return {"enrolled": enrolled, "pending": pending, "certificate": certificate}


# --- what does not fit together -------------------------------------------------------------------------------------


def _judge(host: _Host, probe: dict[str, Any]) -> None:
    kernels, loaded = probe["kernels"], probe["loaded"]["nvidia"]
    some_module = any(kernel["nvidia"] or kernel["dkms"] for kernel in kernels)
    for kernel in kernels:
        release, module = kernel["release"], kernel["nvidia"]
        built_for = module["vermagic"].split(" ")[0] if module else ""
        if kernel["running"] and not kernel["bootable"]:
            host.warn(
                "running_kernel_gone",
                f"The running kernel {release} has no image in /boot, or no modules in /lib/modules.",
                "Reboot into an installed kernel first. In a container, look at the machine that it runs on instead.",
            )
        if kernel["next_boot"] and some_module and not module:
            host.fail(
                "next_boot_without_module",
                f"Kernel {release}, which may start next, has no NVIDIA module.",
                f"Before any reboot: install {kernel['headers_package']} and run dkms autoinstall -k {release}",
            )
        if not module:
            continue
        if built_for != release:
            host.fail(
                "module_of_other_kernel",
                f"{module['path']} was built for kernel {built_for or '(unknown)'}, not {release}.",
                f"Build it again: dkms install --force -k {release}",
            )
        if kernel["running"] and loaded not in (None, module["version"]):
            host.warn(
                "loaded_module_differs",
                f"The loaded NVIDIA module is {loaded}; the one on disk for the running kernel is {module['version']}. "
                "Programs that start now fail with a driver/library version mismatch.",
                "Drain the host and reboot it.",
            )
        if probe["secure_boot"] == "enabled" and kernel["next_boot"]:
            _judge_signature(host, module, release, probe["mok"])


def _judge_signature(host: _Host, module: dict[str, Any], release: str, mok: dict[str, Any]) -> None:
    if not module["signer"]:
        host.fail(
            "module_unsigned",
            f"Secure boot is on, and {module['path']} is not signed: kernel {release} will reject it.",
            "Use the distribution's signed modules, or let dkms sign: install openssl, then dkms install --force.",
        )
    elif "/dkms/" in module["path"] and mok["enrolled"] is False:
        steps = "Reboot, choose `Enroll MOK` at the console and give the password of the request."
        host.fail(
            "mok_not_enrolled",
            f"Secure boot is on, and the key that signed {module['path']} ({module['signer']}) is not enrolled.",
            steps if mok["pending"] else f"Run mokutil --import {mok['certificate']}. " + steps,
        )
