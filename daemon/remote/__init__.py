"""Remote tenants: mutual TLS 1.3, in processes apart from the broker and the workers.

A worker speaks plain frames on a socket, and a session's bytes must not pass through the broker. So each TLS connection
has its own process, a **relay**. It speaks TLS on one side and has a socket pair on the other. The broker has the far
end, and after ATTACH the worker has it. Neither of them implements TLS. The kernel could do a relay's work (ktls), but
not every kernel has it, and Python can't hand the kernel the keys.

The **acceptor** makes the relays. It accepts connections and waits, in one process and for a bounded time, until a
connection has sent the beginning of a handshake. Then it gives the connection to a relay that it has forked before, or
forks one. The acceptor parses six bytes of a stranger's input. The relay does the handshake. If the peer's certificate
is valid, the relay reports it to the acceptor, on a channel of their own and before it decrypts any of the tenant's
bytes. The acceptor reports the tenant to the broker, and ignores the relay's later reports. So a tenant's bytes are in
no process that serves another tenant, except the broker.

The acceptor reads the node's private key but does not use it. A relay inherits the key, has it while it waits
for its connection, and forgets it when its handshake ends. OpenSSL overwrites its copy before the relay decrypts the
tenant's first byte. If the key or another file has changed, the acceptor ends the relays that wait before it gives one
of them a connection. A relay holds its own connection's keys and no other tenant's. The broker, the zygote and the
workers hold none of these keys.

A relay ends with its connection, with its inner socket, and with its tenant's certificate. While a worker has the inner
socket, the relay needs neither acceptor nor broker.

Sessions are not resumed. Resumption needs the key of the tickets. Every relay would hold it, and a relay that was taken
over could impersonate any tenant. A resumed handshake would save two signatures, but not the check of the revocation
list.
"""
