"""Requests as a job's user: prolog and epilog are root, and the lease is the user's."""

import json
import os
import pwd
from collections.abc import Callable

from gpulease.client.console.exit_status import CannotStart
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol.opcodes import Status

MAX_ANSWER_BYTES = 4096
"""Longest answer of the child: a pipe takes so much without a reader (PIPE_BUF)."""


class RefusedForUser(CannotStart):
    """The daemon has refused the user's request.

    Attributes:
        status: The refusal's.
    """

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


def as_user(user: int, action: Callable[[], str]) -> str:
    """Return an action's text, done by a child process of that user.

    The child has the user's groups: who may not write to the daemon's socket gets no lease.

    Raises RefusedForUser for the daemon's refusal, and CannotStart for any other error of the child.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer: dict[str, str | int]
        try:
            if os.geteuid() != user:
                known = pwd.getpwuid(user)
                os.initgroups(known.pw_name, known.pw_gid)
                os.setresgid(known.pw_gid, known.pw_gid, known.pw_gid)
                os.setresuid(user, user, user)
            answer = {"done": action()}
        except GpuLeaseError as error:
            answer = {"error": str(error)[:1024], "status": int(error.status)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:1024]}
        os.write(writing, json.dumps(answer).encode()[:MAX_ANSWER_BYTES])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise CannotStart(f"as user {user}: the request's process was killed")
    answer = json.loads(text)
    if "done" in answer:
        return str(answer["done"])
    if "status" in answer:
        raise RefusedForUser(str(answer["error"]), Status(int(answer["status"])))
    raise CannotStart(f"as user {user}: {answer['error']}")
