"""What settings say of each other, and of the host: tables for nobody's leases, cards and users that are not there.

Whoever writes limits for a tenant or a card that nothing is called believes that they hold: the daemon does not start.
"""

import pwd
from collections.abc import Iterable, Mapping
from typing import Final

from gpulease.daemon.core import Card
from gpulease.daemon.core.limits import CoreLimits
from gpulease.daemon.core.tenants import TenantRules
from gpulease.daemon.tenant_names import OVER_TCP
from gpulease.daemon.tls_settings import TlsSettings

_LOCAL: Final = "uid:"
MAX_CARDS_NAMED: Final = 8
"""In one sentence."""


def check_tenants(
    rules: TenantRules, of_uid: Mapping[int, str], of_certificate: Mapping[str, str], tls: TlsSettings | None
) -> None:
    """That each tenant who is spoken of can come. Raises ValueError with a sentence about one who can't."""
    if of_certificate and tls is None:
        raise ValueError("tenant_of_certificate needs a [tls] table: without it nobody shows a certificate")
    for name in rules.by_name:
        if name == OVER_TCP:
            continue
        if name.startswith(_LOCAL):
            named = of_uid.get(int(name.removeprefix(_LOCAL)))
            if named is not None:
                raise ValueError(f"tenants: {name!r} is nobody, because [tenant_of_uid] calls that user {named!r}")
        elif name not in of_uid.values() and not _has_certificate(name, of_certificate, tls):
            raise ValueError(
                f"tenants: nobody is {name!r}; name a user or a certificate so, in [tenant_of_uid] or"
                " [tenant_of_certificate]"
            )
    for name in sorted(tls.operators if tls is not None else ()):
        if not _has_certificate(name, of_certificate, tls):
            raise ValueError(f"tls: operators has {name!r}, and no certificate of [tenant_of_certificate] is {name!r}")


def _has_certificate(name: str, of_certificate: Mapping[str, str], tls: TlsSettings | None) -> bool:
    """Without the table a certificate may name any tenant by itself."""
    return tls is not None and (not of_certificate or name in of_certificate.values())


def check_bounds(rules: TenantRules, limits: CoreLimits) -> None:
    """That no tenant's bound is one that can't be reached. Raises ValueError with a sentence about one that is."""
    for name, bounds in {"default": rules.default, **rules.by_name}.items():
        if bounds.max_ttl_s is not None and bounds.max_ttl_s > limits.max_ttl_s:
            raise ValueError(
                f"tenants: max_ttl_s of {name!r} is {bounds.max_ttl_s}, and that of [limits], for all tenants, is"
                f" {limits.max_ttl_s}"
            )


def check_devices(rules: TenantRules, cards: Iterable[Card]) -> None:
    """That each card that a tenant may use is one of these. Raises ValueError with a sentence about one that is not."""
    there = list(cards)
    for name, bounds in {"default": rules.default, **rules.by_name}.items():
        for selector in bounds.devices or ():
            if not any(card.answers_to(selector) for card in there):
                known = ", ".join(f"{card.index} ({card.uuid})" for card in there[:MAX_CARDS_NAMED])
                raise ValueError(f"tenants: devices of {name!r} has {selector!r}; the cards of this host are {known}")


def check_worker_user(name: str) -> None:
    """That workers can be this user, and that it is not the one they are kept from being. Raises ValueError."""
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise ValueError(
            f"worker_user: there is no user {name!r}; make it, as systemd-sysusers makes that of install-service, or"
            " name another"
        ) from None
    if user.pw_uid == 0:
        raise ValueError(f"worker_user: {name!r} is root; name a user who may do nothing")
