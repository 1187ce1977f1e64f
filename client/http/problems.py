"""Problem replies (RFC 9457): the JSON that a client receives when its request fails."""

import math
from dataclasses import dataclass
from typing import Any, Final

MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Problem:
    """The error reply to a request.

    Attributes:
        status: The HTTP status code.
        code: The problem's code, for programs.
        detail: A sentence for people.
        kind: The class of the error that caused the problem; "" without one.
        retry_after_s: Seconds after which the client may retry; None if a retry is useless.
    """

    status: int
    code: str
    detail: str
    kind: str = ""
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """Return `Retry-After` if the client may retry, in whole seconds of at least 1."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the JSON object, without empty members."""
        # "about:blank" means that the status says enough (RFC 9457, 4.2.1). `code` is an extension member for programs.
        body = {"type": "about:blank", "title": self.code.replace("_", " "), "status": self.status}
        # Leave out empty extension members, so that clients can test for their presence.
        named = {"kind": self.kind, "request_id": request_id}
        return body | {"code": self.code, "detail": self.detail} | {key: text for key, text in named.items() if text}


class RequestRefused(Exception):
    """The server refuses a request before it reaches a model."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem
