"""Remote tenants: mutual TLS 1.3 in processes apart from the broker and the workers.

A worker speaks plain frames on a socket, and the broker must not stand in a session's way. So each TLS connection has a
process of its own, a **relay**: TLS on one side, on the other a pair of sockets whose far end is the broker's and,
after ATTACH, the worker's. Neither of them knows TLS. The kernel could do a relay's work (ktls), but not every kernel
can, and nothing in Python hands it the keys.

The **gate** makes them: it accepts connections, waits, in one process and for a bounded time, until one has sent what
may be the beginning of a handshake, and forks a process for that one. It parses six bytes of what strangers send. The
relay shakes hands; if the other end's certificate holds, it says so to the gate, over a channel of their own and before
a byte of the tenant's is decrypted, and the gate tells the broker whose connection that is. What a relay says later
nobody hears. So no tenant's bytes are ever in a process that serves another one, but in the broker.

Who holds what: the gate reads the node's private key, because it must be told from the start whom to be; it makes no
use of it. A relay has it from the gate until its handshake ends, and then no more: OpenSSL overwrites its copy before
the first of the tenant's bytes is decrypted. Of tenants' keys, a relay has its own connection's alone. The broker, the
zygote and the workers hold none of all this.

A relay ends with its connection, with the socket on its other side, and with its tenant's certificate. It needs neither
gate nor broker while a worker has that socket.
"""
