"""`python -m helpers.handing_over FD,FD... COMMAND...`: executes COMMAND with those descriptors, numbered from 3.

systemd starts a service in the same way when it passes sockets to it: LISTEN_PID is the process that runs COMMAND.
"""

import fcntl
import os
import sys
from typing import Final

FIRST: Final = 3
BEYOND: Final = 100
"""The lowest number to which descriptors are moved first, so that none is overwritten before it is moved to its place.
"""


def main(fds: str, command: list[str]) -> None:
    waiting = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, BEYOND) for fd in fds.split(",") if fd]
    for place, fd in enumerate(waiting, start=FIRST):
        os.dup2(fd, place, inheritable=True)
        os.close(fd)
    if waiting:
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(waiting))}
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
