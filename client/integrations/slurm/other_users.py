"""Makes requests as a job's user, because the prolog and the epilog run as root."""

import json
import os
import pwd
from collections.abc import Callable
from typing import Any

from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.errors import GpuLeaseError
from gpulease.client.integrations.other_user import MAX_ERROR_CHARS, become, refusal_of, refusal_reply


def as_user(user: int, action: Callable[[], str]) -> str:
    """Run an action in a child process as that user, and return the action's text.

    The child has the user's groups, so a user without access to the daemon's socket gets no lease.

    Raises RefusedForUser if the daemon refuses, and MissingPrerequisite for any other error of the child.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # In the child, give up root permanently, run the action, and send the result through the pipe. The child must
        # not return into the parent's code.
        answer: dict[str, Any]
        try:
            if os.geteuid() != user:
                entry = pwd.getpwuid(user)
                become(user, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid))
            answer = {"done": action()}
        except GpuLeaseError as error:
            answer = refusal_reply(error)
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    # A child that sends nothing was killed.
    if not text:
        raise MissingPrerequisite(f"as user {user}: the request's process was killed")
    answer = json.loads(text)
    if "done" in answer:
        return str(answer["done"])
    if "status" in answer:
        raise refusal_of(answer)
    raise MissingPrerequisite(f"as user {user}: {answer['error']}")
