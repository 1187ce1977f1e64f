"""Every event that the daemon logs: its name, its level, its message and its fields.

People search for names and build alerts on them, so names never change.
`daemon/manual/logs.md` has this table.
"""

import logging
from dataclasses import field
from enum import Enum
from typing import Final

from gpulease.protocol.fast_dataclass import dataclass

DEBUG: Final = logging.DEBUG
INFO: Final = logging.INFO
WARNING: Final = logging.WARNING
ERROR: Final = logging.ERROR

_LEASE: Final = ("lease_id", "tenant", "card", "size_bytes", "name", "epoch")
_OR_REGION: Final = (*_LEASE, "parent")
"""A region's events also have `parent`: the lease that the region is part of."""


@dataclass(frozen=True, slots=True)
class LogKind:
    """A kind of event.

    Attributes:
        name: The subject, a dot, and the event.
        level: One of the levels of `logging`.
        warns_of_failures: Whether its records that report a failure are warnings, whatever `level` is.
        message: A sentence about the event. It may show fields, such as `{reason}`, that have no text from a tenant;
            such an event is logged with `log_event`.
        fields: Fields that its records may have, in addition to those of every record. `_s`, `_ms` and `_bytes` are
            units.
    """

    name: str
    level: int
    message: str
    fields: tuple[str, ...] = ()
    warns_of_failures: bool = field(default=False, kw_only=True)


class LogEvent(Enum):
    # --- a lease's life: from its request to the proof that its memory is free ---
    LEASE_REQUESTED = LogKind(
        "lease.requested",
        INFO,
        "lease requested",
        ("lease_id", "tenant", "size_bytes", "ttl_ms", "wait_ms", "exclusivity", "wanted_card"),
    )
    LEASE_QUEUED = LogKind("lease.queued", INFO, "the request waits in the queue", ("lease_id", "tenant"))
    LEASE_PLACED = LogKind(
        "lease.placed", INFO, "the lease was assigned to a worker", (*_LEASE, "is_warm", "waited_ms")
    )
    WORKER_READY = LogKind("worker.ready", INFO, "the worker has its context", ("lease_id", "worker_pid", "took_ms"))
    WORKER_FAILED = LogKind(
        "worker.failed", WARNING, "the worker could not make its context", ("lease_id", "worker_pid", "reason")
    )
    LEASE_GRANTED = LogKind(
        "lease.granted",
        INFO,
        "lease granted",
        (*_OR_REGION, "worker_pid", "generation", "exclusivity", "ttl_ms", "took_ms"),
    )
    LEASE_ADOPTED = LogKind(
        "lease.adopted",
        INFO,
        "a lease of an earlier daemon was taken over",
        (*_OR_REGION, "worker_pid", "generation", "ttl_ms"),
    )
    # Sessions, regions and submits of a lease that is active.
    SESSION_ATTACHED = LogKind(
        "session.attached", INFO, "a connection was passed to the worker", ("lease_id", "tenant", "worker_pid")
    )
    SESSION_FAULTED = LogKind(
        "session.faulted", INFO, "the session's context is lost", (*_LEASE, "worker_pid", "reason")
    )
    LEASE_RENEWED = LogKind("lease.renewed", INFO, "lease renewed", (*_OR_REGION, "generation", "ttl_ms", "by"))
    LEASE_RESIZED = LogKind("lease.resized", INFO, "lease resized", (*_LEASE, "by"))
    LEASE_PARKED = LogKind(
        "lease.parked",
        INFO,
        "the session's memory was moved to the host, and its bytes on the card are proved free",
        (*_LEASE, "why", "moved_bytes", "took_ms"),
    )
    LEASE_RETURNED = LogKind(
        "lease.returned",
        INFO,
        "the parked session is on its card again",
        (*_LEASE, "moved_bytes", "parked_ms", "took_ms"),
    )
    LEASE_COLD = LogKind(
        "lease.cold",
        INFO,
        "the parked session's worker is ended; the session uses no memory of any card",
        (*_LEASE, "image_bytes", "took_ms"),
    )
    LEASE_MOVED = LogKind(
        "lease.moved",
        INFO,
        "the session is on another card",
        (*_LEASE, "from_card", "way", "through_host", "moved_bytes", "took_ms"),
    )
    LEASE_UPGRADED = LogKind(
        "lease.upgraded",
        INFO,
        "the session moved from a worker of another version to one of this version",
        (*_LEASE, "worker_pid", "from_version", "moved_bytes", "took_ms"),
    )
    LEASE_PARK_FAILED = LogKind(
        "lease.park_failed",
        INFO,
        "a session could not be parked, or could not return to its card; it stays where it is",
        ("lease_id", "tenant", "why", "reason"),
    )
    FORWARD_REVOKED = LogKind(
        "region.forward_revoked",
        INFO,
        "a launch that named the region was refused",
        ("lease_id", "tenant", "parent", "status", "kernel", "site", "position", "seen_after_us", "told_after_us"),
    )
    SUBMIT_READY = LogKind("submit.ready", INFO, "a submit has its context", ("lease_id", "tenant", "worker_pid"))
    SUBMIT_ENDED = LogKind(
        "submit.ended", INFO, "the submit ended, and its memory is proved free", ("lease_id", "tenant", "reason")
    )
    SUBMIT_FENCED = LogKind(
        "submit.fenced",
        WARNING,
        "the end of a submit can't be proved: its lease accepts no more submits",
        ("lease_id", "tenant", "reason"),
    )
    # The end of a lease, in the order in which it happens.
    LEASE_WARNED = LogKind(
        "lease.warned",
        INFO,
        "subscribers were notified how long the lease can continue",
        ("lease_id", "left_ms", "reason"),
    )
    LEASE_ENDING = LogKind(
        "lease.ending",
        INFO,
        "the lease has ended: its work is refused",
        (*_OR_REGION, "worker_pid", "cause", "reason", "held_ms", "late_ms"),
        warns_of_failures=True,
    )
    WORKER_KILLED = LogKind("worker.killed", DEBUG, "the worker is killed", ("lease_id", "worker_pid"))
    WORKER_KILLED_ALONE = LogKind(
        "worker.killed_alone",
        INFO,
        "the zygote killed the worker: no broker is running",
        ("lease_id", "worker_pid"),
    )
    WORKER_OVERDUE = LogKind(
        "worker.overdue",
        WARNING,
        "the zygote killed the worker: the broker did not end it in time",
        ("lease_id", "worker_pid", "reason"),
    )
    WORKER_EXITED = LogKind("worker.exited", INFO, "the worker has ended", ("lease_id", "worker_pid", "reason"))
    WORKER_DIED = LogKind(
        "worker.died",
        WARNING,
        "the worker ended unexpectedly",
        ("lease_id", "worker_pid", "reason"),
    )
    LEASE_RECLAIMED = LogKind(
        "lease.reclaimed",
        INFO,
        "memory proved free",
        (*_OR_REGION, "cause", "reason", "held_ms", "reclaim_ms"),
    )
    LEASE_FENCED = LogKind(
        "lease.fenced",
        WARNING,
        "memory could not be proved free: it is fenced",
        (*_OR_REGION, "cause", "reason", "held_ms", "reclaim_ms"),
    )
    LEASE_UNFENCED = LogKind("lease.unfenced", INFO, "an operator cleared the fence", (*_OR_REGION, "by"))
    # --- requests and tokens ---
    REQUEST_DENIED = LogKind(
        "request.denied",
        INFO,
        "request denied",
        ("operation", "tenant", "lease_id", "denial", "reason", "size_bytes", "ttl_ms", "wanted_card", "name"),
    )
    OPERATOR_ACTED = LogKind(
        "operator.acted",
        INFO,
        "an operator's request was carried out",
        ("action", "by", "lease_id", "reason", "outcome", "count", "contexts", "card", "within_ms", "took_ms"),
    )
    TOKEN_ISSUED = LogKind(
        "token.issued", INFO, "a token was issued", ("lease_id", "tenant", "by", "permissions", "nonce")
    )
    TOKEN_REVOKED = LogKind("token.revoked", INFO, "a token was revoked", ("lease_id", "tenant", "by", "nonce"))
    # --- workers and contexts ---
    WORKER_SAID = LogKind(
        "worker.said", INFO, "output of a worker or its kernel:", ("lease_id", "worker_pid", "said", "lost_lines")
    )
    WORKER_NOT_STARTED = LogKind("worker.not_started", WARNING, "no worker can be started", ("lease_id", "reason"))
    WORKER_OVER_SLICE = LogKind(
        "worker.over_slice",
        WARNING,
        "a session is ended: it holds more of its card's memory than was leased",
        ("lease_id", "reason"),
    )
    WORKER_UNMEASURED = LogKind(
        "worker.unmeasured", WARNING, "a session is ended: its card's memory can't be read", ("lease_id", "reason")
    )
    WARM_GONE = LogKind("warm.gone", INFO, "a pre-created context was ended", ("card", "reason"))
    WARM_REFUSED = LogKind(
        "warm.refused", INFO, "the lease's context is not reused for its tenant's next lease", ("lease_id", "reason")
    )
    WARM_FENCED = LogKind(
        "warm.fenced",
        WARNING,
        "the memory of a pre-created context could not be proved free: it is fenced",
        ("card", "reason"),
    )
    # --- the daemon: its sockets, start and stop ---
    DAEMON_LISTENING = LogKind(
        "daemon.listening", INFO, "gpuleased {version} listens on {address}", ("address", "version")
    )
    DAEMON_SEEN = LogKind("daemon.seen", INFO, "gpuleased {version} serves its web page at {url}", ("url", "version"))
    DAEMON_MADE_FOLDER = LogKind(
        "daemon.made_folder", INFO, "created the folder for the socket, which did not exist", ("path", "mode")
    )
    SOCKET_ANEW = LogKind(
        "socket.anew", WARNING, "a socket's file was removed: the socket was created again", ("path",)
    )
    SOCKET_LOCK_ANEW = LogKind(
        "socket.lock_anew", WARNING, "the lock next to a socket was removed: it was created again", ("path",)
    )
    SOCKET_LOST = LogKind(
        "socket.lost", ERROR, "a socket's file was removed, and it can't be created again yet", ("path", "reason")
    )
    DAEMON_STOPPING = LogKind("daemon.stopping", INFO, "stopping")
    DAEMON_FAILED = LogKind(
        "daemon.failed", ERROR, "the daemon exits because of an error: {reason}", ("reason", "hint", "status")
    )
    DAEMON_FAULT = LogKind(
        "daemon.fault", ERROR, "internal error of the daemon: please report it", ("doing", "traceback")
    )
    # --- cards, settings, the service manager and the sandbox ---
    CARD_FOUND = LogKind(
        "card.found", INFO, "a card can be leased", ("index", "card", "name", "capacity_bytes", "overhead_bytes")
    )
    CARDS_PRETENDED = LogKind(
        "cards.pretended", WARNING, "the cards are emulated, although the settings did not request it", ("reason",)
    )
    CARD_CROWDED = LogKind(
        "card.crowded",
        WARNING,
        "cards were measured while workers of an earlier daemon ran, so too little memory may be leased: "
        "restart the daemon to measure them again",
    )
    CARD_UNREAD = LogKind(
        "card.unread",
        WARNING,
        "the card could not be read at the start of the daemon: nothing is granted on it until it can be read",
        ("card", "reason"),
    )
    CARD_SHRANK = LogKind(
        "card.shrank",
        INFO,
        "the driver, or programs outside the daemon, hold more of the card's memory than before",
        ("card", "capacity_bytes", "unowned_bytes", "outside_bytes"),
    )
    CARD_GREW = LogKind(
        "card.grew",
        INFO,
        "the driver, or programs outside the daemon, hold less of the card's memory than before",
        ("card", "capacity_bytes", "unowned_bytes", "outside_bytes"),
    )
    CARDS_AWAITED = LogKind(
        "cards.awaited",
        WARNING,
        "the cards can't be used yet: {reason}; the daemon retries for {patience_s:g} s. {hint}",
        ("reason", "hint", "patience_s"),
    )
    SETTING_BEYOND_HOST = LogKind(
        "setting.beyond_host", WARNING, "a setting needs cards or memory that this host does not have now", ("reason",)
    )
    SETTINGS_READ = LogKind(
        "settings.read",
        INFO,
        "settings reloaded; those in `changed` are in effect, those in `waiting` take effect at the next start",
        ("changed", "waiting"),
    )
    SETTINGS_KEPT = LogKind(
        "settings.kept", ERROR, "the settings were not reloaded, so the old ones stay in effect: {reason}", ("reason",)
    )
    MANAGER_DEAF = LogKind(
        "manager.deaf", WARNING, "the service manager can't be notified of the daemon's state: {reason}", ("reason",)
    )
    SANDBOX_OFF = LogKind("sandbox.off", WARNING, "a measure of the workers' sandbox is off", ("measure", "reason"))
    # --- what an earlier daemon left; zygotes ---
    SESSIONS_FOUND = LogKind(
        "sessions.found", INFO, "found leases and workers of an earlier daemon", ("count", "going_on")
    )
    WORKER_STRAY = LogKind(
        "worker.stray", WARNING, "the lease's worker has no zygote, so it is ended", ("lease_id", "worker_pid")
    )
    RECLAIM_AWAITED = LogKind(
        "reclaim.awaited", DEBUG, "the card does not report the memory as free yet", ("lease_id", "reason")
    )
    TURNS_LOST = LogKind(
        "session.turns_lost",
        DEBUG,
        "the session left too much of its turns on the card unused, so it gets none for a while",
        ("lease_id", "for_ms", "due_ms", "busy_ms", "held_ms"),
    )
    ZYGOTE_DIED = LogKind("zygote.died", ERROR, "the zygote died: every session ends with it; it will be restarted")
    ZYGOTE_NOT_STARTED = LogKind("zygote.not_started", ERROR, "the zygote can't be started", ("reason", "hint"))
    ZYGOTE_BACK = LogKind("zygote.back", INFO, "the zygote runs again")
    ZYGOTE_LEFT = LogKind("zygote.left", INFO, "an earlier daemon's zygote has ended")
    ZYGOTE_HUNG = LogKind(
        "zygote.hung", ERROR, "a zygote does not answer; it is killed, and its sessions with it", ("zygote_pid",)
    )
    # --- the journal, the audit log and memory: each event that begins a problem has one that ends it ---
    JOURNAL_FAILING = LogKind("journal.failing", ERROR, "the journal can't be written", ("reason",))
    JOURNAL_BACK = LogKind("journal.back", WARNING, "the journal can be written again")
    JOURNAL_SHORT = LogKind(
        "journal.short", ERROR, "the daemon stops, and its last changes are not in the journal", ("reason",)
    )
    AUDIT_CONTINUED = LogKind("audit.continued", INFO, "the audit log continues", ("record", "hash"))
    AUDIT_NOT_AS_LEFT = LogKind(
        "audit.not_as_left", WARNING, "the audit log is not as the last daemon left it", ("reason",)
    )
    AUDIT_FAILING = LogKind("audit.failing", ERROR, "the audit log can't be written", ("reason",))
    AUDIT_HEAD_FAILING = LogKind("audit.head_failing", ERROR, "the audit log's head can't be written", ("reason",))
    AUDIT_BACK = LogKind("audit.back", WARNING, "the audit log can be written again")
    AUDIT_DROPPED = LogKind("audit.dropped", WARNING, "records were dropped and are not in the audit log", ("count",))
    AUDIT_SHORT = LogKind(
        "audit.short", ERROR, "the daemon stops, and its last records are not in the audit log", ("reason",)
    )
    AUDIT_CLOSED = LogKind("audit.closed", INFO, "the audit log ends here", ("record", "hash"))
    MEMORY_SHORT = LogKind(
        "memory.short",
        ERROR,
        "the daemon is out of memory: new requests are refused until memory is available; leases "
        "continue and end as usual",
    )
    MEMORY_BACK = LogKind("memory.back", WARNING, "memory is available again")
    # --- helper processes: the gate for remote tenants, the web process, the fleet process ---
    GATE_DIED = LogKind(
        "gate.died",
        ERROR,
        "the gate for remote tenants died: it will be restarted; open connections continue",
        ("reason",),
    )
    GATE_HUNG = LogKind(
        "gate.hung",
        ERROR,
        "the gate for remote tenants hangs: it is killed and restarted; open connections continue",
        ("reason",),
    )
    GATE_NOT_STARTED = LogKind("gate.not_started", ERROR, "the gate for remote tenants can't be started", ("reason",))
    GATE_BACK = LogKind("gate.back", INFO, "the gate for remote tenants runs again")
    GATE_IDENTITY = LogKind("gate.identity", INFO, "reloaded the node's certificate, key and trusted authorities")
    GATE_CLOSED = LogKind("gate.closed", ERROR, "no remote tenant can connect", ("reason",))
    WEB_DIED = LogKind(
        "web.died", ERROR, "the web process died: it will be restarted; leases are not affected", ("reason",)
    )
    WEB_HUNG = LogKind(
        "web.hung", ERROR, "the web process hangs: it is killed and restarted; leases are not affected", ("reason",)
    )
    WEB_NOT_STARTED = LogKind("web.not_started", ERROR, "the web process can't be started", ("reason",))
    WEB_BACK = LogKind("web.back", INFO, "the web process runs again")
    WEB_WRONG_TOKEN = LogKind(
        "web.wrong_token", WARNING, "requests to the web page had a wrong operator's token", ("count",)
    )
    FLEET_DIED = LogKind(
        "fleet.died", ERROR, "the fleet process died: it will be restarted; leases continue meanwhile", ("reason",)
    )
    FLEET_HUNG = LogKind(
        "fleet.hung",
        ERROR,
        "the fleet process hangs: it is killed and restarted; leases continue meanwhile",
        ("reason",),
    )
    FLEET_NOT_STARTED = LogKind("fleet.not_started", ERROR, "the fleet process can't be started", ("reason",))
    FLEET_BACK = LogKind("fleet.back", INFO, "the fleet process runs again")
    # Messages of the fleet process, and of the store behind it.
    FLEET_JOINED = LogKind("fleet.joined", INFO, "the node has joined its fleet", ("node", "incarnation"))
    FLEET_FENCED = LogKind(
        "fleet.fenced", ERROR, "the fleet has declared this node dead: its named leases end", ("reason",)
    )
    FLEET_NOTED = LogKind(
        "fleet.noted",
        INFO,
        "the state of the node's membership in its fleet has changed",
        ("what", "reason", "node", "lease_name"),
    )
    FLEET_STORE_LARGE = LogKind(
        "fleet.store_large",
        WARNING,
        "etcd's database is close to its quota: if no space is left, all named leases end",
        ("reason",),
    )
    FLEET_UNREADABLE = LogKind(
        "fleet.unreadable",
        WARNING,
        "values in the fleet's etcd can't be read, and are treated as missing",
        ("reason", "suppressed"),
    )
    FLEET_NO_ADDRESS = LogKind(
        "fleet.no_address",
        WARNING,
        "directories can't offer this node to tenants: add a tls: address to listen, or set addresses in [fleet]",
    )
    # --- relays of remote tenants, and directories of a fleet ---
    TLS_NOT_USED = LogKind(
        "tls.not_used", WARNING, "the [tls] table is not used: no address of listen begins with tls:"
    )
    DRAIN_GOES_ON = LogKind(
        "drain.goes_on",
        WARNING,
        "this node is still being drained, as before the restart: `gpulease drain --cancel` ends the drain",
    )
    CARD_DRAIN_GOES_ON = LogKind(
        "drain.card_goes_on",
        WARNING,
        "this card is still being drained, as before the restart: `gpulease drain --device CARD "
        "--cancel` ends the drain",
        ("card",),
    )
    RELAY_ARRIVED = LogKind(
        "relay.arrived", DEBUG, "a remote tenant connects", ("relay_pid", "tenant", "peer", "serial")
    )
    RELAY_REVOKED = LogKind(
        "relay.revoked", WARNING, "a relay is ended because its certificate was revoked", ("relay_pid", "serial")
    )
    RELAY_NOT_WATCHED = LogKind(
        "relay.not_watched",
        ERROR,
        "a relay can't be watched: it will continue even if its certificate is revoked",
        ("relay_pid", "reason"),
    )
    RELAY_ENDED = LogKind("relay.ended", WARNING, "a relay ended with an error", ("relay_pid", "reason"))
    DIRECTORY_LISTENS = LogKind("directory.listens", INFO, "a directory of a fleet listens", ("address", "version"))
    DIRECTORY_CURRENT = LogKind(
        "directory.current", INFO, "the directory's view of its fleet is current", ("nodes", "names")
    )
    DIRECTORY_STALE = LogKind(
        "directory.stale", ERROR, "etcd has not answered for too long: the directory names no nodes", ("reason",)
    )
    DIRECTORY_COUNTS = LogKind(
        "directory.counts",
        INFO,
        "the directory's counts of the last minute",
        ("nodes", "names", "placed", "unplaced", "listed", "refused", "bad_records"),
    )
    STRANGER_REFUSED = LogKind(
        "stranger.refused", WARNING, "a connection was refused", ("peer", "reason", "suppressed")
    )
    # --- the log itself ---
    LOG_SUPPRESSED = LogKind(
        "log.suppressed",
        WARNING,
        "a tenant caused too many events, so some were not logged",
        ("tenant", "of_event", "count"),
    )
    LOG_DROPPED = LogKind("log.dropped", WARNING, "the log's reader is too slow, so records were dropped", ("count",))
    LOG_OTHER = LogKind("log.other", INFO, "a library's message, at its own level", ("logger", "traceback"))

    # Members are looked up with every record. `Enum` hashes their names, which is slow, and so is its `value`.
    __hash__ = object.__hash__
    kind: LogKind
    level: int

    def __init__(self, kind: LogKind) -> None:
        self.kind = kind
        self.level = kind.level
