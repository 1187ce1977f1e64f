"""Lease a slice of a GPU, compute in it, give it back.

`gpulease.GpuBuilder`, all other names of `gpulease.client`, `client` and `protocol` are here, each imported when it is
first used. This file imports nothing itself, because the daemon and the wire format load it, too, and do not need the
client.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers treat this name as true; importing it from typing would take longer

if TYPE_CHECKING:
    from gpulease import client as client
    from gpulease import protocol as protocol
    from gpulease.client.sync.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in ("client", "protocol"):
            value = import_module(f"gpulease.{name}")
        elif name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            client = import_module("gpulease.client")
            if name not in client.__all__ and name != "__all__":
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            value = getattr(client, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    from gpulease import client

    return sorted({*globals(), "protocol", *client.__all__} - {"TYPE_CHECKING"})
