"""A real HAProxy with the role's configuration, over stand-in engines, all on loopback and without root."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar, trust_as_template

from vllm_fleet.gateway import backends

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator

REPOSITORY = Path(__file__).parents[2]
ROLE = REPOSITORY / "roles" / "model_gateway"
STAND_IN = REPOSITORY / "lab" / "stand_in_engine.py"
SBIN = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"  # where Debian has haproxy, and no user's PATH
HAPROXY = shutil.which("haproxy", path=SBIN)
MODEL = "tiny"
BACKEND = "model-tiny"
ENGINE_KEY = "engine-key-of-no-value"
KEYS = {"alice": "alice-key-of-no-value", "bob": "bob-key-of-no-value"}
init_plugin_loader()  # Ansible's filters, ours among them
INTERVAL_SECONDS = 1  # between checks; whole seconds, as the role has it


def wait_for(what: Callable[[], Any], seconds: float = 15) -> Any:
    """Return what `what` returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
    return found


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server((address, 0)) as taken:
        return int(taken.getsockname()[1])


# --- Clients ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a client got. `seconds` are the arrival times of the parts of its body, from when it was asked for."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: list[float]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return dict(error)

    @property
    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.body.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def ask(
    port: int,
    path: str = "/v1/models",
    payload: dict[str, Any] | bytes | Iterable[bytes] | None = None,
    *,
    key: str | None = KEYS["alice"],
    headers: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float = 60,
) -> Answer:
    """Send one request on a connection of its own: GET without a payload, POST with one."""
    start = time.monotonic()
    connection = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout, context=tls)
        if tls
        else http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    )
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    body = json.dumps(payload).encode() if isinstance(payload, dict) else payload
    with contextlib.closing(connection):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent: read why
            connection.request("POST" if body is not None else "GET", path, body, sent | (headers or {}))
        response = connection.getresponse()
        parts, seconds = [], []
        while part := response.read1(65536):
            parts.append(part)
            seconds.append(time.monotonic() - start)
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, b"".join(parts), seconds)


def chat(port: int, max_tokens: int = 8, *, stream: bool = False, model: str = MODEL, **options: Any) -> Answer:
    """Ask for a chat of so many tokens."""
    payload = {
        "model": model,
        "messages": [{"role": "user", "content": "a prompt that no log may show"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    return ask(port, "/v1/chat/completions", payload, **options)


class Load:
    """Clients that chat without a pause while the block runs; `answers` afterwards, exceptions included."""

    def __init__(self, port: int, clients: int, **options: Any) -> None:
        self.answers: list[Answer | Exception] = []
        self._arguments = (port, options)
        self._pool = ThreadPoolExecutor(clients)
        self._clients = clients
        self._stop = threading.Event()
        self._running: list[Future[None]] = []

    def _client(self) -> None:
        port, options = self._arguments
        while not self._stop.is_set():
            try:
                self.answers.append(chat(port, **options))
            except (OSError, http.client.HTTPException) as error:
                self.answers.append(error)

    def __enter__(self) -> Self:
        self._running = [self._pool.submit(self._client) for _ in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._running:
            client.result()
        self._pool.shutdown()

    @property
    def failed(self) -> list[Answer | Exception]:
        return [answer for answer in self.answers if not isinstance(answer, Answer) or answer.status != 200]


# --- What is behind the gateway ---------------------------------------------------------------------------------------


class Agent:
    """What the gateway needs of a host's health agent: `GET /replicas/NAME`, its word in the reason phrase."""

    def __init__(self, address: str, port: int) -> None:
        self.words: dict[str, str] = {}  # by replica; "up" where nothing is said
        self.asked = 0
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                agent.asked += 1
                word = agent.words.get(self.path.removeprefix("/replicas/"), "up")
                self.send_response(200 if word == "up" else 503, word)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Keep the test output clean."""

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Replica:
    """A stand-in engine of its own process."""

    name: str
    address: str
    port: int
    folder: Path
    places: int
    environment: dict[str, str]
    model: str = MODEL
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        command = [
            *(sys.executable, str(STAND_IN), "serve", f"/weights/{self.name}", "--served-model-name", self.model),
            *("--host", self.address, "--port", str(self.port), "--max-num-seqs", str(self.places)),
            *("--reasoning-parser", "minimax_m2", "--shutdown-timeout", "30"),
        ]
        environment = {"STAND_IN_FAULT_FILE": str(self.folder / f"{self.name}.fault"), "VLLM_API_KEY": ENGINE_KEY}
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=os.environ | environment | self.environment, stderr=log)
        wait_for(self.listens)

    def listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), timeout=1):
            return True
        return False

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    def misbehave(self, fault: str) -> None:
        """Change its fault and wait until it has noticed."""
        (self.folder / f"{self.name}.fault").write_text(fault)
        time.sleep(0.15)

    def counters(self) -> dict[str, float]:
        """Its metrics, without labels but the reason a request ended for."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        found = {}
        for line in lines:
            if line.startswith("vllm:") and "_bucket" not in line:
                name, _, value = line.rpartition(" ")
                reason = name.partition('finished_reason="')[2].rstrip('"}')
                found[name.partition("{")[0].removeprefix("vllm:") + (f":{reason}" if reason else "")] = float(value)
        return found

    @property
    def finished(self) -> int:
        """How many requests it has ended, for whatever reason."""
        return int(sum(value for name, value in self.counters().items() if name.startswith("request_success_total")))

    @property
    def running(self) -> int:
        return int(self.counters()["num_requests_running"])


# --- The gateway ------------------------------------------------------------------------------------------------------


def role_variables() -> dict[str, Any]:
    """Defaults and internal variables of the role, templates in them included."""
    loader = DataLoader()
    files = (ROLE / "defaults" / "main.yml", ROLE / "vars" / "main.yml")
    return {
        name: value
        for file in files
        for name, value in loader.load_from_file(str(file), trusted_as_template=True).items()
    }


class Gateway:
    """HAProxy, configured as the role does it from the variables given."""

    def __init__(self, folder: Path, replicas: list[Replica], health_port: int, **variables: Any) -> None:
        self.folder, self.replicas = folder, replicas
        self.port, self.metrics_port = free_port(), free_port()
        self.keys = dict(KEYS)
        self.agents: list[Agent] = []
        self.variables = {
            "inventory_hostname": "gw",
            "groups": {},
            "model_gateway_bind_address": "127.0.0.1",
            "model_gateway_port": self.port,
            "model_gateway_metrics_port": self.metrics_port,
            "model_gateway_health_port": health_port,
            "model_gateway_check_interval_seconds": INTERVAL_SECONDS,
            "model_gateway_engine_key": ENGINE_KEY,
            "_model_gateway_etc": str(folder),
            "_model_gateway_run": str(folder),
            "_model_gateway_state": str(folder),
        } | variables
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str) -> str:
        """What the role would write."""
        variables = role_variables() | self.variables | {"model_gateway_api_keys": self.keys}
        templar = Templar(loader=DataLoader(), variables=variables)
        source = trust_as_template((ROLE / "templates" / template).read_text())
        text = templar.template(source, escape_backslashes=False, overrides={"trim_blocks": True})
        return str(text)

    def configure(self) -> None:
        """Write its files."""
        # Without root it stays who it is.
        lines = self.render("haproxy.cfg.j2").splitlines()
        kept = [line for line in lines if line.strip() not in {"user haproxy", "group haproxy"}]
        (self.folder / "haproxy.cfg").write_text("\n".join(kept) + "\n")
        for name in ("clients.map", "engine.map"):
            (self.folder / name).write_text(self.render(f"{name}.j2"))
        queue_length = self.variables.get("model_gateway_queue_length", 0)
        (self.folder / "settings.json").write_text(json.dumps({"queue_length": queue_length}))
        self.balance()

    def balance(self) -> bool:
        """Have the role's command write what it balances over; whether that changed something."""
        replicas = [
            {
                "name": r.name,
                "bind_address": r.address,
                "port": r.port,
                "model": r.model,
                "max_num_seqs": r.places,
                "max_model_len": 2048,
            }
            for r in self.replicas
        ]
        change = {"put": backends({"gw": {"replicas": replicas}}, {}, ["gw"], "gw"), "only": ["gw"]}
        command = [sys.executable, str(ROLE / "files" / "gateway-backends"), "--folder", str(self.folder)]
        done = subprocess.run(command, input=json.dumps(change), check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return bool(json.loads(done.stdout)["changed"])

    def start(self) -> Self:
        (self.folder / "servers.state").write_text("")
        self.configure()
        assert HAPROXY, "haproxy is not installed: `make setup` brings it"
        config = ["-f", str(self.folder / "haproxy.cfg"), "-f", str(self.folder / "backends.cfg")]
        checked = subprocess.run([HAPROXY, "-c", "-q", *config], check=False, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")
        with (self.folder / "haproxy.log").open("ab") as log:
            self._process = subprocess.Popen([HAPROXY, "-W", *config], stdout=log, stderr=subprocess.STDOUT)
        wait_for(lambda: self.listens() and not self.unjudged())
        return self

    def listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def reload(self) -> None:
        """As the unit does it: keep server state, then let a new worker take over."""
        self.configure()
        workers = self.command("show info")
        arguments = [str(self.folder / name) for name in ("admin.sock", "servers.state", "backends.json")]
        subprocess.run([sys.executable, ROLE / "files" / "gateway-reload", *arguments], check=True)
        assert self._process
        self._process.send_signal(signal.SIGUSR2)
        pid = next(line for line in workers.splitlines() if line.startswith("Pid:"))
        wait_for(lambda: pid not in self.command("show info").splitlines())

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)
            self._process = None

    def command(self, text: str) -> str:
        """Ask the admin socket; empty while nobody listens there."""
        with socket.socket(socket.AF_UNIX) as admin:
            try:
                admin.connect(str(self.folder / "admin.sock"))
            except OSError:
                return ""
            admin.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def servers(self) -> dict[str, dict[str, str]]:
        """HAProxy's own view, by replica."""
        header, *rows = self.command("show stat").lstrip("# ").splitlines() or [""]
        table = [dict(zip(header.split(","), row.split(","), strict=False)) for row in rows if row]
        return {r["svname"].removeprefix("gw."): r for r in table if r["svname"].startswith("gw.")}

    def unjudged(self) -> list[str]:
        """Replicas whose first verdicts are not in."""
        rows = self.servers() or {"": {}}
        return [
            name
            for name, row in rows.items()
            if row.get("check_status", "INI") == "INI" or row.get("agent_status", "INI") == "INI"
        ]

    def status(self, replica: Replica) -> str:
        return self.servers()[replica.name]["status"]

    @property
    def log(self) -> str:
        return (self.folder / "haproxy.log").read_text()


Fleet = Callable[..., Gateway]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Make a gateway over so many replicas, each on a loopback address of its own, like hosts."""
    with contextlib.ExitStack() as undo:

        def make(
            count: int = 2, places: int = 8, environment: dict[str, str] | None = None, **variables: Any
        ) -> Gateway:
            health_port = free_port()
            replicas = []
            for index in range(count):
                address = f"127.0.0.{index + 1}"
                replica = Replica(f"r-{index}", address, free_port(address), tmp_path, places, environment or {})
                undo.callback(replica.stop)
                replica.start()
                replicas.append(replica)
            gateway = Gateway(tmp_path, replicas, health_port, **variables)
            for replica in replicas:
                agent = Agent(replica.address, health_port)
                undo.callback(agent.close)
                gateway.agents.append(agent)
            undo.callback(gateway.stop)
            return gateway.start()

        yield make
