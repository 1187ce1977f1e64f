"""Lease a slice of a GPU, compute in it, give it back.

`gpulease.GpuBuilder`, all other names of `gpulease.client`, `client` and `protocol` are here, each imported when it is
first asked for. This file imports nothing by itself: the daemon and the wire format load it, too, and need none of
that.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take it for true, wherever it comes from; importing typing takes longer than this

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
