"""Every limit of the wire format: its unit, and the mistake or attack it stops.

All are enforced before anything is allocated or read by the length they bound.
"""

from typing import Final

PROTOCOL_VERSION: Final = 1
"""The one version of this package. A frame of another version is refused, since its layout is unknown."""

MAX_PAYLOAD_BYTES: Final = 64 << 20
"""Largest payload of any frame. Stops a peer that announces 4 GiB and makes the receiver reserve it.
The largest honest frame is a module image; large copies are cut into DATA_CHUNK_BYTES pieces."""

MAX_CONTROL_PAYLOAD_BYTES: Final = 64 << 10
"""Largest payload of a request to the broker. No control request is over a few hundred bytes; a thousand connections
that each send half a frame can hold 64 MiB of the broker's memory at most."""

DATA_CHUNK_BYTES: Final = 1 << 20
"""The bytes of a copy that a client puts into one MEM_WRITE or MEM_READ. Larger pieces gain nothing on a socket and
delay the session's other requests."""

MAX_DATA_BYTES: Final = 16 << 20
"""Most bytes that one MEM_WRITE may carry or one MEM_READ may request. Bounds the reply that a worker has to hold."""

MAX_TEXT_BYTES: Final = 1024
"""Longest text of a control message (agent, device, reason). Stops log flooding through names."""

MAX_NOTE_BYTES: Final = 4096
"""Longest note for the audit log. Bounds the bytes that wait for the disk, and stops a tenant from storing files in the
log."""

MAX_KERNEL_NAME_BYTES: Final = 4096
"""Longest kernel name. Mangled C++ template names run to a kilobyte or two."""

MAX_ERROR_TEXT_BYTES: Final = 8192
"""Longest text in an error reply. A longer compiler log loses its beginning: the last lines name the fault."""

MAX_ARGUMENT_BYTES: Final = 32764
"""Most argument bytes of a launch (CUDA C++ Programming Guide, kernel parameters: 4 KiB, since CUDA 12.1 32,764)."""

MAX_ARGUMENTS: Final = 4096
"""Most arguments of a launch. Stops a sizes list that is longer than the bytes it describes."""

MAX_GRAPH_NODES: Final = 4096
"""Most nodes of a launch graph. The worker checks each node, which takes memory of the host and the card until the
graph is closed. A graph of a million would keep a worker from its other requests for minutes."""

MAX_GRAPH_NODE_BYTES: Final = 64 << 10
"""Longest body of a node. The largest launch fits; larger data belongs in the arena, from which a graph copies."""

MAX_GRAPH_BYTES: Final = 4 << 20
"""Longest payload of a GRAPH_CREATE. The worker keeps its content until the graph is closed."""

MAX_GRAPH_HANDLES: Final = 4096
"""Most buffers of a graph. Stops a list that is longer than the buffers of a session."""

MAX_GRAPH_PARAMETERS: Final = 256
"""Most parameters of a graph. Every GRAPH_LAUNCH reads each of them."""

MAX_GRAPH_PLACES: Final = 4096
"""Most arguments that take a graph's parameters. One GRAPH_LAUNCH may set all of them."""

MAX_PARAMETER_NAME_BYTES: Final = 256
"""Longest name of a parameter. Names appear only in messages."""

MAX_SUBMIT_ARGUMENTS: Final = 256
"""Most arguments of a submit, each a number or a buffer on the card. Stops a list of millions of empty ones."""

MAX_SUBMIT_OUTPUT_BYTES: Final = 16 << 20
"""Most bytes of all outputs of a submit. They are sent in one reply, which the worker holds."""

MAX_KERNELS: Final = 4096
"""Most kernels of one module listed in a reply. Stops a generated image from making a reply too large to send."""

MAX_STREAMS: Final = 32
"""Most streams of a session in addition to its default one. Each costs the driver queues on the host and the card,
which no slice bounds. A card does not run more at the same time (CUDA C++ Programming Guide,
CUDA_DEVICE_MAX_CONNECTIONS)."""

MAX_PRINTED_BYTES: Final = 1 << 20
"""Most bytes of kernels' output that wait for their tenant. Stops a kernel that prints from filling the
host's memory."""

MAX_EVENTS: Final = 1024
"""Most events of a session. Each costs the driver memory of the host, which no slice bounds."""

MAX_KEPT: Final = 256
"""Most allocations of a lease that are kept by name. Stops a loop that keeps each allocation under a new name."""

MAX_KEPT_NAME_BYTES: Final = 256
"""Longest of these names. One reply lists all of them."""

MAX_REGIONS: Final = 256
"""Most regions of a session at a time, and most in one region set: their words share one page with the worker."""

MAX_LABELS: Final = 32
"""Most labels that a request for a place names. A directory compares each with every node's."""

MAX_CANDIDATES: Final = 16
"""Most nodes that a directory names at a time. A client that has tried all of them in vain asks again."""

MAX_NODE_ADDRESSES: Final = 8
"""Most addresses of one node."""

MAX_TRIED: Final = 256
"""Most nodes that a request for a place leaves out."""

MAX_TLVS: Final = 64
"""Most TLVs in one list. Unknown ones are skipped, so without this a peer could keep the receiver busy."""

MAX_TOKEN_BYTES: Final = 4096
"""Longest token. The daemon's tokens have about 450 bytes, and each narrowing adds about 200. Bounds the work of a
signature check."""

AUDIENCE_BYTES: Final = 32
"""Length of an audience, the name of one holder on one node: a SHA-256."""

PUBLIC_KEY_BYTES: Final = 32
"""Length of a key that verifies tokens: Ed25519 (RFC 8032)."""

MAX_METRICS_BYTES: Final = 8 << 20
"""Longest exposition in a reply to METRICS. A daemon bounds its series and stays far below this. Stops another one from
filling a reader's memory."""

MAX_IN_FLIGHT: Final = 1024
"""Most requests of one control connection that await their reply. Stops a peer that asks and never reads."""

MAX_SUBSCRIPTIONS: Final = 64
"""Most subscriptions of one tenant, on all its connections together. Each costs the daemon some work whenever one of
its leases changes."""

RECEIVE_BUFFER_BYTES: Final = 128 << 10
"""The initial buffer of a frame reader. It grows with the bytes that arrive, never by the announced length."""

RETAINED_BUFFER_BYTES: Final = 4 << 20
"""The largest buffer that a frame reader keeps between frames. A copy is a stream of large frames, and allocating the
buffer for each would cost more than the copy."""

USUAL_MAX_WAIT_S: Final = 3600
"""Longest time, in seconds, that a request may wait for room, unless the operator sets another (`max_wait_s`). A client
that does not know with which wait a lease was acquired waits this long for the return of its session."""
