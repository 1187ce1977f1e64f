import pytest

from gpulease.daemon.config.settings import changed_hands

OF_UID = {7: "ann", 8: "bob"}
OF_CERTIFICATE = {"DNS:a": "ann", "DNS:c": "cid"}


@pytest.mark.parametrize(
    ("of_uid", "of_certificate", "changed"),
    [
        (OF_UID, OF_CERTIFICATE, set()),
        ({7: "ann"}, OF_CERTIFICATE, {"bob"}),
        ({8: "ann", 7: "bob"}, OF_CERTIFICATE, {"ann", "bob"}),
        (OF_UID | {9: "ann"}, OF_CERTIFICATE, {"ann"}),
        (OF_UID | {9: "dan"}, OF_CERTIFICATE, {"dan"}),
        (OF_UID, {"DNS:a": "ann", "DNS:d": "cid"}, {"cid"}),
        # Without a table a certificate says itself whose it is.
        (OF_UID, {}, {"ann", "bob", "cid"}),
    ],
)
def test_names_that_may_be_other_peoples_by_now(
    of_uid: dict[int, str], of_certificate: dict[str, str], changed: set[str]
) -> None:
    assert changed_hands((OF_UID, of_uid), (OF_CERTIFICATE, of_certificate)) == changed
    assert changed_hands((of_uid, OF_UID), (of_certificate, OF_CERTIFICATE)) == changed
