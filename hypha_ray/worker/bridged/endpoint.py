"""Endpoints for trainers that dial in: addresses and tokens of a run, on the node of its scheduler."""

from __future__ import annotations

import contextlib
import ssl
from pathlib import Path

from hypha_ray.bridge.access import UNIX, make_token, read_token, server_tls, split
from hypha_ray.bridge.listener import Listener
from hypha_ray.config import Job
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.files import opener

FOLDER = "bridge"
"""Folder of the run directory: token and address of each worker whose trainer dials in."""


def address_of(job: Job, worker: int) -> str:
    """Address for a worker's trainer: that of the job for the first one, and the following ports for others."""
    host, port = split(job.bridge.listen, encrypted=job.bridge.certificate is not None)
    if ":" in host:
        host = f"[{host}]"
    if port:
        port += sum(job.group_of(number).dials_in for number in range(worker))
    return f"{host}:{port}"


def listen_for_trainer(job: Job, worker: int) -> Listener:
    """Listen for a worker's trainer, and write the address to a file.

    A port that was chosen freely is used again, for a trainer that reconnects.

    Raises:
        ConfigError: SEC001 or SEC005 trainers may not dial in like that.
        ClusterError: NET001 the address can't be had.

    """
    token = token_of(job, worker)
    path = _folder(job) / f"worker-{worker}.address"
    address = address_of(job, worker)
    host, _, port = address.rpartition(":")
    listener = None
    if port == "0" and path.exists():
        earlier_address = path.read_text(encoding="utf-8").strip()
        earlier_port = earlier_address.rpartition(":")[2]
        with contextlib.suppress(HyphaError):  # Another process has the port by now.
            listener = Listener(f"{host}:{earlier_port}", token, job.lease_s, tls(job))
    if listener is None:
        listener = Listener(address, token, job.lease_s, tls(job))
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(listener.address + "\n")
    return listener


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
        problem = "the bridge has a certificate or a key, but not both"
        fix = "give bridge.certificate and bridge.key"
        raise ConfigError("CFG012", problem, fix=fix)
    return server_tls(Path(certificate), Path(key))


def token_of(job: Job, worker: int) -> bytes:
    """Token of a worker's trainer; a run makes it once."""
    path = _folder(job) / f"worker-{worker}.token"
    if path.exists():
        return read_token(path)
    return make_token(path)


def check(job: Job) -> None:
    """Refuse an address that can't be listened on, before anything starts.

    Raises:
        ConfigError: CFG020 not an address, SEC001 it needs a certificate, CFG012 or SEC005 that can't be used.

    """
    if not any(group.dials_in for group in job.worker_groups):
        return
    if job.bridge.listen.startswith(UNIX):
        raise ConfigError("CFG020", "bridge.listen is no address to dial", job.bridge.listen, "host:port")
    split(job.bridge.listen, encrypted=job.bridge.certificate is not None)
    tls(job)


def _folder(job: Job) -> Path:
    folder = Path(str(job.run.dir), str(job.run.name), FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
