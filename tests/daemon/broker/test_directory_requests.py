"""A node is no directory of a fleet, and says so to whoever takes it for one."""

from gpulease.protocol import messages as m
from gpulease.protocol.opcodes import Opcode, Status

from helpers.region_broker import Broker, with_broker  # isort: skip


@with_broker
async def test_a_node_says_that_it_is_no_directory(broker: Broker) -> None:
    for op, body in ((Opcode.PLACE, m.Place(1 << 20, 0, "", (), None, ())), (Opcode.FLEET_LIST, m.Empty())):
        failure = await broker.ann.refused(op, body)
        assert failure.status is Status.UNSUPPORTED
        assert "must be sent to a directory of a fleet, not to a node" in failure.message
        assert "without fleet:" in failure.hint
        assert (await broker.ann.ask(Opcode.PING, m.Ping(7))).nonce == 7
