from gpulease.client.core.lease import LeaseReport
from gpulease.daemon.broker.reports import lease_report, orphan_report, park_report
from gpulease.daemon.leases.model import LeaseSnapshot, LeaseState
from gpulease.protocol.lease_options import EXCLUSIVITY, OPTIONS


def test_a_report_has_the_lease_options_that_say_so() -> None:
    lease = LeaseSnapshot(
        *(5, "ann", "GPU-a", 100, EXCLUSIVITY.default, 1, LeaseState.ACTIVE, None, "", "", 1, 2, None, 4),
        name="model-a",
        epoch=3,
    )
    report = lease_report(lease, None, 0) | orphan_report(0, None, 0) | {"park": park_report(None, 0)}
    keys = {option.report_key for option in OPTIONS if option.report_key}
    assert keys
    assert keys - report.keys() == set()
    assert keys - LeaseReport.__annotations__.keys() == set()
