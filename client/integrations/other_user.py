"""Helpers for a process that acts as the user of a job or pod.

An integration runs as root, but the lease's tenant is the job's user. The daemon identifies tenants by peer
credentials, so a process of that user makes the request. It returns an error to the integration as JSON, and the
integration raises the error.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpulease.client.errors import GpuLeaseError
from gpulease.protocol import Failure, Status

MAX_ERROR_CHARS: Final = 1024
"""Maximum characters of an error's text in the job's output or the pod's events."""


class RefusedForUser(GpuLeaseError):
    """The daemon refused a request of the job's or pod's user."""


def become(user: int, group: int, groups: Sequence[int]) -> None:
    """Become a user permanently, in `group` and supplementary `groups`. Raises OSError if this process is not root."""
    # Set the groups before the user, because only root may change groups.
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def refusal_reply(error: GpuLeaseError) -> dict[str, Any]:
    """Return the reply with which the user's process reports a refusal."""
    return {"error": error.message[:MAX_ERROR_CHARS], "hint": error.hint, "status": int(error.status)}


def refusal_of(reply: Mapping[str, Any]) -> RefusedForUser:
    """Return the refusal that is in such a reply."""
    message, hint = str(reply["error"]), str(reply["hint"])
    return RefusedForUser(message, hint, Failure(Status(int(reply["status"])), message, hint=hint))
