"""Endpoints for trainers from elsewhere: addresses and tokens of a run, on the node of its scheduler."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from hypha_ray.bridge.transport.access import UNIX, make_token, read_token, server_tls, split
from hypha_ray.bridge.transport.listener import Listener
from hypha_ray.config import Job
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.files import opener

FOLDER = "bridge"
"""Folder of the run directory: token and address of each worker whose trainer dials in."""


def address(job: Job, worker: int) -> str:
    """The address of a worker's trainer: that of the job, and the ports after it for the others."""
    host, port = split(job.bridge.listen, encrypted=job.bridge.certificate is not None)
    before = sum(job.group_of(number).dials_in for number in range(worker))
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port + before if port else 0}"


def listening(job: Job, worker: int) -> Listener:
    """Await a worker's trainer, and write down where: a free port stays the same, for a trainer that dials again.

    Raises:
        ConfigError: SEC001 or SEC005 trainers may not dial in like that.
        ClusterError: NET001 the address can't be had.

    """
    token = kept_token(job, worker)
    path = _folder(job) / f"worker-{worker}.address"
    wanted = address(job, worker)
    found = None
    host, _, port = wanted.rpartition(":")
    if port == "0" and path.exists():
        before = path.read_text(encoding="utf-8").strip().rpartition(":")[2]
        with contextlib.suppress(HyphaError):  # Another process has it by now.
            found = Listener(f"{host}:{before}", token, job.lease_s, tls(job))
    found = found or Listener(wanted, token, job.lease_s, tls(job))
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(found.address + "\n")
    return found


def tls(job: Job) -> ssl.SSLContext | None:
    """TLS with the job's certificate, if it has one.

    Raises:
        ConfigError: CFG012 half of it is missing, SEC005 it can't be used.

    """
    certificate = job.bridge.certificate
    key = job.bridge.key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        what = "the bridge has a certificate or a key, but not both"
        fix = "give bridge.certificate and bridge.key"
        raise ConfigError("CFG012", what, fix=fix)
    return server_tls(Path(certificate), Path(key))


def kept_token(job: Job, worker: int) -> bytes:
    """The token of a worker's trainer, which is made once in a run."""
    path = _folder(job) / f"worker-{worker}.token"
    return read_token(path) if path.exists() else make_token(path)


def check(job: Job) -> None:
    """Refuse what can't be listened on, before anything starts.

    Raises:
        ConfigError: CFG020 not an address, SEC001 it needs a certificate, CFG012 or SEC005 that can't be used.

    """
    if any(group.dials_in for group in job.worker_groups):
        if job.bridge.listen.startswith(UNIX):
            raise ConfigError("CFG020", "bridge.listen is no address to dial", job.bridge.listen, "host:port")
        split(job.bridge.listen, encrypted=job.bridge.certificate is not None)
        tls(job)


def _folder(job: Job) -> Path:
    folder = Path(str(job.run.dir), str(job.run.name), FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
