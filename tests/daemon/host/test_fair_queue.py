"""The order in which connections are served, in rounds of the loop."""

import asyncio

from gpulease.daemon.host.fair_queue import QUANTUM_NS, FairQueue


class Peer:
    """A connection with requests for so many quanta."""

    def __init__(self, queue: FairQueue, tenant: str, wants: int, served: list[str]) -> None:
        self.queue, self.tenant, self.wants, self.served = queue, tenant, wants, served

    def ask(self) -> None:
        self.queue.enqueue(self.tenant, self.serve)

    def serve(self) -> None:
        self.served.append(self.tenant)
        self.wants -= 1
        if self.wants:
            self.ask()


def play(wants: dict[str, list[int]]) -> list[str]:
    """Every peer asks in one round; in which order they were served."""

    async def main() -> list[str]:
        queue, served = FairQueue(), list[str]()
        for tenant, counts in wants.items():
            for count in counts:
                Peer(queue, tenant, count, served).ask()
        for _ in range(sum(sum(counts) for counts in wants.values()) + 2):
            await asyncio.sleep(0)
        assert not queue._queues
        return served

    return asyncio.run(main())


def test_alone_there_is_no_waiting() -> None:
    async def main() -> None:
        queue, served = FairQueue(), list[str]()
        for _ in range(3):
            Peer(queue, "ann", 1, served).ask()
            assert served.pop() == "ann"
            await asyncio.sleep(0)

    asyncio.run(main())


def test_many_connections_are_one_turn_a_round() -> None:
    served = play({"eve": [3] * 50, "ann": [4], "bob": [2, 2]})
    assert len(served) == 50 * 3 + 4 + 4
    for tenant, queue in (("ann", 4), ("bob", 4)):
        last = max(at for at, name in enumerate(served) if name == tenant)
        assert served[: last + 1].count("eve") <= queue + 1


def test_all_are_served_in_the_end() -> None:
    assert sorted(play({"eve": [1, 2, 3], "ann": [1]})) == ["ann"] + ["eve"] * 6


def test_a_quantum_ends() -> None:
    now_ns = [5]

    async def main() -> None:
        queue, seen = FairQueue(lambda: now_ns[0]), list[bool]()

        def serve() -> None:
            for step_ns in (0, QUANTUM_NS - 1, 1):
                now_ns[0] += step_ns
                seen.append(queue.is_quantum_over)

        queue.enqueue("ann", serve)
        assert seen == [False, False, True]
        await asyncio.sleep(0)

    asyncio.run(main())
