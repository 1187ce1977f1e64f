import pytest

from gpulease.daemon.broker.handlers.lease_requests import check_labels
from gpulease.protocol.failures import Refused
from gpulease.protocol.opcodes import Status


def test_a_node_needs_the_labels_that_are_asked_for() -> None:
    check_labels({}, {})
    check_labels({"zone": "a"}, {"zone": "a", "tier": "gold"})
    for own in ({}, {"zone": "b"}):
        with pytest.raises(Refused, match="zone=a") as caught:
            check_labels({"zone": "a"}, own)
        assert caught.value.failure.status is Status.UNSUPPORTED
