"""`python -m helpers.handing_over FD,FD... COMMAND...`: becomes COMMAND, with those descriptors from 3 on.

As systemd starts a service that it hands sockets over to: LISTEN_PID is the process that COMMAND becomes.
"""

import fcntl
import os
import sys
from typing import Final

FIRST: Final = 3
BEYOND: Final = 100
"""Where descriptors wait, so that none is overwritten before it is moved."""


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
