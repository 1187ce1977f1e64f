"""What NVML says of a card, taken so that no process that comes or goes between its answers hides anybody's bytes."""

from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest

from gpulease.daemon.gpus.nvidia import RESERVE_BYTES, UNATTRIBUTED_SLACK_BYTES, NvidiaCards
from gpulease.daemon.gpus.source import CardsUnavailable
from gpulease.daemon.leases.persisted import CardRow

GIB = 1 << 30
MIB = 1 << 20
TOTAL = 80 * GIB
DRIVERS = 480 * MIB
"""What the driver holds by itself."""

WORKER, STRANGER = 100, 200


class MadeNvml:
    """NVML of one card: its unowned bytes and its processes. `meanwhile` happens before a numbered answer."""

    def __init__(self) -> None:
        self.unowned = DRIVERS
        self.processes: dict[int, int] = {}
        self.graphics: dict[int, int] = {}
        self.meanwhile: dict[str, Callable[[], None]] = {}
        self.answers = 0
        self.broken = False

    def memory(self, handle: object) -> SimpleNamespace:
        self.pass_on()
        return SimpleNamespace(total=TOTAL, used=self.unowned + sum(self.processes.values()))

    def listing(self, handle: object) -> list[SimpleNamespace]:
        self.pass_on()
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.processes.items()]

    def graphics_listing(self, handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in self.graphics.items()]

    def pass_on(self) -> None:
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        self.answers += 1
        self.meanwhile.pop(str(self.answers), lambda: None)()

    def before(self, answer: int, happens: Callable[[], None]) -> None:
        """Of the next look: 1 is the first list, 2 the card's sum, 3 the second list."""
        self.answers = 0
        self.meanwhile = {str(answer): happens}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> MadeNvml:
    made = MadeNvml()
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: "GPU-a",
        "nvmlDeviceGetName": lambda handle: "Made",
        "nvmlDeviceGetMigMode": lambda handle: (0, 0),
        "nvmlDeviceGetMemoryInfo": made.memory,
        "nvmlDeviceGetComputeRunningProcesses": made.listing,
        "nvmlDeviceGetGraphicsRunningProcesses": made.graphics_listing,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return made


def test_a_look_tells_what_is_new_since_the_start(nvml: MadeNvml) -> None:
    nvml.processes = {STRANGER: GIB}
    cards = NvidiaCards()
    (card,) = cards.discover({})
    assert card.capacity_bytes == card.found_bytes == TOTAL - DRIVERS - GIB - RESERVE_BYTES
    assert (card.unattributed_bytes, card.slack_bytes) == (DRIVERS, UNATTRIBUTED_SLACK_BYTES)
    reading = cards.read("GPU-a")
    assert (reading.unowned_bytes, reading.outside_bytes(set())) == (0, 0)
    nvml.unowned += 126 * MIB
    nvml.processes = {STRANGER: 3 * GIB, WORKER: 5 * GIB}
    reading = cards.read("GPU-a")
    assert reading.unowned_bytes == 126 * MIB
    assert reading.processes == {STRANGER: 3 * GIB, WORKER: 5 * GIB}
    assert reading.outside_bytes({WORKER}) == 2 * GIB
    nvml.processes = {WORKER: 5 * GIB}
    assert cards.read("GPU-a").outside_bytes({WORKER}) == -GIB, "it has left"


def test_graphics_programs_hold_bytes_and_workers_are_compute_programs(nvml: MadeNvml) -> None:
    cards = NvidiaCards()
    cards.discover({})
    # The worker is in both lists, with the same figure, as CUDA programs that also draw are.
    nvml.processes, nvml.graphics = {WORKER: 5 * GIB}, {STRANGER: GIB, WORKER: 5 * GIB}
    nvml.unowned += GIB
    assert cards.read("GPU-a").processes == {STRANGER: GIB, WORKER: 5 * GIB}
    assert cards.process_bytes("GPU-a", WORKER) == 5 * GIB
    with pytest.raises(CardsUnavailable, match="does not show the memory of process 200"):
        cards.process_bytes("GPU-a", STRANGER)


def test_what_was_measured_before_leases_were_there_is_the_start(nvml: MadeNvml) -> None:
    """A daemon that comes back: what the card holds now is in part its leases'."""
    nvml.processes = {STRANGER: GIB}
    (first,) = NvidiaCards().discover({})
    nvml.unowned += 126 * MIB
    nvml.processes |= {WORKER: 5 * GIB}
    cards = NvidiaCards(limit_bytes=8 * GIB)
    kept = CardRow("GPU-a", first.found_bytes, 600 * MIB, first.unattributed_bytes)
    (card,) = cards.discover({"GPU-a": kept})
    assert (card.found_bytes, card.capacity_bytes) == (first.found_bytes, 8 * GIB)
    reading = cards.read("GPU-a")
    assert (reading.unowned_bytes, reading.outside_bytes({WORKER})) == (126 * MIB, 0)


@pytest.mark.parametrize("answer", [1, 2, 3])
@pytest.mark.parametrize("is_new", [True, False], ids=["begins", "ends"])
def test_a_process_between_two_answers_hides_nothing(nvml: MadeNvml, answer: int, *, is_new: bool) -> None:
    """60 GiB of a dead worker are nobody's meanwhile."""
    cards = NvidiaCards()
    cards.discover({})
    nvml.unowned += 60 * GIB
    nvml.processes = {} if is_new else {STRANGER: 2 * GIB}
    nvml.before(answer, lambda: nvml.processes.update({STRANGER: 2 * GIB}) if is_new else nvml.processes.clear())
    assert cards.read("GPU-a").unowned_bytes >= 60 * GIB


def test_a_card_that_does_not_answer_proves_nothing(nvml: MadeNvml) -> None:
    cards = NvidiaCards()
    cards.discover({})
    nvml.broken = True
    with pytest.raises(CardsUnavailable, match="NVML can't report"):
        cards.read("GPU-a")


def test_only_visible_cards_are_leased(nvml: MadeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [(card.uuid, card.index) for card in NvidiaCards().discover({})] == [
        ("GPU-0", 0),
        ("GPU-1", 1),
        ("GPU-2", 2),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [(card.uuid, card.index) for card in NvidiaCards().discover({})] == [("GPU-2", 0), ("GPU-0", 1)]


def test_peers_are_cards_that_are_read_over_nvlink(nvml: MadeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    read, nvlink = 0, 2
    # Card 1 is joined to card 0. Card 2 could only be read over PCIe, and the driver says nothing about card 3.
    states = {(0, 1): (0, 0), (0, 2): (0, 6), (1, 2): (6, 6)}

    def status(one: int, other: int, kind: int) -> int:
        if 3 in (one, other):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return states[min(one, other), max(one, other)][{read: 0, nvlink: 1}[kind]]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    assert [card.peers for card in NvidiaCards().discover({})] == [("GPU-1",), ("GPU-0",), (), ()]
