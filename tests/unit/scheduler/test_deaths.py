"""Deaths in the words of Ray's errors, and machines that vanish."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.scheduler.runtime.supervised_actor import MEMORY_S, LostNode, NodeAttendance, death_text

HEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainWorker
\tactor_id: d554525d308c6a746b3f9a8601000000
\tpid: 5441
\tname: worker-0
\tnamespace: texts-1
\tip: 10.0.0.7
"""
ENDED = "The actor is dead because its worker process has died. Worker exit type: "
SILENTLY = (
    "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some "
    "common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop."
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            HEAD + ENDED + SILENTLY,
            "its process 5441 on 10.0.0.7 ended without a word: killed (SIGKILL, which the system sends for lack of "
            "memory too) or crashed",
        ),
        (
            HEAD + "Task was killed due to the node running low on memory.",
            "its process 5441 on 10.0.0.7 was ended by Ray, because the machine was running out of memory",
        ),
        (
            HEAD + ENDED + "USER_ERROR Worker exit detail: Worker exits with an exit code 3.",
            "its process 5441 on 10.0.0.7 ended with exit code 3",
        ),
        (
            HEAD + "The actor died because its node has died. Node Id: 671dd7",
            "its machine 10.0.0.7 is gone",
        ),
        (
            HEAD + "It was killed by `ray.kill`.",
            "The actor died unexpectedly before finishing this task. (its process 5441 on 10.0.0.7)",
        ),
        (
            "Task failed because the node it was running on is dead or unavailable. Node IP: 10.0.0.7, node ID: 1db1",
            "its machine 10.0.0.7 is gone",
        ),
        ("The actor died.\nfurther lines", "The actor died."),
    ],
    ids=["killed", "memory", "exit code", "node", "otherwise", "node of a task", "unknown process"],
)
def test_death_is_one_line_with_machine_and_cause(text: str, line: str) -> None:
    assert death_text(RuntimeError(text)) == line


def node(number: int, alive: bool = True) -> dict[str, Any]:
    names = {"NodeManagerHostname": f"rack-{number}", "NodeManagerAddress": f"10.0.0.{number}"}
    return {"NodeID": f"id-{number}", "Alive": alive, **names}


def test_machine_that_vanishes_or_dies_is_noticed_once() -> None:
    attendance = NodeAttendance()
    assert attendance.lost([node(1), node(2), node(3)], {"id-3": [7, 4]}, 0.0) == []
    gone = [LostNode("rack-2 (10.0.0.2)", []), LostNode("rack-3 (10.0.0.3)", [4, 7])]
    assert attendance.lost([node(1), node(2, alive=False)], {}, 2.0) == gone
    assert attendance.lost([node(1), node(2, alive=False)], {}, 4.0) == []


def test_worker_that_is_lost_before_its_machine_was_on_it() -> None:
    attendance = NodeAttendance()
    attendance.lost([node(1)], {"id-1": [0, 1]}, 0.0)
    attendance.lost([node(1)], {"id-1": [1]}, MEMORY_S)
    attendance.lost([node(1)], {}, MEMORY_S + 2.0)
    assert attendance.lost([], {}, MEMORY_S + 4.0) == [LostNode("rack-1 (10.0.0.1)", [1])]


def test_machine_without_a_host_name_is_called_by_its_address() -> None:
    attendance = NodeAttendance()
    attendance.lost([node(1) | {"NodeManagerHostname": "10.0.0.1"}], {}, 0.0)
    assert attendance.lost([], {}, 2.0) == [LostNode("10.0.0.1", [])]
