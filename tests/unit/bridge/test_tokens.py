"""Tokens and what is proved with them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from hypha_ray.bridge.access import make_token, prove, proves, read_token
from hypha_ray.errors import AuthenticationError


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
