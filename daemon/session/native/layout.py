"""The C structures that Python fills and serve.ll reads and writes; serve.ll repeats the offsets of their fields.

All addresses belong to this process. Each field takes eight bytes (u64), so field n is at offset 8 * n.
"""

import ctypes
from enum import IntEnum


class Outcome(IntEnum):
    """Why `gpulease_serve_ring` returned.

    IDLE: the ring was empty for the whole time for which it was polled. FRAMES: the next bytes in the buffer or ring
    must be handled by Python. QUANTUM_OVER: the connection was served for its full time, and others must be served; or
    the regions page has changed, so that the broker is about to send an order. WAKE_READER: the client sleeps until a
    reply is in the ring, and must be woken. WAKE_WRITER: the client sleeps until the ring has room, and must be woken.
    REFUSED: a launch was refused because of a revoked region (RegionCheckRecord); `LaunchFastPath` handles this itself.
    """

    IDLE = 0
    FRAMES = 1
    QUANTUM_OVER = 2
    WAKE_READER = 3
    WAKE_WRITER = 4
    REFUSED = 5


class Move(ctypes.Structure):
    """A copy of an argument from the frame to the parameter buffer.

    start   Offset of the argument in the argument bytes of the frame.
    target  Offset of the argument in the parameter buffer.
    size    Size of the argument in bytes.
    """

    _fields_ = (("start", ctypes.c_uint64), ("target", ctypes.c_uint64), ("size", ctypes.c_uint64))


class PlanRecord(ctypes.Structure):
    """A plan of launches.Planner.

    A frame of the plan is `front`, the request id, `middle`, arguments, `tail`, and a LAUNCH_IN's trailer.

    front         Address of the 16 bytes before the request id.
    middle        Address of the bytes between the request id and the arguments, `middle_bytes` of them.
    middle_bytes
    tail          Address of the bytes after the arguments, `tail_bytes` of them.
    tail_bytes
    args_bytes    Size of the arguments on the wire.
    frame_bytes   Size of the whole frame.
    launch        Address of the driver's own record of the launch; 0 if only Python can launch it.
    moves         Address of `moves_count` Moves; 0 if the arguments on the wire are the parameter buffer.
    moves_count
    param_bytes   Size of the parameter buffer.
    follower      Address of the record of the plan that is expected next; never 0.
    trailer_bytes Size of the region set and the position after `tail`: 16 in a LAUNCH_IN, else 0.
    tail_at       Where `tail` begins in the frame.
    chain         Address of the longest ChainRecord that begins with the plan; 0 for none.
    refusal       Address of the `refusal_bytes` bytes about a LAUNCH_IN's kernel in its refusal (region_refusals.py).
    refusal_bytes
    mean          Address of the running mean time of this plan's launches, in ns; 0 until one was measured.
    """

    _fields_ = (
        ("front", ctypes.c_uint64),
        ("middle", ctypes.c_uint64),
        ("middle_bytes", ctypes.c_uint64),
        ("tail", ctypes.c_uint64),
        ("tail_bytes", ctypes.c_uint64),
        ("args_bytes", ctypes.c_uint64),
        ("frame_bytes", ctypes.c_uint64),
        ("launch", ctypes.c_uint64),
        ("moves", ctypes.c_uint64),
        ("moves_count", ctypes.c_uint64),
        ("param_bytes", ctypes.c_uint64),
        ("follower", ctypes.c_uint64),
        ("trailer_bytes", ctypes.c_uint64),
        ("tail_at", ctypes.c_uint64),
        ("chain", ctypes.c_uint64),
        ("refusal", ctypes.c_uint64),
        ("refusal_bytes", ctypes.c_uint64),
        ("mean", ctypes.c_uint64),
    )


class RegionRecord(ctypes.Structure):
    """A region that sets name, as native code compares it with the regions page and refuses launches for it.

    column       Offset of the region's slot in each of the page's columns.
    active       The region's word while the region is active; NO_WORD once it has ended in the session.
    revoked      The region's word after a revocation; NO_WORD once a refusal has reported how the region ended.
    front        Address of the first `front_bytes` bytes of a refusal's payload, up to and including the launch's
                 request id.
    front_bytes
    back         Address of the 48 bytes of the payload after those about the kernel.
    """

    _fields_ = (
        ("column", ctypes.c_uint64),
        ("active", ctypes.c_uint64),
        ("revoked", ctypes.c_uint64),
        ("front", ctypes.c_uint64),
        ("front_bytes", ctypes.c_uint64),
        ("back", ctypes.c_uint64),
    )


class RegionCheckRecord(ctypes.Structure):
    """The regions page, the regions of the set in use, and the last refusal of a launch in them.

    words       Address of the page's words.
    flipped     Address of the times at which the page's words last changed.
    deadlines   Address of the page's deadlines.
    members     Address of the addresses of `count` RegionRecords.
    count       Number of the set's regions; 0 leaves every comparison to Python.
    settled     Launches counted when Python last answered a wait, or reported a failure.
    front       Address of the first 12 bytes of a SYNC's reply that reports a revoked region.
    reply       Address of REFUSAL_BYTES bytes where this reply is built.
    number      The refused launch's request id, as on the wire.
    plan        Address of the refused launch's PlanRecord.
    member      Index of the revoked region in the set.
    position    The launch's position, as on the wire.
    flipped_ns  When the region's word was changed.
    seen_ns     When the launch was refused.
    told_ns     When the reply was made; 0 if the tenant's SYNC did not come in time.
    wakes       The Outcome that wakes the client, WAKE_READER or WAKE_WRITER; 0 if it does not sleep.
    """

    _fields_ = (
        # Set before each call.
        ("words", ctypes.c_uint64),
        ("flipped", ctypes.c_uint64),
        ("deadlines", ctypes.c_uint64),
        ("members", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("settled", ctypes.c_uint64),
        ("front", ctypes.c_uint64),
        ("reply", ctypes.c_uint64),
        # The facts of a refusal.
        ("number", ctypes.c_uint64),
        ("plan", ctypes.c_uint64),
        ("member", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("flipped_ns", ctypes.c_uint64),
        ("seen_ns", ctypes.c_uint64),
        ("told_ns", ctypes.c_uint64),
        ("wakes", ctypes.c_uint64),
    )


class ChainStep(ctypes.Structure):
    """A launch of a chain.

    plan    Address of the PlanRecord that its frame is compared with; the frame is a LAUNCH.
    params  Address of the launch's parameter buffer, which the driver reads again when a replay names it as changed.
    """

    _fields_ = (("plan", ctypes.c_uint64), ("params", ctypes.c_uint64))


class LaunchChainRecord(ctypes.Structure):
    """Launches that have followed each other, and that the driver queues by one call.

    count         Number of launches, at most 64.
    frames_bytes  Size of their frames together.
    steps         Address of `count` ChainSteps.
    graph         Address of the driver's own record.
    shorter       Address of a shorter ChainRecord that begins with the same plan; 0 for none.
    stale         A bit for each step, set if its parameter buffer has changed since the driver last read it.
    """

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("frames_bytes", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("graph", ctypes.c_uint64),
        ("shorter", ctypes.c_uint64),
        ("stale", ctypes.c_uint64),
    )


class ServingState(ctypes.Structure):
    """A session, and the receive buffer that native code works on.

    page          Address of the lease's control page: the revocation word, the deadline, the membership deadline.
    counters      Address of the control page's counters.
    launch        Address of the driver's launch function (NativeLaunch.launch).
    query         Address of the driver's query function (NativeLaunch.query).
    driver        First argument of both functions.
    scratch       Address of SCRATCH_BYTES bytes where parameter buffers are built.
    sync_front    Address of the 16 bytes of a SYNC before its request id.
    sync_tail     Address of the 16 bytes of a SYNC after its request id.
    reply_front   Address of the 16 bytes of a SYNC's successful reply before its request id.
    reply_tail    Address of the 16 bytes of that reply after its request id.
    sync_spin_ns  For how long a SYNC may poll the driver before Python waits instead.
    buffer        Address of the receive buffer.
    start         Offset in the buffer of the first byte that is not served yet.
    end           Offset in the buffer after the last byte received.
    expected      Address of the PlanRecord of the next launch, 0 for none.
    latest        Address of the PlanRecord of the last launch done, 0 for none.
    clock_ns      The monotonic clock when it was last read.
    region_set    The bytes, as on the wire, of the handle of the region set in use.
    set_epoch     The regions page's epoch when that set was compared; NO_EPOCH without a set.
    set_deadline  The earliest deadline of the set's regions, on the monotonic clock.
    epoch         Address of the regions page's epoch; if there is no page, address of a word that never changes.
    seen_epoch    The page's epoch when Python last read it. With another epoch, a ring is served for one portion only.
    synced        Launches counted when a SYNC was last answered.
    write_front   Address of the first 12 bytes of a quiet MEM_WRITE, which are the same for all sizes.
    read_front    Address of the 16 bytes of a MEM_READ before its request id.
    data_front    Address of the first 12 bytes of a MEM_READ's successful reply.
    reuse_front   Address of the 16 bytes of a quiet MEM_REUSE before its request id.
    allocations   Address of the AllocationRecords' table.
    copied        Address of COPIED_BYTES bytes where a MEM_READ's reply is built; 0 before Python has served a
                  MEM_READ.
    copy_in       Address of the driver's NativeLaunch.copy_in.
    copy_out      Address of NativeLaunch.copy_out.
    zero          Address of NativeLaunch.zero.
    replay        Address of NativeLaunch.replay; 0 if there is none.
    in_rows       Number of launches, since Python last reset it, that were served in runs of four or more.
    refusal       Address of the RegionCheckRecord; 0 leaves every comparison of regions to Python.
    pacing        Address of the PacingState.
    graphs        Address of the GraphRecords' table.
    replay_graph  Address of NativeLaunch.replay_graph; 0 if there is none.
    replays       Address of the RecentReplays.
    graph         Number of the graph replayed last, if no launch was done after it; otherwise 0.
    arena_fronts  Address of four blocks of 16 bytes: those before the request id of an ARENA_WRITE, of its reply, of an
                  ARENA_READ, and of its reply.
    arena         Address of the session's arena; 0 if there is none.
    arena_bytes   Size of the arena.
    extents       Address of one word for each granule of the arena: the end of the pinned extent that contains the
                  granule; 0 if it is not pinned.
    """

    _fields_ = (
        # The lease's words, and the driver's functions.
        ("page", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("launch", ctypes.c_uint64),
        ("query", ctypes.c_uint64),
        ("driver", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
        # A SYNC and its reply.
        ("sync_front", ctypes.c_uint64),
        ("sync_tail", ctypes.c_uint64),
        ("reply_front", ctypes.c_uint64),
        ("reply_tail", ctypes.c_uint64),
        ("sync_spin_ns", ctypes.c_uint64),
        # Set before each call: the receive buffer and the next launch. Read after it: where the serving stopped.
        ("buffer", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("latest", ctypes.c_uint64),
        ("clock_ns", ctypes.c_uint64),
        # The region set in use (NativeServing.show_regions).
        ("region_set", ctypes.c_uint64),
        ("set_epoch", ctypes.c_uint64),
        ("set_deadline", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("seen_epoch", ctypes.c_uint64),
        ("synced", ctypes.c_uint64),
        # Small copies.
        ("write_front", ctypes.c_uint64),
        ("read_front", ctypes.c_uint64),
        ("data_front", ctypes.c_uint64),
        ("reuse_front", ctypes.c_uint64),
        ("allocations", ctypes.c_uint64),
        ("copied", ctypes.c_uint64),
        ("copy_in", ctypes.c_uint64),
        ("copy_out", ctypes.c_uint64),
        ("zero", ctypes.c_uint64),
        # Chains.
        ("replay", ctypes.c_uint64),
        ("in_rows", ctypes.c_uint64),
        ("refusal", ctypes.c_uint64),
        # The account of time.
        ("pacing", ctypes.c_uint64),
        # Graphs.
        ("graphs", ctypes.c_uint64),
        ("replay_graph", ctypes.c_uint64),
        ("replays", ctypes.c_uint64),
        ("graph", ctypes.c_uint64),
        # The arena.
        ("arena_fronts", ctypes.c_uint64),
        ("arena", ctypes.c_uint64),
        ("arena_bytes", ctypes.c_uint64),
        ("extents", ctypes.c_uint64),
    )


class PacingMark(ctypes.Structure):
    """A mark of the driver after work that was begun under a limit of time.

    estimate  The mean time of such work when it was begun, ns; 0 if it was never measured.
    mean      Address of that mean.
    """

    _fields_ = (("estimate", ctypes.c_uint64), ("mean", ctypes.c_uint64))


class PacingState(ctypes.Structure):
    """A session's account of the card's time, and its work under limits; pacing.ll repeats the offsets.

    page        Address of the lease's control page: revocation word, deadline, limits.
    counters    Address of the control page's counters.
    driver      First argument of the driver's three functions.
    idle        Address of CardProgress.idle.
    mark        Address of CardProgress.mark.
    reached     Address of CardProgress.reached.
    own_word    Address of the session's latency word; of an unused word if it has none.
    words       Address of the addresses of MAX_LATENCY_WORDS latency words; a word of 0 stands in for a missing one.
    first       Number of the oldest mark that is not known to be reached.
    next        Number of the next mark; they begin at 0, and at most MAX_MARKS are outstanding.
    queued_ns   Sum of these marks' estimates.
    running_ns  The earliest time at which the work before the oldest mark may have begun to run.
    polled_ns   When the marks were last polled.
    marks       Address of MAX_MARKS PacingMarks; mark n is at n modulo MAX_MARKS.
    spin_ns     For how long native code may wait in one call.
    is_marked   1 if a mark follows all work that is outstanding.
    seen_ns     When work was last begun, or found outstanding.
    ask_ns      When native code, while it polls for requests, checks again whether work is outstanding.
    own_bit     The bit of the session's own latency word; 0 for none.
    is_ready    1 once the driver has created its marks.
    unknown     How many outstanding marks have no estimate.
    rest_mean   Mean time of work that had no mark when the limits took effect.
    copy_mean   Mean time of copies in native code, which leave nothing outstanding: 1.
    admitted_ns When work was last admitted.
    slack_ns    By how much `running_ns` may be too late.
    linger_ns   How old an interval may be for native code to poll for its end while it polls for requests.
    """

    _fields_ = (
        ("page", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        # The driver's functions, and the latency words.
        ("driver", ctypes.c_uint64),
        ("idle", ctypes.c_uint64),
        ("mark", ctypes.c_uint64),
        ("reached", ctypes.c_uint64),
        ("own_word", ctypes.c_uint64),
        ("words", ctypes.c_uint64),
        # What is outstanding.
        ("first", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("queued_ns", ctypes.c_uint64),
        ("running_ns", ctypes.c_uint64),
        ("polled_ns", ctypes.c_uint64),
        ("marks", ctypes.c_uint64),
        ("spin_ns", ctypes.c_uint64),
        ("is_marked", ctypes.c_uint64),
        ("seen_ns", ctypes.c_uint64),
        ("ask_ns", ctypes.c_uint64),
        ("own_bit", ctypes.c_uint64),
        ("is_ready", ctypes.c_uint64),
        ("unknown", ctypes.c_uint64),
        ("rest_mean", ctypes.c_uint64),
        ("copy_mean", ctypes.c_uint64),
        ("admitted_ns", ctypes.c_uint64),
        ("slack_ns", ctypes.c_uint64),
        ("linger_ns", ctypes.c_uint64),
    )


class RingEnds(ctypes.Structure):
    """The worker's two ends of one connection's ring, and how long to poll for more requests.

    words            Address of the requests' words (protocol/ring.py).
    data             Address of the requests' bytes.
    capacity         Size of the requests' bytes, a power of two.
    head             The worker's own copy of the requests' head; never read from the ring.
    reply_words      Address of the replies' words.
    reply_data       Address of the replies' bytes.
    reply_capacity   Size of the replies' bytes, a power of two.
    reply_tail       The worker's own copy of the replies' tail; never read from the ring.
    reply_head       The worker's own copy of the replies' head; the head in the ring must lie between `reply_head` and
                     `reply_tail`.
    buffer_bytes     Size of the receive buffer.
    spins_left       Polls that are left before the worker sleeps; each lasts `spin_ns`.
    spins_per_byte   Arriving bytes set `spins_left` to this number, unless it is 0.
    spins_per_reply  A reply sets `spins_left` to this number.
    spin_ns          Duration of each of these polls.
    quantum_ns       How long one call may serve the connection.
    answered         The number that the client wrote for its last wait that was answered (protocol.ring.SyncWords).
    """

    _fields_ = (
        # The requests' end.
        ("words", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
        ("head", ctypes.c_uint64),
        # The replies' end.
        ("reply_words", ctypes.c_uint64),
        ("reply_data", ctypes.c_uint64),
        ("reply_capacity", ctypes.c_uint64),
        ("reply_tail", ctypes.c_uint64),
        ("reply_head", ctypes.c_uint64),
        # Limits of a call, the polls that are left, and the last wait that was answered.
        ("buffer_bytes", ctypes.c_uint64),
        ("spins_left", ctypes.c_uint64),
        ("spins_per_byte", ctypes.c_uint64),
        ("spins_per_reply", ctypes.c_uint64),
        ("spin_ns", ctypes.c_uint64),
        ("quantum_ns", ctypes.c_uint64),
        ("answered", ctypes.c_uint64),
    )
