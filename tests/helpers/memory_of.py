"""Searches the allocated memory of another process."""

from pathlib import Path

from gpulease.client.verify.memory_search import count_in_span, present_spans


def count_in_heap(pid: int, wanted: bytes) -> int:
    """Count the occurrences in allocated memory, which is all except stack, files and devices (proc_pid_maps(5))."""
    found = 0
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory, Path(f"/proc/{pid}/pagemap").open("rb", 0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, permissions, _, _, _, *path = line.split(maxsplit=5)
            if permissions.startswith("rw") and path in ([], ["[heap]"]):
                start, stop = (int(number, 16) for number in span.split("-"))
                for at, end in present_spans(pagemap.fileno(), start, stop):
                    found += count_in_span(memory.fileno(), at, end, wanted)
    return found
