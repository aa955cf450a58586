"""Averaging by the peers, each in its own way and between processes of its own.

The time is that of averaging alone, from the command to begin until every process has the mean. Discovery before it
(torchft's quorum, hivemind's matchmaking) is left out.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch

PEERS = ("torchft", "hivemind")
WAIT_S = 60
_server: Any = None

Words = dict[str, Callable[[], None]]


class Peer:
    """Processes of one peer that average tensors of so many elements.

    Args:
        name: of the peer.
        count: of processes.
        size: number of elements.

    """

    def __init__(self, name: str, count: int, size: int) -> None:
        context = multiprocessing.get_context("spawn")  # Nothing of Ray's in them.
        begin = {"torchft": _torchft, "hivemind": _hivemind}[name]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        meeting_point = _lighthouse(count) if name == "torchft" else None
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                arguments = (begin, rank, count, size, meeting_point, theirs)
                process = context.Process(target=_serve, args=arguments)
                self._processes.append(process)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                answer = self._await_answer(ours)
                if meeting_point is None:
                    meeting_point = answer
        except BaseException:
            self.close()
            raise

    def turn(self) -> float:
        """Seconds that one averaging takes."""
        self._command("ready")
        began = time.perf_counter()
        self._command("average")
        average_s = time.perf_counter() - began
        self._command("done")
        return average_s

    def close(self) -> None:
        """End the processes, and those that they have started."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # It may have no group of its own yet.
            process.join()

    def _command(self, word: str) -> None:
        for pipe in self._pipes:
            pipe.send(word)
        for pipe in self._pipes:
            self._await_answer(pipe)

    def _await_answer(self, pipe: Connection) -> Any:
        if not pipe.poll(WAIT_S):
            raise TimeoutError("a peer's process doesn't answer")
        return pipe.recv()


def installed() -> list[str]:
    """Those that can be measured here."""
    return [name for name in PEERS if find_spec(name) is not None]


def _lighthouse(count: int) -> Any:
    from torchft.coordination import LighthouseServer

    global _server  # noqa: PLW0603 — it serves for as long as it is referred to.
    _server = LighthouseServer(bind="127.0.0.1:0", min_replicas=count, join_timeout_ms=1000)
    port = _server.address().rpartition(":")[2]
    return f"http://127.0.0.1:{port}"


def _serve(
    begin: Callable[..., tuple[Any, Words]], rank: int, count: int, size: int, meeting_point: Any, pipe: Connection
) -> None:
    """Carry out commands until the parent is gone."""
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    try:
        answer, words = begin(rank, count, torch.full((size,), float(rank)), meeting_point)
        pipe.send(answer)
        while True:
            words[pipe.recv()]()
            pipe.send(None)
    except EOFError:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)  # What it has started wouldn't end by itself.


def _torchft(rank: int, count: int, tensor: torch.Tensor, lighthouse: str) -> tuple[None, Words]:
    from torchft import Manager, ProcessGroupGloo

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    distributed: Any = torch.distributed
    store = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=WAIT_S)
    address = {"store_addr": "127.0.0.1", "store_port": store.port, "hostname": "127.0.0.1"}
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=count,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}",
        init_sync=False,
        **address,
    )

    def done() -> None:
        assert store.port == port  # It serves for as long as it is referred to.
        assert manager.should_commit() and manager.num_participants() == count

    def average() -> None:
        manager.allreduce(tensor).wait()

    return None, {"ready": manager.start_quorum, "average": average, "done": done}


def _hivemind(rank: int, count: int, tensor: torch.Tensor, peers: Any) -> tuple[Any, Words]:
    multiprocessing.set_start_method("fork", force=True)  # Its own processes can't be started otherwise.
    import hivemind
    from hivemind.averaging.control import AveragingStage

    dht = hivemind.DHT(initial_peers=peers or [], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = hivemind.DecentralizedAverager(
        [tensor],
        dht,
        start=True,
        prefix="exchange",
        target_group_size=count,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
    )
    turn: list[Any] = []

    def ready() -> None:
        turn[:] = [averager.step(wait=False, require_trigger=True, timeout=WAIT_S)]
        while turn[0].stage != AveragingStage.AWAITING_TRIGGER:
            time.sleep(0.01)

    def average() -> None:
        turn[0].allow_allreduce()
        assert len(turn[0].result(WAIT_S)) == count

    return [str(address) for address in dht.get_visible_maddrs()], {
        "ready": ready,
        "average": average,
        "done": lambda: None,
    }
