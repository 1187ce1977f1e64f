"""JSON that people read as well as programs: what commands print for `--json`, and small files."""

import json


def indented_json(value: object, *, allow_nan: bool = True) -> str:
    """Return a value as ASCII JSON, indented by two, without a newline at its end.

    Raises the errors of `json.dumps`, such as ValueError for a number that is not finite if `allow_nan` is false.
    """
    return json.dumps(value, indent=2, allow_nan=allow_nan)
