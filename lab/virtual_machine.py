"""The virtual machines of the lab: QEMU, with GPUs that exist in their config space only.

Their CPUs are emulated (TCG), so no virtualisation is asked of this machine. They answer SSH as ops@127.0.0.1, reboot
like a machine, and lose what was written to their disk when they are stopped.

Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from make_host_tree import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from pci_devices import PciDevice

_BOOT_SECONDS = 300  # under a minute on an idle machine of two cores
_ATTEMPTS = 3  # QEMU died at once and without a word in one of 14 starts with such devices


@dataclass(frozen=True)
class VirtualMachine:
    """One machine, and the command line that starts and stops it.

    Attributes:
        script: The program that defines it; its name is the machine's, and the folder of its state in .cache/lab.
        ssh_port: Where its SSH answers on this machine.
        prepare: Makes what it boots, in that folder.
        hardware: QEMU's arguments beyond those that all machines have.
        gpus: By the PCI root port that each is plugged into.
    """

    script: Path
    ssh_port: int
    prepare: Callable[[Path], None]
    hardware: Callable[[Path], list[str]]
    gpus: Callable[[], dict[str, PciDevice]]

    @property
    def state(self) -> Path:
        """Folder of everything that belongs to it."""
        return state_folder(self.script)

    def main(self) -> int:
        """Do what the command line says."""
        parser = argparse.ArgumentParser(description=f"Boot or stop the lab's {self.script.stem}.")
        command = parser.add_subparsers(dest="command", required=True, metavar="start|stop")
        command.add_parser("start")
        command.add_parser("stop")
        command.add_parser("run")
        chosen = parser.parse_args().command
        if chosen == "run":
            return self._run()
        self._start() if chosen == "start" else self._stop()
        return 0

    def _run(self) -> int:
        """Run the machine until it ends: QEMU, and the GPUs' config space in threads of this process."""
        gpus = self.gpus()
        sockets = {port: device.socket.fileno() for port, device in gpus.items()}
        command = [
            *("qemu-system-x86_64", "-name", f"vllm-fleet-{self.script.stem}", "-nodefaults", "-no-user-config"),
            *("-display", "none", "-machine", "q35", "-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max"),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.ssh_port}-:22"),
            *("-device", "virtio-net-pci,netdev=net,romfile="),
            *("-drive", f"if=none,id=disk,file={self.state / 'root.img'},format=raw,snapshot=on,cache=unsafe"),
            *("-device", "virtio-blk-pci,drive=disk,bus=pcie.0"),
            *("-serial", f"file:{self.state / 'console.log'}"),
            *self.hardware(self.state),
        ]
        for port, descriptor in sockets.items():
            command += ["-device", f"x-pci-proxy-dev,bus={port},fd={descriptor}"]
        with subprocess.Popen(command, pass_fds=list(sockets.values())) as qemu:
            signal.signal(signal.SIGTERM, lambda *_: qemu.terminate())
            for device in gpus.values():
                device.serve()
            return qemu.wait()

    def _answers(self) -> bool:
        """Whether an SSH server greets: QEMU itself accepts connections long before the guest does."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.ssh_port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
        return False

    def _start(self) -> None:
        """Boot and wait for SSH. A machine that runs already is left alone."""
        if self._running() is not None:
            return
        self.state.mkdir(parents=True, exist_ok=True)
        self.prepare(self.state)
        host_key = (self.state / "host_key.pub").read_text(encoding="utf-8")
        known_hosts = f"[127.0.0.1]:{self.ssh_port} {host_key}"
        (self.state / "known_hosts").write_text(known_hosts, encoding="utf-8")
        log_file = self.state / "qemu.log"
        for _ in range(_ATTEMPTS):
            with log_file.open("w", encoding="utf-8") as log:
                process = subprocess.Popen(
                    [sys.executable, self.script, "run"], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
            (self.state / "pid").write_text(str(process.pid), encoding="utf-8")
            deadline = time.monotonic() + _BOOT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                if self._answers():
                    return
                time.sleep(1)
            if process.poll() is None:
                self._stop()
                sys.exit(f"The machine did not answer on SSH within {_BOOT_SECONDS} s; see {self.state}/console.log.")
            print(f"QEMU ended with {process.returncode}: {log_file.read_text(encoding='utf-8')}")
        sys.exit(f"QEMU did not stay up in {_ATTEMPTS} attempts; its last words are above.")

    def _running(self) -> int | None:
        """Process id of the machine, None when it is not up."""
        with suppress(OSError, ValueError):
            pid = int((self.state / "pid").read_text(encoding="utf-8"))
            if self.script.name in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8"):
                return pid
        return None

    def _stop(self) -> None:
        """End the machine, if there is one."""
        pid = self._running()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            while self._running() is not None:
                time.sleep(0.1)
        (self.state / "pid").unlink(missing_ok=True)


def state_folder(script: Path) -> Path:
    """Where the machine that `script` defines keeps what belongs to it."""
    return REPOSITORY / ".cache" / "lab" / script.stem
