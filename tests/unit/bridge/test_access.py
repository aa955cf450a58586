"""Access to the bridge: tokens and what is proved with them, where trainers dial in, and who is let in."""

from __future__ import annotations

import queue
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from hypha_ray.bridge.access import client_tls, dial, make_token, prove, proves, read_token, server_tls
from hypha_ray.bridge.channel import Channel, Listener
from hypha_ray.errors import AuthenticationError, BridgeError, ClusterError, ConfigError
from tests.support.bridging import TOKEN, together

Listening = Callable[..., Listener]


def test_token_is_256_bits_in_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = make_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(bytes.fromhex(token.decode())) == 32 and token != make_token(tmp_path / "another")
    assert read_token(path) == token


def test_token_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        make_token(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o777])
def test_token_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    (tmp_path / "token").chmod(mode)
    with pytest.raises(AuthenticationError, match=rf"AUTH011.*others may read.*got {mode:04o}, allowed 0600"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize("content", [b"", b"x" * 64, b"5" * 63, b"5" * 65, b"5" * 64 + b"\n\n", b"\xff" * 64])
def test_what_is_no_token_is_refused_and_not_shown(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(AuthenticationError, match=r"AUTH012.*64 hexadecimal digits") as caught:
        read_token(tmp_path / "token")
    assert "555" not in str(caught.value)


def test_missing_token_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match=r"AUTH010.*No such file"):
        read_token(tmp_path / "token")


def test_proof_is_the_hmac_of_side_session_and_both_nonces() -> None:
    """Computed by ``openssl dgst -sha256 -mac hmac``, from the definition."""
    proof = prove(b"5" * 64, "trainer", b"s" * 16, b"d" * 32, b"t" * 32)
    assert proof.hex() == "77fe0eaa6e832530c9a53fe1bf88368f38cd367cd50662d3405cbcd633aa43a9"
    others = [
        prove(b"6" * 64, "trainer", b"s" * 16, b"d" * 32, b"t" * 32),
        prove(b"5" * 64, "driver", b"s" * 16, b"d" * 32, b"t" * 32),
        prove(b"5" * 64, "trainer", b"x" * 16, b"d" * 32, b"t" * 32),
        prove(b"5" * 64, "trainer", b"s" * 16, b"x" * 32, b"t" * 32),
        prove(b"5" * 64, "trainer", b"s" * 16, b"d" * 32, b"x" * 32),
    ]
    assert proves(proof, proof) and not any(proves(other, proof) for other in others)


@pytest.fixture
def listening() -> Iterator[Listening]:
    started: list[Listener] = []

    def start(address: str = "127.0.0.1:0", tls: ssl.SSLContext | None = None) -> Listener:
        started.append(Listener(address, TOKEN, 5.0, tls))
        return started[-1]

    yield start
    for listener in started:
        listener.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    ours = authority.issue_cert("127.0.0.1", "localhost")
    ours.private_key_pem.write_to_path(folder / "key.pem")
    for number, part in enumerate(ours.cert_chain_pems):
        part.write_to_path(folder / "certificate.pem", append=number > 0)
    trustme.CA().cert_pem.write_to_path(folder / "stranger.pem")
    return folder


def join(listener: Listener, tls: ssl.SSLContext | None = None, token: bytes = TOKEN) -> tuple[Channel, Channel]:
    trainer = Channel(dial(listener.address, tls), "trainer", token)
    trainer.greet("test")
    driver = listener.admit(5.0)
    assert driver is not None
    return driver, trainer


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "unix:{folder}/socket"])
def test_trainer_with_the_token_is_admitted(address: str, listening: Listening, tmp_path: Path) -> None:
    if address.startswith("[") and not _has_ipv6():
        address = "127.0.0.1:0"
    driver, trainer = join(listening(address.format(folder=tmp_path)))
    trainer.send("left")
    assert driver.receive()[0] == "left"


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_unix_socket_is_its_owners_alone_and_gone_afterwards(listening: Listening, tmp_path: Path) -> None:
    listener = listening(f"unix:{tmp_path}/socket")
    assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600
    listener.close()
    assert not (tmp_path / "socket").exists()


def test_trainer_without_the_token_is_not_admitted(listening: Listening) -> None:
    listener = listening()
    with pytest.raises(AuthenticationError, match=r"AUTH002"):
        join(listener, token=b"6" * 64)
    assert listener.admit(0.2) is None


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:6000"])
def test_network_without_tls_is_refused_on_both_sides(address: str) -> None:
    with pytest.raises(ConfigError, match=r"SEC001.*only by TLS") as caught:
        Listener(address, TOKEN, 5.0)
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match=r"SEC001"):
        dial(address)


@pytest.mark.parametrize("address", ["", "127.0.0.1", ":6000", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "a:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"CFG020"):
        dial(address)


def test_address_that_is_taken_is_said_to_be(listening: Listening, tmp_path: Path) -> None:
    for address in (listening().address, listening(f"unix:{tmp_path}/socket").address):
        with pytest.raises(ClusterError, match=r"NET001.*can't listen.*in use"):
            Listener(address, TOKEN, 5.0)


def test_nobody_there_is_said_in_time(listening: Listening, tmp_path: Path) -> None:
    listener = listening()
    listener.close()
    for address in (listener.address, f"unix:{tmp_path}/absent"):
        with pytest.raises(BridgeError, match=r"NET010.*no process can be reached") as caught:
            dial(address)
        assert caught.value.exit_code == 75


def test_tls_is_spoken_with_whom_the_authority_vouches_for(listening: Listening, certificates: Path) -> None:
    tls = server_tls(certificates / "certificate.pem", certificates / "key.pem")
    listener = listening("127.0.0.1:0", tls)
    driver, trainer = join(listener, client_tls(certificates / "authority.pem"))
    trainer.send("left")
    assert driver.receive()[0] == "left"
    with pytest.raises(BridgeError, match=r"NET011.*can't prove its identity"):
        dial(listener.address, client_tls(certificates / "stranger.pem"))
    with pytest.raises(BridgeError, match=r"NET011"):
        dial(listener.address, client_tls(None))


def test_stranger_without_tls_gets_nothing_from_one_that_speaks_it(listening: Listening, certificates: Path) -> None:
    tls = server_tls(certificates / "certificate.pem", certificates / "key.pem")
    listener = listening("127.0.0.1:0", tls)
    with pytest.raises(BridgeError):
        join(listener)
    driver, _ = join(listener, client_tls(certificates / "authority.pem"))
    assert driver.peer == "test"


@pytest.mark.parametrize(
    ("certificate", "key"), [("absent", "key.pem"), ("key.pem", "key.pem"), ("stranger.pem", "key.pem")]
)
def test_certificate_that_cannot_be_used_is_refused(certificate: str, key: str, certificates: Path) -> None:
    with pytest.raises(ConfigError, match=r"SEC005"):
        server_tls(certificates / certificate, certificates / key)
    with pytest.raises(ConfigError, match=r"SEC005"):
        client_tls(certificates / "absent")


def test_closing_hangs_up_on_strangers_and_on_whoever_waits(listening: Listening) -> None:
    listener = listening()
    silent, waiting = dial(listener.address), Channel(dial(listener.address), "trainer", TOKEN)
    waiting.greet("test")
    time.sleep(0.1)
    listener.close()
    silent.settimeout(5.0)
    assert silent.recv(100) == b""
    with pytest.raises(BridgeError, match=r"FRM008"):
        waiting.receive()


class Slow(queue.SimpleQueue[Channel]):
    """Whoever waits is faster than the thread that has put something."""

    def put(self, item: Channel, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        time.sleep(0.2)


def test_trainer_that_was_admitted_is_no_stranger_who_is_hung_up_on(listening: Listening) -> None:
    listener = listening()
    listener._admitted = Slow()
    driver, trainer = join(listener)
    listener.close()
    driver.send("done")
    assert trainer.receive()[0] == "done"


def test_oldest_strangers_have_to_go_for_new_ones(listening: Listening) -> None:
    listener = listening()
    strangers = [dial(listener.address) for _ in range(20)]
    deadline = time.monotonic() + 5.0
    while _threads() > 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _threads() <= 8
    strangers[0].settimeout(1.0)
    assert strangers[0].recv(1) == b""
    assert join(listener)[0].peer == "test"


def test_two_trainers_at_once_are_both_admitted(listening: Listening) -> None:
    listener = listening()
    both = together(lambda: join(listener), lambda: join(listener))
    assert all(isinstance(pair, tuple) for pair in both)


def _threads() -> int:
    return sum(thread.name == "bridge-stranger" for thread in threading.enumerate())
