import pytest

from gpulease.daemon.remote.node_identity import NoTenant, tenant_named

ANN = "URI:gpulease:tenant:ann"
TABLE = {"URI:spiffe://here/jobs": "jobs", "DNS:build.example": "build"}

TAKEN = [
    ([ANN], {}, "ann"),
    (["DNS:host.example", ANN], {}, "ann"),
    (["DNS:build.example", "DNS:other.example"], TABLE, "build"),
    (["URI:spiffe://here/jobs", ANN], TABLE, "jobs"),
]
REFUSED = [
    ([], {}, "no tenant name"),
    (["DNS:ann"], {}, "no tenant name"),
    (["URI:gpulease:Tenant:ann"], {}, "no tenant name"),
    (["DNS:gpulease:tenant:ann"], {}, "no tenant name"),
    ([ANN, "URI:gpulease:tenant:bob"], {}, "several tenant names"),
    ([ANN, ANN], {}, "several tenant names"),
    ([ANN, "DNS:*.example"], {}, "a wildcard"),
    (["URI:gpulease:tenant:*"], {}, "a wildcard"),
    (["URI:gpulease:tenant:"], {}, "not a valid tenant name"),
    (["URI:gpulease:tenant:uid:0"], {}, "not a valid tenant name"),
    (["URI:gpulease:tenant:tcp"], {}, "not a valid tenant name"),
    (["URI:gpulease:tenant:ann\nbob"], {}, "not a valid tenant name"),
    ([ANN], TABLE, "no tenant name"),
    (list(TABLE), TABLE, "several tenant names"),
]


@pytest.mark.parametrize(("names", "tenants", "tenant"), TAKEN)
def test_one_name_says_whose_it_is(names: list[str], tenants: dict[str, str], tenant: str) -> None:
    assert tenant_named(names, tenants) == tenant


@pytest.mark.exhaustive
@pytest.mark.parametrize(("names", "tenants", "why"), REFUSED)
def test_anything_else_is_nobodys(names: list[str], tenants: dict[str, str], why: str) -> None:
    with pytest.raises(NoTenant, match=why):
        tenant_named(names, tenants)
