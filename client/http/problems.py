"""Problem replies (RFC 9457): the JSON that a client gets when its request is not served."""

import math
from dataclasses import dataclass
from typing import Any, Final

MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Problem:
    """The reply to a request that was not served.

    Attributes:
        status: HTTP's status code.
        code: This project's word for the problem, for programs.
        detail: A sentence for people.
        kind: The class of the error behind it; "" if there is none.
        retry_after_s: Seconds after which asking again makes sense; None if it never does.
    """

    status: int
    code: str
    detail: str
    kind: str = ""
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """`Retry-After`, if asking again makes sense."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the JSON object; empty members are left out."""
        body = {"type": "about:blank", "title": self.code.replace("_", " "), "status": self.status}
        named = {"kind": self.kind, "request_id": request_id}
        return body | {"code": self.code, "detail": self.detail} | {key: text for key, text in named.items() if text}


class RequestRefused(Exception):
    """The server refuses a request before any model sees it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem
