"""`python -m helpers.lacking CALLS COMMAND...`: runs a command as if the kernel had no such system calls.

CALLS are numbers, separated by commas. A filter returns ENOSYS for them; the command's child processes inherit it.
"""

import ctypes
import errno
import os
import struct
import sys

from gpulease.daemon.host.processes import gain_no_privileges, prctl
from gpulease.daemon.sandbox.syscall_filter import ALLOW, assemble, fail, head, on, result

X86_64 = 0xC000003E


def main(calls: list[int], command: list[str]) -> None:
    code = head(X86_64)
    for number in calls:
        code += on(number, result(fail(errno.ENOSYS)))
    program = assemble(code + result(ALLOW))
    held = ctypes.create_string_buffer(program, len(program))
    told = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(held)))
    gain_no_privileges()
    prctl(22, 2, ctypes.addressof(told))
    os.execv(command[0], command)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1].split(",")], sys.argv[2:])
