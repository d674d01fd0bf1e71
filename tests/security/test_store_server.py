"""Bob takes the port, or the socket, of a job's embedded store that was killed. The passwords that he reads are of no
use, his answers do not end the job, and with TLS or a unix socket he reads nothing at all."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
import redis

from nvrx_slurm.batch.__main__ import default_route_address
from nvrx_slurm.jobspec.model import StoreSpec
from nvrx_slurm.journal.folder import LOOPBACK, StoreAddress
from nvrx_slurm.store.redis_client import client
from tests.fault_harness import child_of
from tests.harness import gate_plan
from tests.waiting import until

QUICK = {"heartbeat__interval": 0.2, "heartbeat__timeout": 60.0, "fence_timeout": 30.0}
AGENTS = f'for n in n1 n2; do NVRX_NODE=$n "{sys.executable}" -P -m nvrx_slurm.agent & done; wait'
ANSWERS = {"agrees": b"+OK\r\n", "refuses": b"-WRONGPASS invalid username-password pair\r\n", "is silent": b""}
SECONDS = 30.0


# ---- what bob does


def take_port(port: int, answer: str, certificate: str) -> None:
    """Listen on the port as soon as it is free. Each printed line is what one client sent first, in hex. Answers
    every read with `answer`, until the process is ended."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            listener.bind(("", port))
            break
        except OSError:
            continue
    listener.listen(128)
    say("bound")
    context = None
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0], answer.encode(), context), daemon=True).start()


def serve(connection: socket.socket, answer: bytes, context: ssl.SSLContext | None) -> None:
    try:
        link = context.wrap_socket(connection, server_side=True) if context else connection
        data = link.recv(65536)
        if data:
            say(data.hex())
        while data:
            link.sendall(answer)
            data = link.recv(65536)
    except OSError as error:
        say(f"error {error}")


def say(line: str) -> None:
    """Print a line in one write, since several threads print."""
    os.write(1, f"{line}\n".encode())


def log_in(host: str, port: int, password: str) -> str:
    """The server's answer to the password."""
    with socket.socket() as link:
        link.settimeout(SECONDS)
        link.connect((host, port))
        link.sendall(f"AUTH {password}\r\n".encode())
        return link.recv(4096).decode()


def reach(path: str) -> list[str]:
    """What happens when bob connects to a unix socket, and when he binds in its folder."""
    said = []
    with socket.socket(socket.AF_UNIX) as link:
        for attempt in (link.connect, link.bind):
            try:
                attempt(path)
                said.append("done")
            except OSError as error:
                said.append(error.strerror)
    return said


# ---- alice


@pytest.fixture
def fleet(run_local, gate, tmp_path):
    """Starts a job whose store listens beyond loopback, as the store of a job on several nodes does."""
    if default_route_address() == LOOPBACK:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("this machine has no address but loopback")

    def start(server: str):
        plan = msgspec.structs.replace(gate_plan(gate, tmp_path, spares=0, **QUICK), store=StoreSpec(server=server))
        return run_local(plan, launcher=("bash", "-c", AGENTS))

    return start


def redis_with_tls() -> str:
    """The path of Debian's server. Without one the test is skipped; in CI it fails."""
    found = shutil.which("redis-server")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("install redis-server: `make slurm-packages`")
    return found


def address_of(job) -> StoreAddress:
    address = job.folder.read_store()
    assert address is not None
    return address


def kill_store(job, server: str) -> None:
    os.kill(child_of(job.process.pid, server), signal.SIGKILL)


def passwords(lines: list[str]) -> set[str]:
    """The passwords in what clients have sent: `*2 $4 AUTH $43 <password>`."""
    parts = [bytes.fromhex(line).split(b"\r\n") for line in lines if not line.startswith("error")]
    return {words[4].decode() for words in parts if len(words) > 4 and words[2] == b"AUTH"}


def goes_on(job, gate, before) -> None:
    """Assert that the job ends with exit code 0, with the workers that it had before."""
    gate.open()
    assert job.finish() == 0, job.story()
    assert {worker.pid for worker in gate.wait(4, cycle=0).values()} == {worker.pid for worker in before.values()}
    assert [entry.n for entry in job.entries] == list(range(1, len(job.entries) + 1))


@pytest.mark.parametrize("does", ANSWERS)
def test_the_password_read_on_a_freed_port_is_of_no_use(bob, fleet, gate, does):
    """Without TLS bob gets the password of the dead store, whose port he has taken. The restarted store has another
    port and another password, every client follows it, and the job goes on."""
    job = fleet("bundled")
    before = gate.wait(4, cycle=0)
    old = address_of(job)
    port = urlsplit(old.url).port
    attack = bob.start(take_port, port, ANSWERS[does].decode(), "")
    job.process.send_signal(signal.SIGSTOP)  # so that bob is faster
    kill_store(job, "valkey-server")
    assert attack.line() == "bound"
    stolen = passwords([attack.line()])
    assert stolen == {old.password}
    job.process.send_signal(signal.SIGCONT)
    until(lambda: address_of(job) != old, "the store is announced again")
    new = address_of(job)
    assert (new.password, urlsplit(new.url).port, new.token) != (old.password, port, old.token)
    for password in stolen:
        assert "WRONGPASS" in bob.run(log_in, urlsplit(new.url).hostname, urlsplit(new.url).port, password)
    goes_on(job, gate, before)
    assert "Traceback" not in job.story()


@pytest.mark.parametrize("shows", ["no certificate", "his own certificate"])
def test_with_tls_a_freed_port_gets_no_password(bob, fleet, gate, tmp_path, common, shows):
    """Clients send nothing but a handshake to a server that does not have the job's certificate."""
    job = fleet(redis_with_tls())
    before = gate.wait(4, cycle=0)
    old = address_of(job)
    assert old.url.startswith("rediss://")
    assert old.certificate is not None
    certificate = ""
    if shows == "his own certificate":
        certificate = str(common / "bob.pem")
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=nvrx-slurm"
        subprocess.run(
            ["openssl", *words.split(), "-keyout", certificate, "-out", certificate + ".crt"],
            check=True, capture_output=True,
        )  # fmt: skip
        Path(certificate).write_text(Path(certificate).read_text() + Path(certificate + ".crt").read_text())
        Path(certificate).chmod(0o644)
    attack = bob.start(take_port, urlsplit(old.url).port, "+OK\r\n", certificate)
    job.process.send_signal(signal.SIGSTOP)
    kill_store(job, "redis-server")
    assert attack.line() == "bound"
    seen = [attack.line() for _ in range(3)]
    if certificate:
        assert all(line.startswith("error") for line in seen)  # the client has ended the handshake
    else:
        assert all(bytes.fromhex(line).startswith(b"\x16\x03") for line in seen)  # a handshake, and nothing after it
    assert passwords(seen) == set()
    job.process.send_signal(signal.SIGCONT)
    goes_on(job, gate, before)
    assert "Traceback" not in job.story()


def test_on_one_host_there_is_no_port_to_take(bob, run_local, gate, tmp_path):
    """The store of a local job listens on a unix socket in a folder that only alice can enter, also after the store's
    death."""
    job = run_local(gate_plan(gate, tmp_path, spares=0, **QUICK))
    before = gate.wait(4, cycle=0)
    old = address_of(job)
    parts = urlsplit(old.url)
    assert parts.scheme == "unix"
    path = unquote(parts.path)
    with client(old, connect_s=SECONDS, answer_s=SECONDS) as store:
        listens = store.config_get("port", "tls-port")
    assert set(listens.values()) == {b"0"} or set(listens.values()) == {"0"}
    assert bob.run(reach, path) == ["Permission denied", "Permission denied"]
    job.process.send_signal(signal.SIGSTOP)
    kill_store(job, "valkey-server")
    assert bob.run(reach, path) == ["Permission denied", "Permission denied"]
    job.process.send_signal(signal.SIGCONT)
    until(lambda: address_of(job) != old, "the store is announced again")
    new = address_of(job)
    assert new.password != old.password
    assert new.url != old.url
    assert new.token == old.token
    goes_on(job, gate, before)


def test_certificate_and_key_are_their_owners_alone(fleet, gate):
    """The key is in a file of mode 0600 in a folder of mode 0700. Clients accept the job's certificate, and no
    other."""
    job = fleet(redis_with_tls())
    gate.wait(4, cycle=0)
    address = address_of(job)
    assert (job.folder.store_dir / "key.pem").stat().st_mode & 0o777 == 0o600
    assert job.folder.store_dir.stat().st_mode & 0o777 == 0o700
    with client(address, connect_s=SECONDS, answer_s=SECONDS) as store:
        assert store.ping()
    other = job.folder.path / "other"
    other.mkdir()
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=nvrx-slurm"
    made = ["-keyout", str(other / "key"), "-out", str(other / "crt")]
    subprocess.run(["openssl", *words.split(), *made], check=True, capture_output=True)
    wrong = msgspec.structs.replace(address, certificate=(other / "crt").read_text())
    with client(wrong, connect_s=SECONDS, answer_s=SECONDS) as store, pytest.raises(redis.ConnectionError):
        store.ping()
    gate.open()
    assert job.finish() == 0, job.story()
