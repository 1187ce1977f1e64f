"""Requests as a job's user: prolog and epilog run as root, but the lease belongs to the user."""

import json
import os
import pwd
from collections.abc import Callable
from typing import Final

from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol.opcodes import Status

MAX_ERROR_CHARS: Final = 1024
"""Most characters of an error that the child passes on: the reason of a refusal, for the job's output."""


class RefusedForUser(MissingPrerequisite):
    """The daemon refused a request that was made as the job's user.

    Attributes:
        status: The status of the refusal.
    """

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


def as_user(user: int, action: Callable[[], str]) -> str:
    """Return the text of an action that a child process runs as that user.

    The child has the user's groups, so a user who may not write to the daemon's socket gets no lease.

    Raises RefusedForUser if the daemon refuses, and MissingPrerequisite for any other error of the child.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # In the child: drop root for good, run the action, and send the result through the pipe. It must not return
        # into the parent's code.
        answer: dict[str, str | int]
        try:
            if os.geteuid() != user:
                known = pwd.getpwuid(user)
                os.initgroups(known.pw_name, known.pw_gid)
                # Groups before the user, because only root may change groups.
                os.setresgid(known.pw_gid, known.pw_gid, known.pw_gid)
                os.setresuid(user, user, user)
            answer = {"done": action()}
        except GpuLeaseError as error:
            answer = {"error": str(error)[:MAX_ERROR_CHARS], "status": int(error.status)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    # No answer at all: the child did not reach its last line.
    if not text:
        raise MissingPrerequisite(f"as user {user}: the request's process was killed")
    answer = json.loads(text)
    if "done" in answer:
        return str(answer["done"])
    if "status" in answer:
        raise RefusedForUser(str(answer["error"]), Status(int(answer["status"])))
    raise MissingPrerequisite(f"as user {user}: {answer['error']}")
