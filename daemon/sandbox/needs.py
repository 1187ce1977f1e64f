"""What a driver's workers need of the host once they are shut in."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Needs:
    """Paths that do not exist are passed over: a driver looks for many things that a host need not have.

    Attributes:
        readable: Files, and folders with all that is in them.
        devices: Device nodes to be opened and told things by ioctl.
        own_process: Whether a worker reads, and names its threads by, its own folder under /proc.
        kept: Descriptors, open in the zygote, of folders where workers may make, read and remove files.
        writable: Folders for the same, by path.
        private_bytes: What a worker may take of the host's memory for itself, None if its slice lies there.
    """

    readable: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    own_process: bool = False
    kept: tuple[int, ...] = ()
    writable: tuple[Path, ...] = ()
    private_bytes: int | None = None

    @property
    def writes_files(self) -> bool:
        """Whether there is a folder it may write to."""
        return bool(self.kept or self.writable)
