"""Both ends of a TLS connection in one process. Neither verifies the other."""

import contextlib
import ssl
from pathlib import Path

from gpulease.daemon.remote.pki.certificates import PkiAuthority


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of a server and of a client."""
    authority = PkiAuthority.create(folder)
    issued = authority.issue_server(["localhost"])
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(issued.certificate, issued.key)
    server.num_tickets = 0
    client.load_verify_locations(authority.certificate_path)
    return server, client


class End:
    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if is_server else "localhost"
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=is_server, server_hostname=name)

    def shake(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()


def shaken(folder: Path) -> tuple[End, End]:
    """Return a server's end and a client's end, after their handshake."""
    contexts_ = contexts(folder)
    server, client = End(contexts_[0], is_server=True), End(contexts_[1], is_server=False)
    for _ in range(3):
        client.shake()
        server.incoming.write(client.outgoing.read())
        server.shake()
        client.incoming.write(server.outgoing.read())
    return server, client
