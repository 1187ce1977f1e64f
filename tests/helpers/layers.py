"""The table of rooms: which folder may import which.

`PYTHONPATH=.dev python -m tests.helpers.layers` updates the drawing in the architecture.

A room is a folder with all its files and subfolders, except the rooms inside it. The rows are in order from the top
down: a room imports only rooms that are below it, so there are no circular imports. Every room may import `protocol`,
which imports nothing of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ARCHITECTURE: Final = Path(__file__).parents[2] / "daemon" / "ARCHITECTURE.md"

HALL, SHARED, WING, TOOL = "hall", "shared", "wing", "tool"
"""Kinds of rooms. Every reader must know the hall. A wing is a separate product: it imports the hall and the
rooms that wings share, and no other wing. Tools are for operators and tenants, and may import all of these.
"""


@dataclass(frozen=True, slots=True)
class Room:
    """A row of the table.

    Attributes:
        name: The folder; or `FOLDER/__init__`, the package's public names, imported from the rooms that define them.
        imports: The rooms of the same part that it may import.
        is_pure: Whether it reads no clock, does no I/O and draws no random numbers.
    """

    name: str
    kind: str
    imports: tuple[str, ...] = ()
    is_pure: bool = False

    @property
    def wing(self) -> str:
        """The name of the wing that the room belongs to."""
        return next(wing for wing in WINGS if f"{self.name}/".startswith(f"{wing}/"))


WINGS: Final = ("client/decode", "client/serve", "client/integrations", "daemon/fleet", "daemon/ptx")


def _room(name: str, kind: str, imports: str = "", *, is_pure: bool = False) -> Room:
    part = name.partition("/")[0]
    names = (part if other == "." else f"{part}/{other}" for other in imports.split())
    return Room(name, kind, tuple(names), is_pure)


ROOMS: Final = (
    # "." is the part's own folder.
    _room(
        "client/cli",
        TOOL,
        ". __init__ bench console core decode decode/__init__ decode/openai decode/openai/fronts decode/page"
        " decode/supervisor decode/text"
        " http serve/gateway serve/models sync transport verify",
    ),
    _room("client/verify", TOOL, ". __init__ bench console sync"),
    _room(
        "client/bench",
        TOOL,
        ". __init__ aio console core decode decode/__init__ decode/checkpoint decode/engine decode/scheduler"
        " serve/gateway sync transport",
    ),
    _room("client/examples", TOOL, "__init__"),
    _room("client/integrations/kubernetes", WING, ". console core http integrations sync"),
    _room("client/integrations/slurm", WING, ". console core integrations sync"),
    _room("client/integrations", WING, ". sync"),
    _room("client/serve/gateway", WING, ". core http sync"),
    _room("client/serve/models", WING, ". __init__ aio http serve/rpc"),
    _room("client/serve/rpc", WING, ". http transport"),
    _room("client/serve", WING),
    _room(
        "client/decode/page",
        WING,
        ". decode decode/__init__ decode/openai decode/scheduler decode/supervisor http",
    ),
    _room(
        "client/decode/openai/fronts",
        WING,
        ". decode decode/openai decode/supervisor decode/text http",
    ),
    _room("client/decode/openai", WING, ". decode decode/scheduler decode/supervisor decode/text http"),
    # It imports each of its names from client/decode/supervisor when a program first uses the name.
    _room("client/decode/__init__", WING, "."),
    _room(
        "client/decode/supervisor",
        WING,
        ". aio core decode decode/checkpoint decode/engine decode/scheduler decode/text",
    ),
    _room("client/decode/engine", WING, ". aio decode decode/checkpoint"),
    _room("client/decode/checkpoint", WING, ". aio decode decode/text http"),
    _room("client/decode/text", WING, ". decode"),
    _room("client/decode/scheduler", WING, "decode", is_pure=True),
    _room("client/decode/kernels", WING),
    _room("client/decode/tiny", WING),
    _room("client/decode", WING, ". http"),
    _room("client/console", SHARED, ". __init__ core sync"),
    _room("client/http", SHARED, "."),
    _room("client/aio", HALL, ". core kernels sync"),
    _room("client/sync", HALL, ". core kernels transport"),
    _room("client/core", HALL, ". kernels transport"),
    _room("client/transport", HALL, "."),
    _room("client/kernels", HALL, "."),
    # It imports each of its names from client/sync when a program first uses the name.
    _room("client/__init__", HALL, "."),
    _room("client", HALL),
    _room(
        "daemon/bench",
        TOOL,
        "broker config contract drivers drivers/cuda gpus host leases log native record session workers zygote",
    ),
    _room("daemon", HALL, "broker config host log supervisor"),
    _room("daemon/supervisor", HALL, "broker config host log"),
    _room(
        "daemon/broker",
        HALL,
        "capabilities config contract gpus host leases log record remote sandbox web workers",
    ),
    _room("daemon/workers", HALL, "contract gpus host leases log record sandbox"),
    _room(
        "daemon/fleet/directory",
        WING,
        "fleet fleet/etcd fleet/records fleet/rules host leases log record remote web",
    ),
    _room("daemon/fleet", WING, "contract fleet/etcd fleet/records fleet/rules host log remote sandbox"),
    _room("daemon/fleet/rules", WING, "contract fleet/etcd fleet/records", is_pure=True),
    _room("daemon/fleet/records", WING, "fleet/etcd host"),
    _room("daemon/fleet/etcd", WING, "host"),
    _room("daemon/config", HALL, "capabilities drivers host leases log remote sandbox web"),
    _room("daemon/record", HALL, "capabilities contract host leases log"),
    _room("daemon/web", HALL, "contract host log sandbox"),
    _room("daemon/remote", HALL, "contract host log sandbox"),
    _room("daemon/gpus", HALL, "host leases log"),
    _room("daemon/leases", HALL, "contract", is_pure=True),
    _room("daemon/zygote", HALL, "contract drivers drivers/cuda host log sandbox session"),
    _room("daemon/session", HALL, "contract drivers host native"),
    _room("daemon/drivers/cuda", HALL, "drivers host native sandbox"),
    _room("daemon/ptx", WING, "drivers host native sandbox"),
    _room("daemon/drivers", HALL, "host sandbox", is_pure=True),
    _room("daemon/capabilities", HALL),
    _room("daemon/log", HALL, "host"),
    _room("daemon/sandbox", HALL, "host"),
    _room("daemon/host", HALL, "contract"),
    _room("daemon/contract", HALL),
    _room("daemon/native", HALL),
    _room("protocol", HALL, is_pure=True),
)

DOORS: Final = {
    "daemon/broker/fleet_frontend.py": (
        "daemon/fleet",
        "daemon/fleet/etcd",
        "daemon/fleet/records",
        "daemon/fleet/rules",
    ),
    "daemon/config/settings.py": ("daemon/fleet/records", "daemon/ptx"),
    "daemon/drivers/cuda/images.py": ("daemon/ptx",),
    "daemon/zygote/driver_registry.py": ("daemon/ptx",),
}
"""The files of the hall that import from a wing, and the rooms of the wing that each may import."""

NAMES: Final = frozenset(room.name for room in ROOMS)


def room_of(path: str) -> Room:
    """Return the room of a file of the product, by its path from the repository's root."""
    folder = path.removesuffix(".py")
    if not folder.endswith("/__init__") or folder not in NAMES:
        folder = path.rpartition("/")[0]
    while folder not in NAMES:
        folder = folder.rpartition("/")[0]
    return next(room for room in ROOMS if room.name == folder)


def levels(part: str) -> Iterator[list[Room]]:
    """Yield the rooms of a part from the bottom up, each in the lowest level that is above all rooms it imports."""
    heights: dict[str, int] = {}
    for room in reversed([room for room in ROOMS if room.name.partition("/")[0] == part]):
        heights[room.name] = 1 + max((heights[other] for other in room.imports), default=-1)
    for height in range(max(heights.values()) + 1):
        yield [room for room in ROOMS if heights.get(room.name) == height]


def drawing() -> str:
    """Return the drawing of the rooms, with a line for each level, from the top down."""
    lines = []
    for part in ("client", "daemon"):
        lines.append(f"{part}/")
        for level in reversed(list(levels(part))):
            for kind in (TOOL, WING, SHARED, HALL):
                names = [f"{_short(room)}{'*' if room.is_pure else ''}" for room in level if room.kind == kind]
                if names:
                    lines.append(f"  {kind:8}{', '.join(names)}")
    lines.append("protocol*, which imports nothing of ours")
    doors = [f"  {path} -> {', '.join(rooms)}" for path, rooms in DOORS.items()]
    return "\n".join([*lines, "doors from the hall into wings", *doors])


def _short(room: Room) -> str:
    part, _, rest = room.name.partition("/")
    return {"": f"{part}'s own files", "__init__": "public names"}.get(rest, rest)


BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->"


def with_drawing(text: str) -> str:
    """Return the architecture's text with the drawing of the current table."""
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the architecture must have {BEGIN.strip()} and {END}")
    return f"{before}{BEGIN}\n```text\n{drawing()}\n```\n\n{END}{after}"


if __name__ == "__main__":
    ARCHITECTURE.write_text(with_drawing(ARCHITECTURE.read_text(encoding="utf-8")), encoding="utf-8")
