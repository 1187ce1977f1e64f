"""Every limit of the wire format: its unit, and the mistake or attack that it stops.

All limits are checked before anything is allocated or read.
"""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""The only version that this package supports. A frame of another version is refused, because its layout is unknown."""

MAX_PAYLOAD_BYTES: Final = 64 << 20
"""Largest payload of any frame. Stops a peer that announces 4 GiB from making the receiver reserve that much. The
largest honest frame has a module image; large copies are cut into pieces of DATA_CHUNK_BYTES."""

MAX_CONTROL_PAYLOAD_BYTES: Final = 64 << 10
"""Largest payload of a request to the broker. Control requests have at most a few hundred bytes. A thousand connections
that each send half a frame can hold at most 64 MiB of the broker's memory."""

DATA_CHUNK_BYTES: Final = 1 << 20
"""Number of bytes of a copy that a client puts into one MEM_WRITE or MEM_READ. Larger pieces are no faster on a socket,
and delay the session's other requests."""

MAX_DATA_BYTES: Final = 16 << 20
"""Maximum number of bytes of one MEM_WRITE or MEM_READ. Limits the size of the reply that a worker must hold."""

MAX_TEXT_BYTES: Final = 1024
"""Longest text of a control message (agent, device, reason). Stops log flooding through names."""

MAX_NOTE_BYTES: Final = 4096
"""Longest note for the audit log. Limits the bytes that wait for the disk, and stops a tenant from storing files in the
log."""

MAX_KERNEL_NAME_BYTES: Final = 4096
"""Longest kernel name. Mangled C++ template names run to a kilobyte or two."""

MAX_ERROR_TEXT_BYTES: Final = 8192
"""Longest text in an error reply. A longer compiler log loses its beginning, because its end names the mistake."""

MAX_ARGUMENT_BYTES: Final = 32764
"""Maximum number of bytes of a launch's arguments (CUDA C++ Programming Guide, kernel parameters: 4 KiB, and since CUDA
12.1 32,764 bytes)."""

MAX_ARGUMENTS: Final = 4096
"""Maximum number of arguments of a launch. Stops a list of sizes that is longer than the bytes that it describes."""

MAX_GRAPH_NODES: Final = 4096
"""Maximum number of nodes of a launch graph. The worker checks each node, which takes memory of the host and the card
until the graph is closed. A graph of a million nodes would keep a worker from its other requests for minutes."""

MAX_GRAPH_NODE_BYTES: Final = 64 << 10
"""Longest body of a node. The largest launch fits; larger data belongs in the arena, from which a graph copies."""

MAX_GRAPH_BYTES: Final = 4 << 20
"""Longest payload of a GRAPH_CREATE. The worker keeps the payload's content until the graph is closed."""

MAX_GRAPH_HANDLES: Final = 4096
"""Maximum number of buffers of a graph. Stops a list that has more buffers than a session."""

MAX_GRAPH_PARAMETERS: Final = 256
"""Maximum number of parameters of a graph. Every GRAPH_LAUNCH reads all of them."""

MAX_GRAPH_PLACES: Final = 4096
"""Maximum number of arguments that use a graph's parameters. One GRAPH_LAUNCH may set all of them."""

MAX_PARAMETER_NAME_BYTES: Final = 256
"""Longest name of a parameter. Names appear only in messages."""

MAX_SUBMIT_ARGUMENTS: Final = 256
"""Maximum number of arguments of a submit, each a number or a buffer on the card. Stops a list of millions of empty
arguments."""

MAX_SUBMIT_OUTPUT_BYTES: Final = 16 << 20
"""Maximum number of bytes of all outputs of a submit. They are sent in one reply, which the worker must hold."""

MAX_KERNELS: Final = 4096
"""Maximum number of a module's kernels that a reply lists. Stops a generated image from making a reply too large to
send."""

MAX_STREAMS: Final = 32
"""Maximum number of a session's streams in addition to its default one. For each, the driver makes queues on the host
and the card, which do not count towards the slice. A card does not run more streams at the same time (CUDA C++
Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS)."""

MAX_PRINTED_BYTES: Final = 1 << 20
"""Maximum number of bytes of kernels' output that wait for their tenant. Stops a kernel that prints from filling the
host's memory."""

MAX_EVENTS: Final = 1024
"""Maximum number of events of a session. Each takes memory of the host, which does not count towards the slice."""

MAX_KEPT: Final = 256
"""Maximum number of a lease's allocations that are kept by name. Stops a loop that keeps each allocation under a new
name."""

MAX_KEPT_NAME_BYTES: Final = 256
"""Longest name of a kept allocation. One reply lists all names."""

MAX_REGIONS: Final = 256
"""Maximum number of regions of a session at a time, and of one region set. Their words share one page with the worker.
"""

MAX_LABELS: Final = 32
"""Maximum number of labels in a request for a place. A directory compares each with every node's."""

MAX_CANDIDATES: Final = 16
"""Maximum number of nodes that a directory names at a time. A client that was refused by all of them asks again."""

MAX_NODE_ADDRESSES: Final = 8
"""Maximum number of addresses of one node."""

MAX_TRIED: Final = 256
"""Maximum number of nodes that a request for a place excludes."""

MAX_TLVS: Final = 64
"""Maximum number of TLVs in one list. Unknown TLVs are skipped, so without this limit a peer could keep the receiver
busy."""

MAX_TOKEN_BYTES: Final = 4096
"""Longest token. The daemon's tokens have about 450 bytes, and each narrowing adds about 200. Limits the work of
checking a signature."""

AUDIENCE_BYTES: Final = 32
"""Length of an audience, the name of one holder on one node: a SHA-256."""

PUBLIC_KEY_BYTES: Final = 32
"""Length of a key that verifies tokens: Ed25519 (RFC 8032)."""

MAX_METRICS_BYTES: Final = 8 << 20
"""Longest exposition in a reply to METRICS. A daemon limits its series and stays far below this. Stops another program
from filling a reader's memory."""

MAX_IN_FLIGHT: Final = 1024
"""Maximum number of requests of one control connection that wait for their replies. Stops a peer that sends requests
and never reads."""

MAX_SUBSCRIPTIONS: Final = 64
"""Maximum number of subscriptions of one tenant, on all its connections together. Each costs the daemon some work
whenever a lease of the tenant changes."""

RECEIVE_BUFFER_BYTES: Final = 128 << 10
"""Initial size of a frame reader's buffer. The buffer grows with the bytes that are received, never by the announced
length."""

RETAINED_BUFFER_BYTES: Final = 4 << 20
"""Size of the largest buffer that a frame reader keeps between frames. A copy is a stream of large frames, and
allocating the buffer for each frame would cost more than the copy."""

USUAL_MAX_WAIT_S: Final = 3600
"""Longest time in seconds that a request may wait for room, unless the operator sets another (`max_wait_s`). A client
without a record of the wait with which a lease was acquired waits this long for the return of the lease's session."""
