"""PCI devices that exist in their config space only, for a QEMU machine: what an operating system enumerates, no more.

QEMU's stock device `x-pci-proxy-dev` leaves every access to its config space to another process, over a socket. This is
the other end of that socket. The protocol is in QEMU's source, include/hw/remote/mpqemu-link.h (read in 7.2): a header
of command and size, then the data; each access is answered by one number.

Standard library only.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading

# enum MPQemuCmd
_RETURN, _CONFIG_WRITE, _CONFIG_READ, _BAR_WRITE, _BAR_READ, _RESET = 1, 2, 3, 4, 5, 7
_HEADER = struct.Struct("<i4xQ")  # command, size of the data
_ACCESS = struct.Struct("<IIi")  # struct PciConfDataMsg: address, value, length
_FD_BYTES = array.array("i").itemsize
_MOST_FDS = 8  # the guest's memory regions come as file descriptors, which nothing here reads

CONFIG_BYTES = 256
_EXPRESS = 0x40  # where the PCI Express capability is put


class PciDevice:
    """One PCI Express endpoint without memory or interrupts.

    Args:
        vendor: Vendor id.
        device: Device id.
        class_code: Base class and subclass, 0x0302 for a 3D controller.
        subsystem: Subsystem vendor and device id.
        link: (generation as built, generation as trained, width).
    """

    def __init__(
        self, *, vendor: int, device: int, class_code: int, subsystem: tuple[int, int], link: tuple[int, int, int]
    ) -> None:
        """Fill the config space (PCI Express base specification, 7.5.1 and 7.5.3)."""
        self._config = bytearray(CONFIG_BYTES)
        self._writable = bytearray(CONFIG_BYTES)
        generation, trained, width = link
        capability_list = 0x10  # status register, bit 4
        for offset, layout, values in (
            (0x00, "<4H", (vendor, device, 0, capability_list)),
            (0x08, "<BBH", (0xA1, 0, class_code)),  # revision, programming interface, class
            (0x2C, "<2H", subsystem),
            (0x34, "<B", (_EXPRESS,)),
            (_EXPRESS, "<BBH", (0x10, 0, 0x0002)),  # capability id, no next one, version 2 of an endpoint
            (_EXPRESS + 0x0C, "<I", (width << 4 | generation,)),  # link capabilities
            (_EXPRESS + 0x12, "<H", (width << 4 | trained,)),  # link status
            (_EXPRESS + 0x2C, "<I", ((1 << generation + 1) - 2,)),  # link capabilities 2: speeds 1 to `generation`
        ):
            struct.pack_into(layout, self._config, offset, *values)
        struct.pack_into("<H", self._writable, 0x04, 0x0507)  # command
        self._writable[0x0C] = self._writable[0x3C] = 0xFF  # cache line size, interrupt line
        self._ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def serve(self) -> None:
        """Answer accesses from a thread of their own, until QEMU ends. Call it when QEMU has `socket`."""
        self.socket.close()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while header := self._receive(_HEADER.size):
            command, size = _HEADER.unpack(header)
            data = self._receive(size) if size else b""
            if command == _CONFIG_READ:
                self._reply(self._read(*_ACCESS.unpack_from(data)))
            elif command == _CONFIG_WRITE:
                self._write(*_ACCESS.unpack_from(data))
                self._reply(0)
            elif command in (_BAR_READ, _BAR_WRITE, _RESET):
                self._reply(0)

    def _read(self, address: int, _: int, length: int) -> int:
        return int.from_bytes(self._config[address : address + length], "little")

    def _write(self, address: int, value: int, length: int) -> None:
        for offset, byte in zip(range(address, address + length), value.to_bytes(8, "little"), strict=False):
            mask = self._writable[offset]
            self._config[offset] = self._config[offset] & ~mask | byte & mask

    def _reply(self, value: int) -> None:
        self._ours.sendall(_HEADER.pack(_RETURN, 8) + value.to_bytes(8, "little"))

    def _receive(self, size: int) -> bytes:
        """So many bytes, or none when QEMU has ended."""
        received = b""
        while len(received) < size:
            part, ancillary, _, _ = self._ours.recvmsg(size - len(received), socket.CMSG_SPACE(_MOST_FDS * _FD_BYTES))
            for _, _, data in ancillary:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) // _FD_BYTES * _FD_BYTES])
                for descriptor in descriptors:
                    os.close(descriptor)
            if not part:
                return b""
            received += part
        return received
