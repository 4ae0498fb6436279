"""A job brings a model's files by the real `hf` client, from a hub that misbehaves, and nothing unverified counts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hub_server import COMMIT, MODEL, Fault, HubServer, model, sha256_of

from vllm_fleet.target.weights import peer, sources
from vllm_fleet.target.weights.files import MANIFEST, Manifest, WeightsError
from vllm_fleet.target.weights.job import Report, run
from vllm_fleet.target.weights.sources import HubSource, Job

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
HF = shutil.which("hf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CANARY = "hf_canary5f1c9d7e"
NO_CLIENT = "/nonexistent/hf"  # a test that must end before any client is started


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


class Bench:
    """A folder to fill, and jobs that fill it."""

    def __init__(self, path: Path, hub: HubServer) -> None:
        self.hub = hub
        self.folder = path / "model"
        self.home = path / "home"
        self.home.mkdir()
        self.lines: list[str] = []
        self.report = Report(self.home / "status.json", self.lines.append)

    def options(self, **changed: Any) -> dict[str, Any]:
        return {
            "kind": "hub",
            "id": MODEL,
            "commit": COMMIT,
            "folder": str(self.folder),
            "manifest": str(self.folder / MANIFEST),
            "endpoint": self.hub.url,
            "hf": HF,
            "stall_minutes": 0.1,
            "pause_seconds": 0.05,
        } | changed

    def run(self, token_file: Path | None = None, **changed: Any) -> Manifest:
        return run(Job(**self.options(**changed)), self.report, token_file=token_file, home=self.home)

    def refused(self, **changed: Any) -> str:
        with pytest.raises(WeightsError) as error:
            self.run(**changed)
        manifest = Manifest.read(self.folder / MANIFEST)
        assert manifest is None or not manifest.complete
        message = str(error.value)
        assert "\n" not in message
        assert message.endswith(".")
        return message

    def holds(self) -> dict[str, bytes]:
        """What lies in the folder, but for the manifest and its lock."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.startswith(MANIFEST)
        }


@pytest.fixture
def bench(tmp_path: Path, hub: HubServer) -> Bench:
    return Bench(tmp_path, hub)


# What goes well.


def test_every_file_is_brought_verified_and_noted(bench: Bench, hub: HubServer) -> None:
    manifest = bench.run()
    assert bench.holds() == hub.files  # no notes of the client, no partial files
    assert manifest.complete
    assert manifest.compared == "publisher"
    assert {name: entry["sha256"] for name, entry in manifest.files.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in hub.files.items()
    }
    assert bench.report.status["state"] == "done"
    assert bench.report.status["done_bytes"] == bench.report.status["total_bytes"] == manifest.size
    assert [oct(path.stat().st_mode & 0o777) for path in (bench.folder / "config.json", bench.folder / FIRST)] == [
        "0o444",
        "0o444",
    ]


def test_a_second_run_asks_nobody_and_reads_only_what_changed(bench: Bench, hub: HubServer) -> None:
    bench.run()
    hub.seen.clear()
    os.utime(bench.folder / FIRST)  # another time, the same bytes
    bench.run(hf=NO_CLIENT)
    assert hub.seen == []


def test_a_changed_and_a_missing_file_are_brought_again_and_only_they(bench: Bench, hub: HubServer) -> None:
    bench.run()
    hub.seen.clear()
    shard = bench.folder / FIRST
    shard.chmod(0o644)
    shard.write_bytes(bytes(len(hub.files[FIRST])))
    (bench.folder / "config.json").unlink()
    bench.run()
    assert bench.holds() == hub.files
    assert (hub.asked(FIRST), hub.asked("config.json"), hub.asked(SECOND)) == (1, 1, 0)


def test_what_was_excluded_is_not_asked_for(bench: Bench, hub: HubServer) -> None:
    hub.files["original/consolidated.pth"] = bytes(200_000)
    bench.run(exclude=["original/*"])
    assert "original/consolidated.pth" not in bench.holds()
    assert hub.asked("original") == 0


def test_one_file_of_many_with_a_name_that_reads_as_a_pattern(bench: Bench, hub: HubServer) -> None:
    hub.files = {"config.json": b"{}", "notes[1].md": b"one", "notes1.md": b"two"}
    bench.run()
    assert bench.holds() == hub.files


def test_a_transfer_that_was_cut_off_goes_on_where_its_manifest_is(bench: Bench, hub: HubServer) -> None:
    """The job is killed like a host that loses power, with one file there and another hanging."""
    hub.faults = [Fault("stall", name=SECOND, times=1)]
    job = bench.home / "job.json"
    job.write_text(json.dumps(bench.options(stall_minutes=5)))
    command = [sys.executable, "-m", "weights.program", "fetch", str(job)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "plugins/module_utils")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(bench.folder.rglob("*.incomplete")) or len(bench.holds()) < len(hub.files):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.5)  # one more look of the job, which verifies what is whole
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], check=False, capture_output=True, text=True
    )
    for pid in (process.pid, *map(int, children.stdout.split())):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert list(bench.folder.rglob("*.incomplete"))
    hub.seen.clear()
    bench.run()
    assert bench.holds() == hub.files
    assert (hub.asked(FIRST), hub.asked(SECOND)) == (0, 1)


# T23 and T24: transfers that stop, and what they leave.


def test_a_standstill_is_ended_and_only_that_file_begun_again(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("stall", name=FIRST, times=1, share=0.98)]
    bench.run()
    assert bench.holds() == hub.files
    assert (hub.asked(f"content/{FIRST}"), hub.asked(f"content/{SECOND}")) == (2, 1)
    assert any("nothing arrived for 0.1 min; 1 of 8 files" in line for line in bench.lines)


def test_xet_that_hangs_is_given_up_for_plain_http(bench: Bench, hub: HubServer) -> None:
    hub.xet = True
    bench.run()
    assert bench.holds() == hub.files
    assert hub.asked("/cas/") > 0  # the client did go to Xet's storage
    assert any("without Xet" in line for line in bench.lines)


def test_files_that_plain_http_cannot_carry_stay_with_xet(bench: Bench) -> None:
    source = HubSource(Job(**bench.options()), None, bench.home)
    assert source.can_do_without_xet([sources.PLAIN_HTTP_LIMIT_BYTES])
    assert not source.can_do_without_xet([1, sources.PLAIN_HTTP_LIMIT_BYTES + 1])
    assert source.command(["a"], plain=False)[1]["HF_HUB_DISABLE_XET"] == "0"
    assert source.command(["a"], plain=True)[1]["HF_HUB_DISABLE_XET"] == "1"


def test_a_dropped_connection_is_taken_up_by_the_client_itself(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("drop", name=FIRST, times=1)]
    bench.run()
    assert bench.holds() == hub.files
    assert hub.asked(f"content/{FIRST}") == 2
    assert not any("missing" in line for line in bench.lines)


def test_a_slow_server_is_waited_for(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("slow", seconds=0.3)]
    bench.run()
    assert bench.holds() == hub.files
    assert not any("missing" in line for line in bench.lines)


def test_a_server_that_only_breaks_is_given_up_and_the_rest_kept(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("status", name=FIRST, code=500)]
    message = bench.refused(tries=3)
    assert f"1 of {len(hub.files)} files" in message
    assert "3 tries in a row" in message
    assert FIRST in message
    assert "500" in message  # what the client said
    assert set(hub.files) - set(bench.holds()) == {FIRST}
    hub.faults.clear()
    hub.seen.clear()
    bench.run()
    assert hub.asked(SECOND) == 0


def test_a_client_that_says_all_is_well_is_not_believed(bench: Bench) -> None:
    message = bench.refused(hf="/bin/true", tries=2)
    assert "the client ended as if all files were there" in message


def test_old_partial_files_go(bench: Bench, hub: HubServer) -> None:
    notes = bench.folder / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    (notes / "x.0badc0de.incomplete").write_bytes(b"half")
    bench.run()
    assert bench.holds() == hub.files


# Refusals: known before a client is started, told in one paragraph.


@pytest.mark.parametrize(
    ("faults", "changed", "told"),
    [
        ([], {"commit": "f" * 40}, "has no revision ffff"),
        ([], {"id": "org/other"}, "shows no repository org/other"),
        ([Fault("status", "tree", code=401)], {}, "model_weights_token"),
        ([Fault("status", "tree", code=403)], {}, "refuses org/tiny"),
        ([Fault("status", "tree", code=404, error_code="RevisionNotFound")], {}, "Files and versions"),
        ([Fault("html", "tree")], {}, "something else than JSON"),
        ([Fault("status", "tree", code=503)], {}, "answered HTTP 503, 3 times"),
        ([Fault("status", "resolve", code=403, error_code="GatedRepo")], {}, "Accept its terms"),
        ([], {"endpoint": "http://127.0.0.1:9"}, "does not answer"),
        ([], {"endpoint": "ftp://host"}, "not an http or https address"),
    ],
)
def test_a_refusal_is_told_before_a_client_is_started(
    bench: Bench, hub: HubServer, faults: list[Fault], changed: dict[str, Any], told: str
) -> None:
    hub.faults = faults
    assert told in bench.refused(hf=NO_CLIENT, **changed)
    assert bench.holds() == {}


def test_too_many_requests_are_waited_out_as_long_as_the_server_asks(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("status", "tree", times=1, code=429, headers={"Retry-After": "1"})]
    bench.run()
    assert bench.holds() == hub.files
    assert any("next try in 1 s" in line for line in bench.lines)


def test_a_file_that_is_listed_and_not_there_is_named(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("status", "resolve", name=SECOND, code=404, error_code="EntryNotFound")]
    assert f"lists {SECOND}" in bench.refused()


@pytest.mark.parametrize(
    "name", ["../../etc/cron.d/x", "/etc/passwd", f"sub/{MANIFEST}", ".cache/huggingface/x", "a//b"]
)
def test_names_that_lead_out_of_the_folder_are_refused(bench: Bench, hub: HubServer, name: str) -> None:
    hub.files[name] = b"evil"
    assert "outside of its folder" in bench.refused(hf=NO_CLIENT)


def test_code_that_the_card_does_not_list_is_refused_before_the_transfer(bench: Bench, hub: HubServer) -> None:
    hub.files |= {"modeling_tiny.py": b"import os\n", "tool.py": b"\n"}
    message = bench.refused(hf=NO_CLIENT, code_files=["tool.py"])
    assert "does not allow: modeling_tiny.py." in message
    assert "--trust-remote-code" in message


# Content.


def test_wrong_bytes_are_brought_again(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("wrong", name=FIRST, times=1)]
    bench.run()
    assert bench.holds() == hub.files
    assert any(f"{FIRST} is removed: SHA-256" in line for line in bench.lines)


@pytest.mark.parametrize(("name", "how"), [(FIRST, "SHA-256"), ("config.json", "git blob id")])
def test_bytes_that_stay_wrong_are_never_kept(bench: Bench, hub: HubServer, name: str, how: str) -> None:
    hub.faults = [Fault("wrong", name=name)]
    message = bench.refused()
    assert f"gives out a {name} that is not the one" in message
    assert how in message
    assert name not in bench.holds()


def test_a_stranger_in_the_folder_is_refused(bench: Bench) -> None:
    bench.folder.mkdir()
    (bench.folder / "modeling_evil.py").write_text("import os\n")
    assert "do not belong to org/tiny" in bench.refused()


def test_two_jobs_never_fill_one_folder(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("slow", seconds=0.3)]
    first = threading.Thread(target=bench.run)
    first.start()
    while not bench.lines:
        time.sleep(0.02)
    with pytest.raises(WeightsError, match="Another job fills"):
        run(Job(**bench.options()), Report(None, lambda _: None), home=bench.home)
    first.join()
    assert bench.holds() == hub.files


# A full disk: a small file system of its own, in a mount namespace of its own.


def _on_small_disk(bench: Bench, size_kib: int, *, before: str = "true", **changed: Any) -> tuple[int, str]:
    bench.folder.mkdir()
    job = bench.home / "job.json"
    job.write_text(json.dumps(bench.options(**changed)))
    script = (
        f"mount -t tmpfs -o size={size_kib}k none {bench.folder} && {{ {before} & "
        f"{sys.executable} -m weights.program fetch {job}; status=$?; find {bench.folder} -type f; exit $status; }}"
    )
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    done = subprocess.run(
        [*unshare, "sh", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "plugins/module_utils")},
    )
    return done.returncode, done.stdout + done.stderr


def test_room_for_the_worst_case_is_required_before_a_byte_comes(bench: Bench, hub: HubServer) -> None:
    rc, output = _on_small_disk(bench, 1000, hf=NO_CLIENT)  # the files take 586 KiB, the largest 293
    assert rc == 1
    assert "1000.0 KiB free" in output or "996.0 KiB free" in output, output
    assert "1.1 MiB are needed: 586.1 KiB of org/tiny are missing" in output
    assert "model_weights_root" in json.loads((bench.home / "status.json").read_text())["message"]
    assert hub.asked("/resolve/", "HEAD") == 0


def test_a_disk_that_fills_up_meanwhile_ends_in_words_and_keeps_what_is_verified(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("slow", name=FIRST, seconds=1.0)]
    fill = f"(while [ ! -e {bench.folder}/{SECOND} ]; do sleep 0.1; done; head -c 10m /dev/zero >{bench.folder}/.fill)"
    rc, output = _on_small_disk(bench, 1400, before=fill, stall_minutes=1)
    assert rc == 1
    message = json.loads((bench.home / "status.json").read_text())["message"]
    assert "free, and" in message or "No space left" in message, output
    assert f"{bench.folder}/{SECOND}" in output


# T52: the token.


def test_the_token_goes_to_the_hub_alone_and_is_told_to_nobody(
    bench: Bench, hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.token_sha256 = sha256_of(CANARY)
    token_file = tmp_path / "token"
    token_file.write_text(f"{CANARY}\n")
    token_file.chmod(0o400)
    bench.run(token_file=token_file)
    assert bench.holds() == hub.files
    sent = {path.split("/")[1] for _, path, authorization, _ in hub.seen if authorization == f"Bearer {CANARY}"}
    assert sent <= {"api", "org"}
    assert "org" in sent
    assert not [path for _, path, authorization, _ in hub.seen if path.startswith("/content/") and authorization]
    token_file.unlink()
    left = [path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    assert left == []
    assert CANARY not in "".join(bench.lines) + "".join(capfd.readouterr())


def test_a_wrong_token_is_refused_without_being_shown(bench: Bench, hub: HubServer, tmp_path: Path) -> None:
    hub.token_sha256 = sha256_of("hf_another")
    token_file = tmp_path / "token"
    token_file.write_text(CANARY)
    message = bench.refused(token_file=token_file)
    assert "for the token that was given" in message
    assert CANARY not in message


def test_the_client_finds_no_token_but_the_one_that_was_given(bench: Bench) -> None:
    command, environment = HubSource(Job(**bench.options()), None, bench.home).command(["a", "b"], plain=False)
    assert environment.get("HF_HUB_DISABLE_IMPLICIT_TOKEN") == "1"
    assert "--token" not in command


# Folders instead of a hub.


def _source(tmp_path: Path) -> Path:
    folder = tmp_path / "mounted"
    for name, content in model().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_without_checksums_is_copied_and_said_not_to_be_compared(bench: Bench, tmp_path: Path) -> None:
    manifest = bench.run(kind="folder", path=str(_source(tmp_path)))
    assert bench.holds() == model()
    assert manifest.compared == "nothing"
    assert "not compared with the publisher" in bench.lines[-1]


def test_a_folder_that_this_role_filled_brings_its_checksums(bench: Bench, tmp_path: Path) -> None:
    bench.run()
    copy = tmp_path / "mounted"
    shutil.copytree(bench.folder, copy)
    bench.folder = tmp_path / "second"
    assert bench.run(kind="folder", path=str(copy)).compared == "publisher"
    (copy / FIRST).chmod(0o644)
    (copy / FIRST).write_bytes(bytes(300_000))
    bench.folder = tmp_path / "third"
    assert f"gives out a {FIRST}" in bench.refused(kind="folder", path=str(copy))


def _bundle(tmp_path: Path, **changed: str) -> dict[str, str]:
    name = f"models/org--tiny/{COMMIT}/"
    source = _source(tmp_path)
    target = tmp_path / "bundle" / name
    target.parent.mkdir(parents=True)
    source.rename(target)
    sums = {f"{name}{path}": hashlib.sha256(content).hexdigest() for path, content in model().items()}
    other = {"wheels/vllm.whl": "0" * 64}
    (tmp_path / "bundle/manifest.json").write_text(json.dumps({"files": sums | other | changed}))
    return {
        "kind": "folder",
        "path": str(target),
        "sums": str(tmp_path / "bundle/manifest.json"),
        "sums_prefix": name,
    }


def test_a_bundle_is_held_against_its_own_checksums(bench: Bench, tmp_path: Path) -> None:
    manifest = bench.run(**_bundle(tmp_path))
    assert bench.holds() == model()
    assert manifest.compared == "bundle"


def test_a_bundle_with_another_file_is_refused(bench: Bench, tmp_path: Path) -> None:
    options = _bundle(tmp_path, **{f"models/org--tiny/{COMMIT}/config.json": "0" * 64})
    assert "gives out a config.json" in bench.refused(**options)


def test_a_bundle_without_the_model_or_a_file_of_it_is_refused(bench: Bench, tmp_path: Path) -> None:
    options = _bundle(tmp_path)
    assert "made without org/tiny" in bench.refused(**(options | {"sums_prefix": "models/org--other/x/"}))
    Path(options["path"], FIRST).unlink()
    assert f"incomplete: {FIRST}" in bench.refused(**options)


def test_a_folder_that_is_not_mounted_is_named(bench: Bench, tmp_path: Path) -> None:
    assert "Mount it" in bench.refused(kind="folder", path=str(tmp_path / "nothing"))


def test_a_folder_in_place_is_recorded_and_a_change_noticed(bench: Bench, tmp_path: Path) -> None:
    folder = _source(tmp_path)
    options = {"kind": "in_place", "folder": str(folder), "manifest": str(tmp_path / "records/a.json")}
    manifest = bench.run(**options)
    assert (manifest.compared, len(manifest.files)) == ("nothing", len(model()))
    assert not (folder / MANIFEST).exists()  # not ours to write to
    os.utime(folder / FIRST)
    bench.run(**options)
    (folder / FIRST).write_bytes(bytes(300_000))
    (folder / "README.md").unlink()
    with pytest.raises(WeightsError, match=rf"README.md gone; {FIRST}: SHA-256 .* remove {tmp_path}/records/a.json"):
        bench.run(**options)


# One host for the others.


@pytest.fixture
def seed(bench: Bench) -> Iterator[str]:
    """A host that has the files hands them on; gives the address that begins with their fingerprint."""
    manifest = bench.run()
    with peer.server(str(bench.folder), str(bench.folder / MANIFEST), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/{manifest.fingerprint()}"
        server.shutdown()


def test_another_host_takes_the_files_and_holds_them_against_the_fingerprint(
    bench: Bench, seed: str, tmp_path: Path
) -> None:
    bench.folder, expected = tmp_path / "second", seed.rsplit("/", 1)[1]
    bench.hub.seen.clear()
    manifest = bench.run(endpoint=seed, expected=expected)
    assert bench.holds() == bench.hub.files
    assert (manifest.compared, manifest.fingerprint()) == ("peer", expected)
    assert bench.hub.seen == []


def test_a_host_that_offers_other_files_is_refused(bench: Bench, seed: str, tmp_path: Path) -> None:
    bench.folder = tmp_path / "second"
    assert "offers other files" in bench.refused(endpoint=seed, expected="0" * 64, hf=NO_CLIENT)


def test_who_does_not_know_the_fingerprint_finds_nothing(bench: Bench, seed: str, tmp_path: Path) -> None:
    bench.folder = tmp_path / "second"
    address = seed.rsplit("/", 1)[0]
    assert "shows no repository" in bench.refused(endpoint=address, hf=NO_CLIENT)
    assert "shows no repository" in bench.refused(endpoint=f"{address}/{'0' * 64}", hf=NO_CLIENT)


def test_what_is_not_verified_is_not_handed_on(bench: Bench, hub: HubServer) -> None:
    hub.faults = [Fault("status", name=FIRST, code=500)]
    bench.refused(tries=1)
    with pytest.raises(WeightsError, match="nothing to hand on"):
        peer.server(str(bench.folder), str(bench.folder / MANIFEST), "127.0.0.1", 0)
