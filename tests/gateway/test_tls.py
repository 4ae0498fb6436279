"""TLS with a certificate that the gateway makes itself, and what happens when it ends."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import ROLE, ask, chat

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Fleet

COMMAND = ROLE / "files" / "gateway-certificate"


def lasting(folder: Path, days: int) -> Path:
    """The command that the role installs, whose certificates last so long."""
    command = folder / "command"
    command.write_text(COMMAND.read_text().replace("\nDAYS = 90", f"\nDAYS = {days}"))
    return command


def make(folder: Path, *after: str, command: Path = COMMAND) -> str:
    """Run the command that the role installs."""
    done = subprocess.run([sys.executable, command, folder, *after], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def served(port: int) -> str:
    """The certificate that clients are shown."""
    return ssl.get_server_certificate(("127.0.0.1", port))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert shutil.which("openssl"), "openssl is not installed"
    folder = tmp_path / "tls"
    folder.mkdir()
    (folder / "names").write_text("gateway.example.com\nlocalhost\n127.0.0.1\n")
    return folder


def test_clients_that_trust_the_authority_speak_tls_and_others_do_not(fleet: Fleet, folder: Path) -> None:
    assert make(folder).startswith("Made a certificate for gateway.example.com, localhost, 127.0.0.1, valid until ")
    gateway = fleet(count=1, model_gateway_tls="self_made", _model_gateway_tls=str(folder))
    trusting = ssl.create_default_context(cafile=folder / "authority.pem")
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    assert chat(gateway.port, tls=trusting).status == 200
    assert len(chat(gateway.port, 20, stream=True, tls=trusting).events) == 20
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(gateway.port, tls=ssl.create_default_context())
    with pytest.raises(http.client.RemoteDisconnected):
        ask(gateway.port)  # without TLS nothing is said


def test_what_was_made_stays_until_it_is_due_or_its_names_change(folder: Path) -> None:
    make(folder)
    first, authority = (folder / "self_made.pem").read_text(), (folder / "authority.pem").read_text()
    assert make(folder) == ""
    assert (folder / "self_made.pem").read_text() == first
    (folder / "names").write_text("other.example.com\n")
    assert "other.example.com" in make(folder)
    assert (folder / "self_made.pem").read_text() != first
    assert (folder / "authority.pem").read_text() == authority  # clients trust it: it stays
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.glob("*.[kp]e[ym]")} == {
        "authority.key": 0o400,
        "authority.pem": 0o444,
        "self_made.pem": 0o400,
    }


def test_a_certificate_that_ends_is_made_anew_and_clients_notice_nothing(fleet: Fleet, folder: Path) -> None:
    make(folder, command=lasting(folder, 20))  # under a third is left
    gateway = fleet(count=1, model_gateway_tls="self_made", _model_gateway_tls=str(folder))
    trusting = ssl.create_default_context(cafile=folder / "authority.pem")
    before = served(gateway.port)
    assert "reload" in make(folder, "echo", "reload")
    gateway.reload()
    assert served(gateway.port) != before
    assert ask(gateway.port, tls=trusting).status == 200


def test_a_renewal_whose_reload_failed_is_done_again(folder: Path) -> None:
    command = [sys.executable, COMMAND, folder]
    assert subprocess.run([*command, "false"], check=False, capture_output=True).returncode != 0
    assert "reload" in make(folder, "echo", "reload")
    assert make(folder, "echo", "reload") == ""


def test_an_authority_that_ends_is_named(folder: Path) -> None:
    make(folder)
    days = 10 * 365 + 3
    done = subprocess.run([sys.executable, lasting(folder, days), folder], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"ends within {days} days" in done.stderr
    assert "hand out the new authority.pem" in done.stderr


def test_a_given_certificate_is_served_with_its_chain(fleet: Fleet, folder: Path) -> None:
    make(folder)
    (folder / "given.pem").write_text((folder / "self_made.pem").read_text())
    gateway = fleet(count=1, model_gateway_tls="given", _model_gateway_tls=str(folder))
    trusting = ssl.create_default_context(cafile=folder / "authority.pem")
    assert ask(gateway.port, tls=trusting).status == 200
    assert served(gateway.port) in (folder / "given.pem").read_text()


def test_browsers_and_clients_may_speak_http_2(fleet: Fleet, folder: Path) -> None:
    make(folder)
    gateway = fleet(count=1, model_gateway_tls="self_made", _model_gateway_tls=str(folder))
    context = ssl.create_default_context(cafile=folder / "authority.pem")
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", gateway.port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as client,
    ):
        assert client.selected_alpn_protocol() == "h2"
