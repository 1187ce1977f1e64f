"""Output of workers comes to the log line by line, with their names, escaped, and within bounds."""

import os
import select
from collections.abc import Iterator

import pytest

from gpulease.daemon.zygote.worker_output import (
    BURST_BYTES,
    MAX_LINE_BYTES,
    MAX_OUTPUT_BYTES,
    OUTPUT_BYTES_PER_S,
    RECORD_BYTES,
    WorkerOutput,
)


class Scene:
    """A log, its clock, and workers that speak."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lost = 0
        self.now_s = 100.0
        self.poll = select.poll()
        self.output = WorkerOutput(self.poll, self.take, lambda: self.now_s)
        self.ends: list[int] = []

    def take(self, pid: int, line: str, lost_lines: int) -> None:
        self.log.append(f"worker {pid}: {line}\n")
        self.lost += lost_lines

    def worker(self, pid: int) -> int:
        heard, said = os.pipe()
        self.output.add(heard, pid)
        self.ends.append(said)
        return said

    def say(self, end: int, data: bytes) -> None:
        os.write(end, data)
        self.hear()

    def leave(self, end: int) -> None:
        os.close(end)
        self.ends.remove(end)
        self.hear()

    def hear(self) -> None:
        while heard := [fd for fd, _ in self.poll.poll(0)]:
            for fd in heard:
                self.output.on_readable(fd)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.output.close()
    for end in scene.ends:
        os.close(end)


def test_lines_are_marked_with_whose_they_are(scene: Scene) -> None:
    ann, bob = scene.worker(7), scene.worker(8)
    scene.say(ann, b"one\ntw")
    scene.say(bob, b"three\n")
    scene.say(ann, b"o\nlast")
    assert scene.log == ["worker 7: one\n", "worker 8: three\n", "worker 7: two\n"]
    scene.leave(ann)
    assert scene.log[3:] == ["worker 7: last\n"]
    assert len(scene.output._pipes) == 1


def test_what_is_no_text_is_shown(scene: Scene) -> None:
    scene.say(scene.worker(7), b"\xff\n")
    assert scene.log == ["worker 7: \\xff\n"]


def test_a_long_line_is_several(scene: Scene) -> None:
    scene.say(scene.worker(7), b"x" * (2 * MAX_LINE_BYTES + 1) + b"\n")
    assert [len(line) for line in scene.log if "x" in line] == [MAX_LINE_BYTES + 11] * 2 + [12]


def test_one_that_says_too_much_is_not_listened_to_any_more(scene: Scene) -> None:
    end = scene.worker(7)
    for _ in range(MAX_OUTPUT_BYTES // (100 + RECORD_BYTES) + 1):
        scene.say(end, b"x" * 99 + b"\n")
    with pytest.raises(BrokenPipeError):
        os.write(end, b"more")
    assert sum(map(len, scene.log)) < MAX_OUTPUT_BYTES
    assert "the rest is lost" in scene.log[-1]
    scene.say(scene.worker(8), b"still here\n")
    assert scene.log[-1] == "worker 8: still here\n"


@pytest.mark.parametrize("length", [1, 499])
def test_all_together_say_so_much_a_second(scene: Scene, length: int) -> None:
    line, cost = b"x" * length + b"\n", length + RECORD_BYTES
    for pid in range(2 * BURST_BYTES // MAX_OUTPUT_BYTES):
        end = scene.worker(pid)
        for _ in range(60):
            scene.say(end, line)
    assert len(scene.log) * cost <= BURST_BYTES + cost
    before, output = len(scene.log), 60
    scene.now_s += 2
    end = scene.worker(1)
    for _ in range(output):
        scene.say(end, line)
    told = len(scene.log) - before
    assert 0 < told <= 2 * OUTPUT_BYTES_PER_S // cost + 1
    scene.now_s += 2
    scene.say(end, line)
    assert told + scene.lost >= output
