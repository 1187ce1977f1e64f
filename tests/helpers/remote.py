"""Remote tenants: a certificate authority for tests, certificates that it issued, and raw peers that use TLS."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from gpulease.client import GpuBuilder
from gpulease.daemon.remote.acceptor import SPARE_RELAYS
from gpulease.daemon.remote.pki.certificates import Issued, PkiAuthority
from gpulease.daemon.remote.relay import RELAY_NAME, SPARE_NAME
from gpulease.protocol import Connection, Role
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from helpers.daemon import Daemon, running
from helpers.processes import ProcessInfo
from helpers.raw_peer import RawPeer, connect
from helpers.waiting import wait_until


@dataclass(frozen=True)
class Pki:
    authority: PkiAuthority
    server: Issued
    ann: Issued
    bob: Issued
    ops: Issued

    @classmethod
    def make(cls, folder: Path) -> Self:
        authority = PkiAuthority.create(folder)
        ann, bob, ops = (authority.issue_tenant(name) for name in ("ann", "bob", "ops"))
        return cls(authority, authority.issue_server(["127.0.0.1", "localhost"]), ann, bob, ops)

    def settings(self, more: str = "", *, crl: bool = True) -> str:
        """Return a `[tls]` table that trusts this authority. `more` is further lines of it, or further tables."""
        lines = [
            "[tls]",
            f'certificate = "{self.server.certificate}"',
            f'key = "{self.server.key}"',
            f'client_ca = "{self.authority.certificate_path}"',
        ]
        if crl:
            lines.append(f'crl = "{self.authority.crl_path}"')
        return "\n".join([*lines, more, ""])

    @contextmanager
    def daemon(self, more: str = "") -> Iterator[Daemon]:
        """Yield a daemon that listens on TCP and TLS, with these settings. It must stop cleanly."""
        with running(Daemon(tcp=True, tls=True, config=self.settings(more))) as daemon:
            yield daemon

    def builder(self, address: str, who: Issued) -> GpuBuilder:
        """Return a builder for a small lease, with a tenant's credentials."""
        builder = GpuBuilder(address).min_vram(1 << 20).lease_secs(60)
        return builder.tls(str(who.certificate), str(who.key), str(self.authority.certificate_path))

    def be(self, who: Issued, monkeypatch: Any) -> None:
        """Set the environment variables to that tenant's credentials."""
        monkeypatch.setenv("GPULEASE_TLS_CERTIFICATE", str(who.certificate))
        monkeypatch.setenv("GPULEASE_TLS_KEY", str(who.key))
        monkeypatch.setenv("GPULEASE_TLS_CA", str(self.authority.certificate_path))

    def peer(self, address: str, who: Issued) -> "TlsPeer":
        """Return a raw peer with that tenant's credentials."""
        return TlsPeer(address, self.context(who))

    def context(self, who: Issued | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.authority.certificate_path)
        if who is not None:
            context.load_cert_chain(who.certificate, who.key)
        return context

    def short_lived(self, tenant: str, seconds: float) -> Issued:
        """Return a tenant's certificate that expires after `seconds`; if negative, it has already expired."""
        return self.authority.issue_tenant(tenant, timedelta(seconds=seconds))


class TlsPeer(RawPeer):
    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        plain = connect(address)
        try:
            self.sock = context.wrap_socket(plain, server_hostname="localhost")
        except BaseException:
            plain.close()
            raise
        self.connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self.session_id = 0


def relays(daemon: Daemon) -> list[ProcessInfo]:
    """Return the relays of a daemon that have a connection."""
    return [info for info in daemon.processes() if info.name == RELAY_NAME]


def spares(daemon: Daemon) -> list[ProcessInfo]:
    """Return the relays of a daemon that wait for a connection, after all have started."""

    def waiting() -> list[ProcessInfo]:
        return [info for info in daemon.processes() if info.name == SPARE_NAME]

    wait_until(lambda: len(waiting()) == SPARE_RELAYS, "all wait", seen=waiting)
    return waiting()


def gate_pid(daemon: Daemon) -> int:
    (gate,) = [info for info in daemon.processes() if info.name == "gpul-gate" and info.parent == daemon.process.pid]
    return gate.pid
