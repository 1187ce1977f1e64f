; After pacing.ll in one module.
;
; Launches, syncs, replays of graphs and small copies, frame after frame, without Python: the same as
; `Session.take_launches`, `take_sync`, `GraphOperations.launch` and `MemoryOperations`, byte for byte, and the ring that
; the frames come through (protocol/ring.py).
;
; Python decides. This code does launches, syncs and replays, which it compares whole with bytes that Python has checked
; before, and copies and reuses of allocations that Python has shown it (graph_records.py, allocation_records.py).
; It leaves any other frame, and any that does not go as usual, where it stands, for Python to handle.
;
; Bounds. A tenant owns the bytes of the ring and two of its words, nothing else here.
;   - A word of the ring is read once, by an atomic load, and used from the register. A tail is believed only if it is at
;     most the capacity ahead of this side's own head, a head only if it is between what it was and this side's tail.
;   - Bytes are copied out of the ring, at most as many as the buffer has room for, in at most two pieces that end with
;     the ring's data. This code reads them only in the buffer, which no other process maps. It calls memcpy and memcmp
;     and builds neither in, so that the compiler can leave no copy out and read no byte of the ring twice.
;   - start <= end <= the buffer's size, always. A frame is looked at only if end - start is at least its plan's
;     frame_bytes, which is 24 + middle_bytes + args_bytes + tail_bytes + trailer_bytes as Python summed it; a SYNC only
;     if 40 are there.
;     A GRAPH_LAUNCH is looked at only if 52 are there, and compared only if its record's frame_bytes are.
;     Lengths of launches and replays come from plans and records, never from the frame: a length in a frame is among the
;     bytes compared.
;   - A copy's length is read once. It is from 1 to SMALL_COPY_BYTES, the frame's bytes with it are at most end - start,
;     the bytes named lie inside the allocation's record, and a reply has room in `copied` and in the ring.
;   - A copy of the arena names at most 32 MiB, a millisecond of the bus, which lie inside the allocation's record, and in the arena
;     inside one pinned extent; the extent is looked up only for a place inside the arena.
;   - Parameters are laid out in a scratch buffer. Python has checked that they fit: each move ends within the scratch
;     buffer and within args_bytes.
;   - A refusal is put together in `reply`. Python has checked that the parts of a region and of a plan fit there.
;   - The loops end: each round takes bytes of the ring or frames of the buffer, or is bounded by the clock.
;
; Offsets, as in layout.py.
;   ServingState: page 0, counters 8, launch 16, query 24, driver 32, scratch 40, sync_front 48, sync_tail 56, reply_front 64,
;     reply_tail 72, sync_spin_ns 80, buffer 88, start 96, end 104, expected 112, latest 120, clock_ns 128,
;     region_set 136, set_epoch 144, set_deadline 152, epoch 160, seen_epoch 168, synced 176, write_front 184, read_front 192,
;     data_front 200, reuse_front 208, allocations 216, copied 224, copy_in 232, copy_out 240, zero 248,
;     replay 256, in_rows 264, refusal 272, pacing 280, graphs 288, replay_graph 296, replays 304, graph 312,
;     arena_fronts 320, arena 328, arena_bytes 336, extents 344
;   GraphRecord: number 0, frame_bytes 8, front 16, rest 24, graph 32, launches 40, copies 48, copied_bytes 56; 64 bytes, at
;     the graph's number modulo 64. RecentReplays: count 0, then 2048 tags; replay n is at n modulo 2048.
;   RegionRefusal: words 0, flipped 8, deadlines 16, members 24, count 32, settled 40, front 48, reply 56, number 64, plan 72,
;     member 80, position 88, flipped_ns 96, seen_ns 104, told_ns 112, wakes 120
;   RegionRecord: column 0, active 8, revoked 16, front 24, front_bytes 32, back 40
;   AllocationRecord: handle 0, size 8, is_reusable 16; 24 bytes, at the upper 10 bits of the handle's product with a
;     number that allocation_records.py has, too.
;   PlanRecord: front 0, middle 8, middle_bytes 16, tail 24, tail_bytes 32, args_bytes 40, frame_bytes 48, launch 56,
;     moves 64, moves_count 72, param_bytes 80, follower 88, trailer_bytes 96, tail_at 104, chain 112, refusal 120,
;     refusal_bytes 128, mean 136
;   ChainRecord: count 0, frames_bytes 8, steps 16, graph 24, shorter 32, stale 40. ChainStep: plan 0, params 8; 16 bytes.
;   Move: from 0, to 8, size 16; takes 24
;   RingEnds: words 0, data 8, capacity 16, head 24, reply_words 32, reply_data 40, reply_capacity 48, reply_tail 56,
;     reply_head 64, buffer_bytes 72, spins_left 80, spins_per_byte 88, spins_per_reply 96, spin_ns 104, quantum_ns 112, answered 120
;   The control page: revocation word 0, deadline 8, membership deadline 3808. Counters: launches 0, syncs 8, operations 32, current opcode 48,
;     copies 80, copied bytes 88.
;   A ring's words: tail 0, head 64, reader sleeps 128, writer sleeps 192; of the requests awaited 8, of the replies
;   answer 8.

declare i32 @gpulease_memcmp(ptr, ptr, i64)
declare ptr @gpulease_memcpy(ptr, ptr, i64)
declare ptr @gpulease_memmove(ptr, ptr, i64)
declare ptr @gpulease_memset(ptr, i32, i64)
declare i64 @llvm.bswap.i64(i64)
declare i32 @llvm.bswap.i32(i32)

define internal i1 @same(ptr %left, ptr %right, i64 %size) {
  %order = call i32 @gpulease_memcmp(ptr %left, ptr %right, i64 %size)
  %is.same = icmp eq i32 %order, 0
  ret i1 %is.same
}

define internal i1 @is_revoked(ptr %state) {
  %page = call ptr @place(ptr %state, i64 0)
  %value = call i64 @shown(ptr %page, i64 0)
  %is.set = icmp ne i64 %value, 0
  ret i1 %is.set
}

; Whether the deadline has come, or the membership deadline of a lease that has a name. Stores the time in clock_ns.
define internal i1 @is_late(ptr %state) {
  %time = call i64 @now()
  call void @set(ptr %state, i64 128, i64 %time)
  %page = call ptr @place(ptr %state, i64 0)
  %deadline = call i64 @shown(ptr %page, i64 8)
  %is.late = icmp uge i64 %time, %deadline
  br i1 %is.late, label %late, label %name
name:
  %horizon = call i64 @shown(ptr %page, i64 3808)
  %is.anonymous = icmp eq i64 %horizon, 0
  br i1 %is.anonymous, label %in.time, label %beyond
beyond:
  ; CLOCK_BOOTTIME
  %boot = call i64 @clock(i32 7)
  %is.beyond = icmp uge i64 %boot, %horizon
  ret i1 %is.beyond
in.time:
  ret i1 false
late:
  ret i1 true
}

; Count work as outstanding from the last look at the clock on. No mark of the driver follows it.
define internal void @begin_unmarked(ptr %state) {
  %pacing = call ptr @place(ptr %state, i64 280)
  call void @set(ptr %pacing, i64 120, i64 0)
  %time = call i64 @word(ptr %state, i64 128)
  call void @gpulease_begin_work(ptr %pacing, i64 %time)
  ret void
}

; Nothing is outstanding any more, as of now.
define internal void @end_now(ptr %state) {
  %pacing = call ptr @place(ptr %state, i64 280)
  %time = call i64 @now()
  call void @gpulease_end_work(ptr %pacing, i64 %time)
  ret void
}

; Whether a copy or a reuse may begin by the limits of time. If not, Python holds it back.
define internal i1 @admits_memory(ptr %state) {
entry:
  %pacing = call ptr @place(ptr %state, i64 280)
  %limited = call i1 @is_limited(ptr %pacing)
  br i1 %limited, label %hold, label %go
hold:
  %mean.at = getelementptr i8, ptr %pacing, i64 176
  %held = call i32 @gpulease_hold_work(ptr %pacing, ptr %mean.at)
  %may = icmp eq i32 %held, 0
  ret i1 %may
go:
  ret i1 true
}

; Fill the kernel's parameter buffer from the argument bytes.
define internal void @lay_out(ptr %plan, ptr %args, ptr %scratch) {
entry:
  %moves = call ptr @place(ptr %plan, i64 64)
  %is.plain = icmp eq ptr %moves, null
  br i1 %is.plain, label %plain, label %gaps
plain:
  %args.bytes = call i64 @word(ptr %plan, i64 40)
  %copied = call ptr @gpulease_memcpy(ptr %scratch, ptr %args, i64 %args.bytes)
  ret void
gaps:
  %bytes = call i64 @word(ptr %plan, i64 80)
  %cleared = call ptr @gpulease_memset(ptr %scratch, i32 0, i64 %bytes)
  %count = call i64 @word(ptr %plan, i64 72)
  br label %each
each:
  %number = phi i64 [ 0, %gaps ], [ %next, %move ]
  %is.more = icmp ult i64 %number, %count
  br i1 %is.more, label %move, label %done
move:
  %distance = mul i64 %number, 24
  %this = getelementptr i8, ptr %moves, i64 %distance
  %from = call i64 @word(ptr %this, i64 0)
  %to = call i64 @word(ptr %this, i64 8)
  %size = call i64 @word(ptr %this, i64 16)
  %source = getelementptr i8, ptr %args, i64 %from
  %target = getelementptr i8, ptr %scratch, i64 %to
  %moved = call ptr @gpulease_memcpy(ptr %target, ptr %source, i64 %size)
  %next = add i64 %number, 1
  br label %each
done:
  ret void
}

; Whether a frame is of a plan, whatever its number, arguments and trailer. The plan's frame_bytes are there.
define internal i1 @is_of_plan(ptr %plan, ptr %frame) {
entry:
  %front = call ptr @place(ptr %plan, i64 0)
  %is.front = call i1 @same(ptr %frame, ptr %front, i64 16)
  br i1 %is.front, label %compare.middle, label %other
compare.middle:
  %middle = call ptr @place(ptr %plan, i64 8)
  %middle.bytes = call i64 @word(ptr %plan, i64 16)
  %middle.at = getelementptr i8, ptr %frame, i64 24
  %is.middle = call i1 @same(ptr %middle.at, ptr %middle, i64 %middle.bytes)
  br i1 %is.middle, label %compare.tail, label %other
compare.tail:
  %tail = call ptr @place(ptr %plan, i64 24)
  %tail.bytes = call i64 @word(ptr %plan, i64 32)
  %tail.offset = call i64 @word(ptr %plan, i64 104)
  %tail.at = getelementptr i8, ptr %frame, i64 %tail.offset
  %is.tail = call i1 @same(ptr %tail.at, ptr %tail, i64 %tail.bytes)
  ret i1 %is.tail
other:
  ret i1 false
}

; The argument bytes of a plan's frame, after its middle.
define internal ptr @args_of(ptr %plan, ptr %frame) {
  %middle.bytes = call i64 @word(ptr %plan, i64 16)
  %distance = add i64 %middle.bytes, 24
  %args = getelementptr i8, ptr %frame, i64 %distance
  ret ptr %args
}

; Do all launches of a chain, with frames from %start on, by one call of the driver. The frames' bytes are in the buffer.
; Returns the last launch's number as it travels; 0 if the frames are others, or the launches are to be done one by one.
define internal i64 @take_chain(ptr %state, ptr %chain, i64 %start) {
entry:
  %buffer = call ptr @place(ptr %state, i64 88)
  %scratch = call ptr @place(ptr %state, i64 40)
  %count = call i64 @word(ptr %chain, i64 0)
  %steps = call ptr @place(ptr %chain, i64 16)
  br label %each
each:
  %at = phi i64 [ %start, %entry ], [ %after, %kept ]
  %step = phi i64 [ 0, %entry ], [ %step.more, %kept ]
  %changed = phi i64 [ 0, %entry ], [ %changed.now, %kept ]
  %last = phi i64 [ 0, %entry ], [ %number.wire, %kept ]
  %is.more = icmp ult i64 %step, %count
  br i1 %is.more, label %compare, label %look
compare:
  %step.distance = shl i64 %step, 4
  %this = getelementptr i8, ptr %steps, i64 %step.distance
  %plan = call ptr @place(ptr %this, i64 0)
  %frame = getelementptr i8, ptr %buffer, i64 %at
  %is.expected = call i1 @is_of_plan(ptr %plan, ptr %frame)
  br i1 %is.expected, label %number, label %leave
number:
  %number.at = getelementptr i8, ptr %frame, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  %is.goodbye = icmp eq i64 %number.wire, 0
  br i1 %is.goodbye, label %leave, label %lay
lay:
  %args = call ptr @args_of(ptr %plan, ptr %frame)
  call void @lay_out(ptr %plan, ptr %args, ptr %scratch)
  %params = call ptr @place(ptr %this, i64 8)
  %param.bytes = call i64 @word(ptr %plan, i64 80)
  %is.same = call i1 @same(ptr %scratch, ptr %params, i64 %param.bytes)
  br i1 %is.same, label %kept, label %change
change:
  %copied = call ptr @gpulease_memcpy(ptr %params, ptr %scratch, i64 %param.bytes)
  %bit = shl i64 1, %step
  br label %kept
kept:
  %more.changed = phi i64 [ 0, %lay ], [ %bit, %change ]
  %changed.now = or i64 %changed, %more.changed
  %frame.bytes = call i64 @word(ptr %plan, i64 48)
  %after = add i64 %at, %frame.bytes
  %step.more = add i64 %step, 1
  br label %each
look:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %leave, label %last.look
last.look:
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %leave, label %go
go:
  call void @begin_unmarked(ptr %state)
  %replay = call ptr @place(ptr %state, i64 256)
  %driver = call ptr @place(ptr %state, i64 32)
  %graph = call ptr @place(ptr %chain, i64 24)
  %tag = call i64 @llvm.bswap.i64(i64 %last)
  %stale = call i64 @word(ptr %chain, i64 40)
  %given = or i64 %changed, %stale
  %result = call i32 %replay(ptr %driver, ptr %graph, i64 %given, i64 %tag)
  %is.queued = icmp eq i32 %result, 0
  br i1 %is.queued, label %taken, label %leave
taken:
  call void @set(ptr %chain, i64 40, i64 0)
  ret i64 %last
leave:
  ; What was laid out and not given to the driver is given next time.
  %stale.before = call i64 @word(ptr %chain, i64 40)
  %stale.now = or i64 %stale.before, %changed
  call void @set(ptr %chain, i64 40, i64 %stale.now)
  ret i64 0
}

; Compare the regions of the set in use with the page, which has changed since they were last compared.
; Returns 0 if all are active: the set is good at the present epoch. 2 if the first that is not active was revoked: the
; refusal names it. 1 if Python has to compare them.
define internal i32 @compare_regions(ptr %state) {
entry:
  %refusal = call ptr @place(ptr %state, i64 272)
  %is.none = icmp eq ptr %refusal, null
  br i1 %is.none, label %python, label %known
known:
  ; A set that Python has never admitted may name regions that have ended before.
  %epoch.before = call i64 @word(ptr %state, i64 144)
  %is.never = icmp eq i64 %epoch.before, -1
  %count = call i64 @word(ptr %refusal, i64 32)
  %is.empty = icmp eq i64 %count, 0
  %is.foreign = or i1 %is.never, %is.empty
  br i1 %is.foreign, label %python, label %begin
begin:
  ; The epoch first: a change during the comparison shows as a change of the recorded epoch.
  %epoch.at = call ptr @place(ptr %state, i64 160)
  %epoch = call i64 @shown(ptr %epoch.at, i64 0)
  %words = call ptr @place(ptr %refusal, i64 0)
  %flips = call ptr @place(ptr %refusal, i64 8)
  %deadlines = call ptr @place(ptr %refusal, i64 16)
  %members = call ptr @place(ptr %refusal, i64 24)
  %time = call i64 @now()
  call void @set(ptr %state, i64 128, i64 %time)
  br label %each
each:
  %number = phi i64 [ 0, %begin ], [ %next, %alive ]
  %earliest = phi i64 [ -1, %begin ], [ %earlier, %alive ]
  %is.more = icmp ult i64 %number, %count
  br i1 %is.more, label %look, label %good
look:
  %distance = shl i64 %number, 3
  %record = call ptr @place(ptr %members, i64 %distance)
  %column = call i64 @word(ptr %record, i64 0)
  %word = call i64 @shown(ptr %words, i64 %column)
  %active = call i64 @word(ptr %record, i64 8)
  %is.active = icmp eq i64 %word, %active
  br i1 %is.active, label %deadline, label %ended
deadline:
  %ends = call i64 @shown(ptr %deadlines, i64 %column)
  %is.in.time = icmp ult i64 %time, %ends
  br i1 %is.in.time, label %alive, label %python
alive:
  %earlier = call i64 @llvm.umin.i64(i64 %earliest, i64 %ends)
  %next = add i64 %number, 1
  br label %each
ended:
  %revoked = call i64 @word(ptr %record, i64 16)
  %is.revoked = icmp eq i64 %word, %revoked
  br i1 %is.revoked, label %lease, label %python
lease:
  ; The end of the lease comes before the region's.
  %is.over = call i1 @is_revoked(ptr %state)
  br i1 %is.over, label %python, label %clock
clock:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %python, label %refuse
refuse:
  %flipped = call i64 @shown(ptr %flips, i64 %column)
  call void @set(ptr %refusal, i64 80, i64 %number)
  call void @set(ptr %refusal, i64 96, i64 %flipped)
  call void @set(ptr %refusal, i64 104, i64 %time)
  ret i32 2
good:
  call void @set(ptr %state, i64 144, i64 %epoch)
  call void @set(ptr %state, i64 152, i64 %earliest)
  ret i32 0
python:
  ret i32 1
}

; Do the expected launches at the front of the buffer, up to the first frame that is no expected launch.
; Returns 0 if that frame is something else, or there is none; 1 if it is the expected launch and Python has to launch it:
; the driver refused it, or the regions of its set have to be compared; 2 if it is the expected launch and is refused
; because of the region that the refusal names.
define i32 @gpulease_take_launches(ptr %state) {
entry:
  %first = call ptr @place(ptr %state, i64 112)
  %is.none = icmp eq ptr %first, null
  br i1 %is.none, label %nothing, label %begin
nothing:
  ret i32 0
begin:
  %counters = call ptr @place(ptr %state, i64 8)
  %launch = call ptr @place(ptr %state, i64 16)
  %driver = call ptr @place(ptr %state, i64 32)
  %scratch = call ptr @place(ptr %state, i64 40)
  %buffer = call ptr @place(ptr %state, i64 88)
  %from = call i64 @word(ptr %state, i64 96)
  %end = call i64 @word(ptr %state, i64 104)
  %pacing = call ptr @place(ptr %state, i64 280)
  call void @show(ptr %counters, i64 48, i64 1542)
  br label %each

each:
  %plan = phi ptr [ %first, %begin ], [ %follower, %advance ], [ %chain.follower, %chained ]
  %latest = phi ptr [ null, %begin ], [ %plan, %advance ], [ %chain.latest, %chained ]
  %start = phi i64 [ %from, %begin ], [ %after, %advance ], [ %chain.after, %chained ]
  %count = phi i64 [ 0, %begin ], [ %count.more, %advance ], [ %count.chain, %chained ]
  %have = sub i64 %end, %start
  ; Under a limit of time, launches are admitted, and marked, one by one.
  %limited = call i1 @is_limited(ptr %pacing)
  br i1 %limited, label %single, label %chains
chains:
  ; The longest chain that has all its frames here, if there is one.
  %chain.at = phi ptr [ %plan, %each ], [ %chain, %shorter ]
  %chain.offset = phi i64 [ 112, %each ], [ 32, %shorter ]
  %chain = call ptr @place(ptr %chain.at, i64 %chain.offset)
  %has.chain = icmp ne ptr %chain, null
  br i1 %has.chain, label %fits, label %single
fits:
  %chain.bytes = call i64 @word(ptr %chain, i64 8)
  %is.there = icmp ule i64 %chain.bytes, %have
  br i1 %is.there, label %try, label %shorter
shorter:
  br label %chains
try:
  %chain.number = call i64 @take_chain(ptr %state, ptr %chain, i64 %start)
  %is.chained = icmp ne i64 %chain.number, 0
  br i1 %is.chained, label %chained, label %shorter
chained:
  %chain.count = call i64 @word(ptr %chain, i64 0)
  %chain.steps = call ptr @place(ptr %chain, i64 16)
  %chain.last = sub i64 %chain.count, 1
  %chain.last.bytes = shl i64 %chain.last, 4
  %chain.last.at = getelementptr i8, ptr %chain.steps, i64 %chain.last.bytes
  %chain.latest = call ptr @place(ptr %chain.last.at, i64 0)
  %chain.follower = call ptr @place(ptr %chain.latest, i64 88)
  %chain.after = add i64 %start, %chain.bytes
  %count.chain = add i64 %count, %chain.count
  br label %each
single:
  %frame.bytes = call i64 @word(ptr %plan, i64 48)
  %is.whole = icmp ule i64 %frame.bytes, %have
  br i1 %is.whole, label %compare, label %stop
compare:
  %frame = getelementptr i8, ptr %buffer, i64 %start
  %is.expected = call i1 @is_of_plan(ptr %plan, ptr %frame)
  br i1 %is.expected, label %gate, label %stop
gate:
  br i1 %limited, label %hold, label %look.clock
hold:
  ; All checks follow the wait, the clock's too.
  %mean.at = call ptr @place(ptr %plan, i64 136)
  %held = call i32 @gpulease_hold_work(ptr %pacing, ptr %mean.at)
  %is.held = icmp ne i32 %held, 0
  br i1 %is.held, label %hold.on, label %clock
hold.on:
  br label %stop
look.clock:
  ; LAUNCHES_PER_CLOCK
  %phase = and i64 %count, 7
  %is.due = icmp eq i64 %phase, 0
  br i1 %is.due, label %clock, label %number
clock:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %stop, label %number
number:
  %number.at = getelementptr i8, ptr %frame, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  %is.goodbye = icmp eq i64 %number.wire, 0
  br i1 %is.goodbye, label %stop, label %find
find:
  %record = call ptr @place(ptr %plan, i64 56)
  %is.foreign = icmp eq ptr %record, null
  br i1 %is.foreign, label %refuse, label %lay
lay:
  %args = call ptr @args_of(ptr %plan, ptr %frame)
  call void @lay_out(ptr %plan, ptr %args, ptr %scratch)
  %param.bytes = call i64 @word(ptr %plan, i64 80)
  %tag = call i64 @llvm.bswap.i64(i64 %number.wire)
  %trailer.bytes = call i64 @word(ptr %plan, i64 96)
  %is.free = icmp eq i64 %trailer.bytes, 0
  br i1 %is.free, label %last.look, label %set
set:
  ; A LAUNCH_IN: the set in use, before its deadline by the last look at the clock, at the epoch it was compared at.
  %trailer.offset = sub i64 %frame.bytes, %trailer.bytes
  %set.at = getelementptr i8, ptr %frame, i64 %trailer.offset
  %set.wire = load i64, ptr %set.at, align 1
  %set.current = call i64 @word(ptr %state, i64 136)
  %is.current = icmp eq i64 %set.wire, %set.current
  br i1 %is.current, label %set.deadline, label %stop
set.deadline:
  %set.clock = call i64 @word(ptr %state, i64 128)
  %set.ends = call i64 @word(ptr %state, i64 152)
  %is.in.time = icmp ult i64 %set.clock, %set.ends
  br i1 %is.in.time, label %set.epoch, label %stop
set.epoch:
  %epoch.at = call ptr @place(ptr %state, i64 160)
  %epoch = call i64 @shown(ptr %epoch.at, i64 0)
  %epoch.compared = call i64 @word(ptr %state, i64 144)
  %is.quiet = icmp eq i64 %epoch, %epoch.compared
  br i1 %is.quiet, label %last.look, label %set.words
set.words:
  %compared = call i32 @compare_regions(ptr %state)
  %is.admitted = icmp eq i32 %compared, 0
  br i1 %is.admitted, label %last.look, label %stop
last.look:
  ; The last look before the launch: what came before it may have taken time.
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %stop, label %go
go:
  call void @begin_unmarked(ptr %state)
  %result = call i32 %launch(ptr %driver, ptr %record, ptr %scratch, i64 %param.bytes, i64 %tag)
  %is.taken = icmp eq i32 %result, 0
  br i1 %is.taken, label %took, label %refuse
took:
  %mean.marked = call ptr @place(ptr %plan, i64 136)
  %after = add i64 %start, %frame.bytes
  %count.more = add i64 %count, 1
  %follower = call ptr @place(ptr %plan, i64 88)
  br i1 %limited, label %mark, label %advance
mark:
  call void @set(ptr %pacing, i64 120, i64 1)
  call void @gpulease_mark_work(ptr %pacing, ptr %mean.marked)
  br label %advance
advance:
  br label %each

refuse:
  br label %stop
stop:
  %outcome = phi i32 [ 0, %single ], [ 0, %compare ], [ 0, %clock ],
    [ 0, %number ], [ 1, %set ], [ 1, %set.deadline ], [ %compared, %set.words ], [ 0, %last.look ], [ 1, %refuse ],
    [ 1, %hold.on ]
  call void @set(ptr %state, i64 96, i64 %start)
  %expected.at = getelementptr i8, ptr %state, i64 112
  store ptr %plan, ptr %expected.at
  call void @show(ptr %counters, i64 48, i64 0)
  %did.none = icmp eq i64 %count, 0
  br i1 %did.none, label %leave, label %tell
tell:
  %latest.at = getelementptr i8, ptr %state, i64 120
  store ptr %latest, ptr %latest.at
  call void @set(ptr %state, i64 312, i64 0)
  ; Launches that were waiting in a row: one call for several of them would have paid.
  %is.row = icmp uge i64 %count, 4
  %row = select i1 %is.row, i64 %count, i64 0
  %in.rows = call i64 @word(ptr %state, i64 264)
  %in.rows.more = add i64 %in.rows, %row
  call void @set(ptr %state, i64 264, i64 %in.rows.more)
  call void @count(ptr %counters, i64 32, i64 %count)
  call void @count(ptr %counters, i64 0, i64 %count)
  br label %leave
leave:
  ret i32 %outcome
}

; Ask until all launches have ended, for a while. Returns whether they have ended well: if not, Python has to find out.
; Before a copy, what else is in the stream may be under way: copies, which the driver orders, and for which it may wait.
; The clock was just read. Reads the revocation word at every look at the stream, and the clock at every eighth look.
define internal i1 @await_launches(ptr %state, i1 %for.copy) {
entry:
  %query = call ptr @place(ptr %state, i64 24)
  %driver = call ptr @place(ptr %state, i64 32)
  %spin = call i64 @word(ptr %state, i64 80)
  %began = call i64 @word(ptr %state, i64 128)
  %until = add i64 %began, %spin
  br label %ask
ask:
  %asked = phi i64 [ 0, %entry ], [ %asked.more, %again ], [ %asked.more, %patience ]
  %progress = call i32 %query(ptr %driver)
  switch i32 %progress, label %give.up [ i32 0, label %done
                                      i32 1, label %wait ]
wait:
  br i1 %for.copy, label %launched, label %rest
launched:
  ; Whatever begins a launch opens an interval of work.
  %counters = call ptr @place(ptr %state, i64 8)
  %since = call i64 @word(ptr %counters, i64 152)
  %is.copying = icmp eq i64 %since, 0
  br i1 %is.copying, label %done, label %rest
rest:
  call void @llvm.x86.sse2.pause()
  %is.over = call i1 @is_revoked(ptr %state)
  br i1 %is.over, label %give.up, label %again
again:
  %asked.more = add i64 %asked, 1
  %phase = and i64 %asked.more, 7
  %is.due = icmp eq i64 %phase, 0
  br i1 %is.due, label %deadline, label %ask
deadline:
  %is.past = call i1 @is_late(ptr %state)
  br i1 %is.past, label %give.up, label %patience
patience:
  %time = call i64 @word(ptr %state, i64 128)
  %is.long = icmp uge i64 %time, %until
  br i1 %is.long, label %give.up, label %ask
done:
  ret i1 true
give.up:
  ret i1 false
}

; How many bytes of a reply the ring has room for; 0 if the client's head does not lie between the known head and the tail.
define internal i64 @room_for_reply(ptr %ends) {
entry:
  %words = call ptr @place(ptr %ends, i64 32)
  %claimed = call i64 @shown(ptr %words, i64 64)
  %known = call i64 @word(ptr %ends, i64 64)
  %put = call i64 @word(ptr %ends, i64 56)
  %gone = sub i64 %claimed, %known
  %most = sub i64 %put, %known
  %is.sane = icmp ule i64 %gone, %most
  br i1 %is.sane, label %room, label %none
room:
  %capacity = call i64 @word(ptr %ends, i64 48)
  %used = sub i64 %put, %claimed
  %free = sub i64 %capacity, %used
  ret i64 %free
none:
  ret i64 0
}

; Put a reply, which has room, into the ring and announce it. Returns whether the client sleeps.
define internal i1 @put_reply(ptr %ends, ptr %reply, i64 %bytes) {
  %words = call ptr @place(ptr %ends, i64 32)
  %data = call ptr @place(ptr %ends, i64 40)
  %capacity = call i64 @word(ptr %ends, i64 48)
  %put = call i64 @word(ptr %ends, i64 56)
  %mask = sub i64 %capacity, 1
  %at = and i64 %put, %mask
  %straight = sub i64 %capacity, %at
  %here = call i64 @llvm.umin.i64(i64 %straight, i64 %bytes)
  %there = sub i64 %bytes, %here
  %target = getelementptr i8, ptr %data, i64 %at
  %put.here = call ptr @gpulease_memcpy(ptr %target, ptr %reply, i64 %here)
  %beyond = getelementptr i8, ptr %reply, i64 %here
  %put.there = call ptr @gpulease_memcpy(ptr %data, ptr %beyond, i64 %there)
  %put.more = add i64 %put, %bytes
  call void @set(ptr %ends, i64 56, i64 %put.more)
  call void @show(ptr %words, i64 0, i64 %put.more)
  fence seq_cst
  %sleeps = call i64 @shown(ptr %words, i64 128)
  %is.asleep = icmp ne i64 %sleeps, 0
  ret i1 %is.asleep
}

; Do a SYNC at the front of the buffer, if all goes well and the ring has room for its reply.
; Returns 0 if nothing was done and the SYNC is left to Python; 1 if the reply is in the ring; 2 if the reply is in the
; ring and the client sleeps.
define internal i32 @answer_sync(ptr %state, ptr %ends) {
entry:
  %reply = alloca [40 x i8], align 8
  %buffer = call ptr @place(ptr %state, i64 88)
  %start = call i64 @word(ptr %state, i64 96)
  %end = call i64 @word(ptr %state, i64 104)
  %have = sub i64 %end, %start
  %is.whole = icmp uge i64 %have, 40
  br i1 %is.whole, label %compare, label %leave
compare:
  %frame = getelementptr i8, ptr %buffer, i64 %start
  %front = call ptr @place(ptr %state, i64 48)
  %is.front = call i1 @same(ptr %frame, ptr %front, i64 16)
  br i1 %is.front, label %compare.tail, label %leave
compare.tail:
  %tail = call ptr @place(ptr %state, i64 56)
  %tail.at = getelementptr i8, ptr %frame, i64 24
  %is.tail = call i1 @same(ptr %tail.at, ptr %tail, i64 16)
  br i1 %is.tail, label %number, label %leave
number:
  %number.at = getelementptr i8, ptr %frame, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  %is.goodbye = icmp eq i64 %number.wire, 0
  br i1 %is.goodbye, label %leave, label %room
room:
  %free = call i64 @room_for_reply(ptr %ends)
  %has.room = icmp uge i64 %free, 40
  br i1 %has.room, label %look, label %leave
look:
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %leave, label %clock
clock:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %leave, label %begin
begin:
  %counters = call ptr @place(ptr %state, i64 8)
  call void @show(ptr %counters, i64 48, i64 1543)
  %has.ended = call i1 @await_launches(ptr %state, i1 false)
  call void @show(ptr %counters, i64 48, i64 0)
  br i1 %has.ended, label %done, label %leave
done:
  call void @end_now(ptr %state)
  %after = add i64 %start, 40
  call void @set(ptr %state, i64 96, i64 %after)
  call void @count(ptr %counters, i64 32, i64 1)
  call void @count(ptr %counters, i64 8, i64 1)
  %synced = call i64 @word(ptr %counters, i64 0)
  call void @set(ptr %state, i64 176, i64 %synced)
  %reply.front = call ptr @place(ptr %state, i64 64)
  %reply.tail = call ptr @place(ptr %state, i64 72)
  %copied.front = call ptr @gpulease_memcpy(ptr %reply, ptr %reply.front, i64 16)
  %reply.number = getelementptr i8, ptr %reply, i64 16
  store i64 %number.wire, ptr %reply.number
  %reply.rest = getelementptr i8, ptr %reply, i64 24
  %copied.tail = call ptr @gpulease_memcpy(ptr %reply.rest, ptr %reply.tail, i64 16)
  %is.asleep = call i1 @put_reply(ptr %ends, ptr %reply, i64 40)
  %answer = select i1 %is.asleep, i32 2, i32 1
  ret i32 %answer
leave:
  ret i32 0
}

; The size of the frame at the front if it is a small copy or a reuse, else 0. Of the frame 16 bytes are there.
define internal i64 @memory_frame_bytes(ptr %state, ptr %frame) {
entry:
  %write.front = call ptr @place(ptr %state, i64 184)
  %is.write = call i1 @same(ptr %frame, ptr %write.front, i64 12)
  br i1 %is.write, label %write, label %others
write:
  %payload.at = getelementptr i8, ptr %frame, i64 12
  %payload.wire = load i32, ptr %payload.at, align 1
  %payload = call i32 @llvm.bswap.i32(i32 %payload.wire)
  %payload.bytes = zext i32 %payload to i64
  ; MEM_WRITE: 20 bytes and the data, at least one byte and at most SMALL_COPY_BYTES.
  %data.less = sub i64 %payload.bytes, 21
  %is.small = icmp ult i64 %data.less, 65536
  %write.bytes = add i64 %payload.bytes, 40
  %small.bytes = select i1 %is.small, i64 %write.bytes, i64 0
  ret i64 %small.bytes
others:
  %read.front = call ptr @place(ptr %state, i64 192)
  %is.read = call i1 @same(ptr %frame, ptr %read.front, i64 16)
  br i1 %is.read, label %read, label %reuses
read:
  ret i64 64
reuses:
  %reuse.front = call ptr @place(ptr %state, i64 208)
  %is.reuse = call i1 @same(ptr %frame, ptr %reuse.front, i64 16)
  %reuse.bytes = select i1 %is.reuse, i64 48, i64 0
  ret i64 %reuse.bytes
}

; The record of the allocation with a handle; null if Python has shown none.
define internal ptr @allocation(ptr %state, i64 %handle) {
  %records = call ptr @place(ptr %state, i64 216)
  %product = mul i64 %handle, -7046029254386353131
  %index = lshr i64 %product, 54
  %distance = mul i64 %index, 24
  %record = getelementptr i8, ptr %records, i64 %distance
  %is.handle = call i64 @word(ptr %record, i64 0)
  %is.same = icmp eq i64 %is.handle, %handle
  %is.real = icmp ne i64 %handle, 0
  %is.found = and i1 %is.same, %is.real
  %found = select i1 %is.found, ptr %record, ptr null
  ret ptr %found
}

; Do a quiet MEM_WRITE, a MEM_READ or a quiet MEM_REUSE at the front of the buffer, if it is small, of an allocation that
; Python has shown, and all goes well. Returns 0 if nothing was done and the frame is left to Python; 1 if a reply is in
; the ring; 2 if a reply is in the ring and the client sleeps; 3 if a quiet frame was done.
define internal i32 @do_memory(ptr %state, ptr %ends) {
entry:
  %buffer = call ptr @place(ptr %state, i64 88)
  %start = call i64 @word(ptr %state, i64 96)
  %end = call i64 @word(ptr %state, i64 104)
  %have = sub i64 %end, %start
  %is.headed = icmp uge i64 %have, 48
  br i1 %is.headed, label %kindred, label %leave
kindred:
  %frame = getelementptr i8, ptr %buffer, i64 %start
  %frame.bytes = call i64 @memory_frame_bytes(ptr %state, ptr %frame)
  %is.memory = icmp ne i64 %frame.bytes, 0
  %is.whole = icmp uge i64 %have, %frame.bytes
  %is.there = and i1 %is.memory, %is.whole
  br i1 %is.there, label %session, label %leave
session:
  %session.id = call ptr @place(ptr %state, i64 56)
  %session.at = getelementptr i8, ptr %frame, i64 24
  %is.session = call i1 @same(ptr %session.at, ptr %session.id, i64 16)
  br i1 %is.session, label %number, label %leave
number:
  %number.at = getelementptr i8, ptr %frame, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  %is.goodbye = icmp eq i64 %number.wire, 0
  br i1 %is.goodbye, label %leave, label %find
find:
  %handle.at = getelementptr i8, ptr %frame, i64 40
  %handle.wire = load i64, ptr %handle.at, align 1
  %handle = call i64 @llvm.bswap.i64(i64 %handle.wire)
  %record = call ptr @allocation(ptr %state, i64 %handle)
  %is.unknown = icmp eq ptr %record, null
  br i1 %is.unknown, label %leave, label %kind
kind:
  %size = call i64 @word(ptr %record, i64 8)
  %counters = call ptr @place(ptr %state, i64 8)
  %driver = call ptr @place(ptr %state, i64 32)
  %after = add i64 %start, %frame.bytes
  %is.reuse = icmp eq i64 %frame.bytes, 48
  br i1 %is.reuse, label %reuse, label %copy

reuse:
  %reusable = call i64 @word(ptr %record, i64 16)
  %is.reusable = icmp ne i64 %reusable, 0
  br i1 %is.reusable, label %reuse.gate, label %leave
reuse.gate:
  %reuse.may = call i1 @admits_memory(ptr %state)
  br i1 %reuse.may, label %reuse.look, label %leave
reuse.look:
  %reuse.clock = call i1 @is_late(ptr %state)
  br i1 %reuse.clock, label %leave, label %reuse.word
reuse.word:
  %reuse.revoked = call i1 @is_revoked(ptr %state)
  br i1 %reuse.revoked, label %leave, label %again
again:
  call void @begin_unmarked(ptr %state)
  %zero = call ptr @place(ptr %state, i64 248)
  call void @show(ptr %counters, i64 48, i64 1569)
  %zeroed = call i32 %zero(ptr %driver, i64 %handle, i64 %size)
  call void @show(ptr %counters, i64 48, i64 0)
  %is.zeroed = icmp eq i32 %zeroed, 0
  br i1 %is.zeroed, label %reused, label %leave
reused:
  call void @set(ptr %state, i64 96, i64 %after)
  call void @count(ptr %counters, i64 32, i64 1)
  ret i32 3

copy:
  %offset.at = getelementptr i8, ptr %frame, i64 48
  %offset.wire = load i64, ptr %offset.at, align 1
  %offset = call i64 @llvm.bswap.i64(i64 %offset.wire)
  %length.at = getelementptr i8, ptr %frame, i64 56
  %op.at = getelementptr i8, ptr %frame, i64 7
  %op = load i8, ptr %op.at
  ; The last byte of the op: 3 of MEM_WRITE, 4 of MEM_READ, as both were compared.
  %is.read = icmp eq i8 %op, 4
  br i1 %is.read, label %read.length, label %write.length
write.length:
  %write.wire = load i32, ptr %length.at, align 1
  %write.swapped = call i32 @llvm.bswap.i32(i32 %write.wire)
  %write.said = zext i32 %write.swapped to i64
  %write.bytes = sub i64 %frame.bytes, 60
  %is.right = icmp eq i64 %write.said, %write.bytes
  br i1 %is.right, label %bounds, label %leave
read.length:
  %read.wire = load i64, ptr %length.at, align 1
  %read.bytes = call i64 @llvm.bswap.i64(i64 %read.wire)
  %read.less = sub i64 %read.bytes, 1
  %is.small = icmp ult i64 %read.less, 65536
  %copied = call ptr @place(ptr %state, i64 224)
  %is.prepared = icmp ne ptr %copied, null
  %is.readable = and i1 %is.small, %is.prepared
  br i1 %is.readable, label %room, label %leave
room:
  %reply.bytes = add i64 %read.bytes, 44
  %free = call i64 @room_for_reply(ptr %ends)
  %has.room = icmp uge i64 %free, %reply.bytes
  br i1 %has.room, label %bounds, label %leave
bounds:
  %length = phi i64 [ %write.bytes, %write.length ], [ %read.bytes, %room ]
  %doing = phi i64 [ 1539, %write.length ], [ 1540, %room ]
  %fits = icmp ule i64 %length, %size
  br i1 %fits, label %place, label %leave
place:
  %most = sub i64 %size, %length
  %is.inside = icmp ule i64 %offset, %most
  br i1 %is.inside, label %gate, label %leave
gate:
  %may = call i1 @admits_memory(ptr %state)
  br i1 %may, label %look, label %leave
look:
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %leave, label %clock
clock:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %leave, label %begin
begin:
  call void @show(ptr %counters, i64 48, i64 %doing)
  %has.ended = call i1 @await_launches(ptr %state, i1 true)
  br i1 %has.ended, label %move, label %give.up
give.up:
  call void @show(ptr %counters, i64 48, i64 0)
  br label %leave
move:
  call void @begin_unmarked(ptr %state)
  %address = add i64 %handle, %offset
  br i1 %is.read, label %out, label %in
in:
  %copy.in = call ptr @place(ptr %state, i64 232)
  %data = getelementptr i8, ptr %frame, i64 60
  %written = call i32 %copy.in(ptr %driver, i64 %address, ptr %data, i64 %length)
  br label %moved
out:
  %copy.out = call ptr @place(ptr %state, i64 240)
  %scratch = call ptr @place(ptr %state, i64 224)
  %into = getelementptr i8, ptr %scratch, i64 64
  %was.read = call i32 %copy.out(ptr %driver, i64 %address, ptr %into, i64 %length)
  br label %moved
moved:
  %result = phi i32 [ %written, %in ], [ %was.read, %out ]
  call void @show(ptr %counters, i64 48, i64 0)
  call void @end_now(ptr %state)
  %is.moved = icmp eq i32 %result, 0
  br i1 %is.moved, label %done, label %leave
done:
  call void @set(ptr %state, i64 96, i64 %after)
  call void @count(ptr %counters, i64 32, i64 1)
  call void @count(ptr %counters, i64 80, i64 1)
  call void @count(ptr %counters, i64 88, i64 %length)
  br i1 %is.read, label %answer, label %quiet
quiet:
  ret i32 3
answer:
  ; The reply's 44 bytes before its data end where the data begins.
  %reply.place = call ptr @place(ptr %state, i64 224)
  %reply = getelementptr i8, ptr %reply.place, i64 20
  %data.front = call ptr @place(ptr %state, i64 200)
  %copied.front = call ptr @gpulease_memcpy(ptr %reply, ptr %data.front, i64 12)
  %length.small = trunc i64 %length to i32
  %payload.small = add i32 %length.small, 4
  %payload.swapped = call i32 @llvm.bswap.i32(i32 %payload.small)
  %reply.payload = getelementptr i8, ptr %reply, i64 12
  store i32 %payload.swapped, ptr %reply.payload, align 1
  %reply.number = getelementptr i8, ptr %reply, i64 16
  store i64 %number.wire, ptr %reply.number, align 1
  %reply.session = getelementptr i8, ptr %reply, i64 24
  %copied.session = call ptr @gpulease_memcpy(ptr %reply.session, ptr %session.id, i64 16)
  %length.swapped = call i32 @llvm.bswap.i32(i32 %length.small)
  %reply.length = getelementptr i8, ptr %reply, i64 40
  store i32 %length.swapped, ptr %reply.length, align 1
  %reply.bytes.now = add i64 %length, 44
  %is.asleep = call i1 @put_reply(ptr %ends, ptr %reply, i64 %reply.bytes.now)
  %answered = select i1 %is.asleep, i32 2, i32 1
  ret i32 %answered
leave:
  ret i32 0
}

; Replay a graph by a quiet GRAPH_LAUNCH at the front of the buffer, if it is, byte for byte, one that Python has shown
; (graph_records.py), and all goes well. Returns whether it was done; if not, it is left to Python.
define internal i1 @replay_graph(ptr %state) {
entry:
  %replay = call ptr @place(ptr %state, i64 296)
  %is.none = icmp eq ptr %replay, null
  br i1 %is.none, label %leave, label %begin
begin:
  %buffer = call ptr @place(ptr %state, i64 88)
  %start = call i64 @word(ptr %state, i64 96)
  %end = call i64 @word(ptr %state, i64 104)
  %have = sub i64 %end, %start
  %is.headed = icmp uge i64 %have, 52
  br i1 %is.headed, label %find, label %leave
find:
  %frame = getelementptr i8, ptr %buffer, i64 %start
  %graph.at = getelementptr i8, ptr %frame, i64 40
  %graph.wire = load i64, ptr %graph.at, align 1
  %graph = call i64 @llvm.bswap.i64(i64 %graph.wire)
  %graphs = call ptr @place(ptr %state, i64 288)
  %index = and i64 %graph, 63
  %distance = shl i64 %index, 6
  %record = getelementptr i8, ptr %graphs, i64 %distance
  %is.number = call i64 @word(ptr %record, i64 0)
  %is.same = icmp eq i64 %is.number, %graph
  %is.real = icmp ne i64 %graph, 0
  %is.known = and i1 %is.same, %is.real
  br i1 %is.known, label %fits, label %leave
fits:
  %frame.bytes = call i64 @word(ptr %record, i64 8)
  %is.there = icmp ule i64 %frame.bytes, %have
  br i1 %is.there, label %compare, label %leave
compare:
  %front = call ptr @place(ptr %record, i64 16)
  %is.front = call i1 @same(ptr %frame, ptr %front, i64 16)
  br i1 %is.front, label %compare.rest, label %leave
compare.rest:
  %rest = call ptr @place(ptr %record, i64 24)
  %rest.at = getelementptr i8, ptr %frame, i64 24
  %rest.bytes = sub i64 %frame.bytes, 24
  %is.rest = call i1 @same(ptr %rest.at, ptr %rest, i64 %rest.bytes)
  br i1 %is.rest, label %number, label %leave
number:
  %number.at = getelementptr i8, ptr %frame, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  %is.goodbye = icmp eq i64 %number.wire, 0
  br i1 %is.goodbye, label %leave, label %limits
limits:
  ; Under a limit of time Python admits it.
  %pacing = call ptr @place(ptr %state, i64 280)
  %limited = call i1 @is_limited(ptr %pacing)
  br i1 %limited, label %leave, label %look
look:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %leave, label %last.look
last.look:
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %leave, label %go
go:
  call void @begin_unmarked(ptr %state)
  %counters = call ptr @place(ptr %state, i64 8)
  %driver = call ptr @place(ptr %state, i64 32)
  %its.graph = call ptr @place(ptr %record, i64 32)
  %tag = call i64 @llvm.bswap.i64(i64 %number.wire)
  call void @show(ptr %counters, i64 48, i64 1553)
  %result = call i32 %replay(ptr %driver, ptr %its.graph, i64 %tag)
  call void @show(ptr %counters, i64 48, i64 0)
  %is.queued = icmp eq i32 %result, 0
  br i1 %is.queued, label %done, label %leave
done:
  %after = add i64 %start, %frame.bytes
  call void @set(ptr %state, i64 96, i64 %after)
  call void @set(ptr %state, i64 312, i64 %graph)
  %replays = call ptr @place(ptr %state, i64 304)
  %replay.count = call i64 @word(ptr %replays, i64 0)
  %replay.index = and i64 %replay.count, 2047
  %tags = getelementptr i8, ptr %replays, i64 8
  %tag.at = getelementptr i64, ptr %tags, i64 %replay.index
  store i64 %tag, ptr %tag.at
  call void @count(ptr %replays, i64 0, i64 1)
  %launches = call i64 @word(ptr %record, i64 40)
  %copies = call i64 @word(ptr %record, i64 48)
  %copied.bytes = call i64 @word(ptr %record, i64 56)
  call void @count(ptr %counters, i64 32, i64 1)
  call void @count(ptr %counters, i64 0, i64 %launches)
  call void @count(ptr %counters, i64 80, i64 %copies)
  call void @count(ptr %counters, i64 88, i64 %copied.bytes)
  ret i1 true
leave:
  ret i1 false
}

; Wait for a copy from pinned memory, which the card does by itself. Returns whether it has ended well.
define internal i1 @await_copy(ptr %state) {
entry:
  %query = call ptr @place(ptr %state, i64 24)
  %driver = call ptr @place(ptr %state, i64 32)
  br label %ask
ask:
  %asked = phi i64 [ 0, %entry ], [ %asked.more, %again ], [ %asked.more, %deadline ]
  %progress = call i32 %query(ptr %driver)
  switch i32 %progress, label %give.up [ i32 0, label %done
                                      i32 1, label %wait ]
wait:
  call void @llvm.x86.sse2.pause()
  %is.over = call i1 @is_revoked(ptr %state)
  br i1 %is.over, label %give.up, label %again
again:
  %asked.more = add i64 %asked, 1
  %phase = and i64 %asked.more, 7
  %is.due = icmp eq i64 %phase, 0
  br i1 %is.due, label %deadline, label %ask
deadline:
  %is.past = call i1 @is_late(ptr %state)
  br i1 %is.past, label %give.up, label %ask
done:
  ret i1 true
give.up:
  ret i1 false
}

; Do an ARENA_WRITE or an ARENA_READ with a reply at the front of the buffer, between an allocation that Python has shown
; and pinned memory of the arena, if all goes well. Returns 0 if nothing was done and the frame is left to Python; 1 if the
; reply is in the ring; 2 if it is and the client sleeps.
define internal i32 @copy_arena(ptr %state, ptr %ends) {
entry:
  %reply = alloca [40 x i8], align 8
  %arena = call ptr @place(ptr %state, i64 328)
  %is.none = icmp eq ptr %arena, null
  br i1 %is.none, label %leave, label %begin
begin:
  %buffer = call ptr @place(ptr %state, i64 88)
  %start = call i64 @word(ptr %state, i64 96)
  %end = call i64 @word(ptr %state, i64 104)
  %have = sub i64 %end, %start
  %is.whole = icmp uge i64 %have, 72
  br i1 %is.whole, label %compare, label %leave
compare:
  ; The fronts, 16 bytes each: of a write, of its reply, of a read, of its reply.
  %frame = getelementptr i8, ptr %buffer, i64 %start
  %fronts = call ptr @place(ptr %state, i64 320)
  %is.write = call i1 @same(ptr %frame, ptr %fronts, i64 16)
  br i1 %is.write, label %session, label %compare.read
compare.read:
  %read.front = getelementptr i8, ptr %fronts, i64 32
  %is.read = call i1 @same(ptr %frame, ptr %read.front, i64 16)
  br i1 %is.read, label %session, label %leave
session:
  %tail = call ptr @place(ptr %state, i64 56)
  %session.at = getelementptr i8, ptr %frame, i64 24
  %is.session = call i1 @same(ptr %session.at, ptr %tail, i64 16)
  br i1 %is.session, label %number, label %leave
number:
  %number.at = getelementptr i8, ptr %frame, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  %is.goodbye = icmp eq i64 %number.wire, 0
  br i1 %is.goodbye, label %leave, label %find
find:
  %handle.at = getelementptr i8, ptr %frame, i64 40
  %handle.wire = load i64, ptr %handle.at, align 1
  %handle = call i64 @llvm.bswap.i64(i64 %handle.wire)
  %record = call ptr @allocation(ptr %state, i64 %handle)
  %is.unknown = icmp eq ptr %record, null
  br i1 %is.unknown, label %leave, label %bounds
bounds:
  %offset.at = getelementptr i8, ptr %frame, i64 48
  %offset.wire = load i64, ptr %offset.at, align 1
  %offset = call i64 @llvm.bswap.i64(i64 %offset.wire)
  %place.at = getelementptr i8, ptr %frame, i64 56
  %place.wire = load i64, ptr %place.at, align 1
  %place = call i64 @llvm.bswap.i64(i64 %place.wire)
  %length.at = getelementptr i8, ptr %frame, i64 64
  %length.wire = load i64, ptr %length.at, align 1
  %length = call i64 @llvm.bswap.i64(i64 %length.wire)
  ; From 1 byte to 32 MiB.
  %length.less = sub i64 %length, 1
  %is.bounded = icmp ult i64 %length.less, 33554432
  %size = call i64 @word(ptr %record, i64 8)
  %fits = icmp ule i64 %length, %size
  %may.fit = and i1 %is.bounded, %fits
  br i1 %may.fit, label %inside, label %leave
inside:
  %most = sub i64 %size, %length
  %is.inside = icmp ule i64 %offset, %most
  %arena.bytes = call i64 @word(ptr %state, i64 336)
  %is.in.arena = icmp ult i64 %place, %arena.bytes
  %are.inside = and i1 %is.inside, %is.in.arena
  br i1 %are.inside, label %extent, label %leave
extent:
  ; GRANULE_BYTES
  %extents = call ptr @place(ptr %state, i64 344)
  %granule = lshr i64 %place, 22
  %extent.distance = shl i64 %granule, 3
  %extent.end = call i64 @word(ptr %extents, i64 %extent.distance)
  %place.end = add i64 %place, %length
  %is.pinned = icmp ule i64 %place.end, %extent.end
  br i1 %is.pinned, label %room, label %leave
room:
  %free = call i64 @room_for_reply(ptr %ends)
  %has.room = icmp uge i64 %free, 40
  br i1 %has.room, label %limits, label %leave
limits:
  %pacing = call ptr @place(ptr %state, i64 280)
  %limited = call i1 @is_limited(ptr %pacing)
  br i1 %limited, label %leave, label %look
look:
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %leave, label %clock
clock:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %leave, label %await
await:
  %counters = call ptr @place(ptr %state, i64 8)
  %doing = select i1 %is.write, i64 1545, i64 1546
  call void @show(ptr %counters, i64 48, i64 %doing)
  %has.ended = call i1 @await_launches(ptr %state, i1 true)
  br i1 %has.ended, label %copy, label %give.up
copy:
  call void @begin_unmarked(ptr %state)
  %driver = call ptr @place(ptr %state, i64 32)
  %address = add i64 %handle, %offset
  %host = getelementptr i8, ptr %arena, i64 %place
  br i1 %is.write, label %in, label %out
in:
  %copy.in = call ptr @place(ptr %state, i64 232)
  %begun = call i32 %copy.in(ptr %driver, i64 %address, ptr %host, i64 %length)
  %is.begun = icmp eq i32 %begun, 0
  br i1 %is.begun, label %written, label %give.up
written:
  %is.written = call i1 @await_copy(ptr %state)
  br i1 %is.written, label %done, label %give.up
out:
  %copy.out = call ptr @place(ptr %state, i64 240)
  %was.read = call i32 %copy.out(ptr %driver, i64 %address, ptr %host, i64 %length)
  %is.out = icmp eq i32 %was.read, 0
  br i1 %is.out, label %done, label %give.up
done:
  call void @show(ptr %counters, i64 48, i64 0)
  call void @end_now(ptr %state)
  %after = add i64 %start, 72
  call void @set(ptr %state, i64 96, i64 %after)
  call void @count(ptr %counters, i64 32, i64 1)
  call void @count(ptr %counters, i64 80, i64 1)
  call void @count(ptr %counters, i64 88, i64 %length)
  %reply.distance = select i1 %is.write, i64 16, i64 48
  %reply.front = getelementptr i8, ptr %fronts, i64 %reply.distance
  %reply.tail = call ptr @place(ptr %state, i64 72)
  %copied.front = call ptr @gpulease_memcpy(ptr %reply, ptr %reply.front, i64 16)
  %reply.number = getelementptr i8, ptr %reply, i64 16
  store i64 %number.wire, ptr %reply.number
  %reply.rest = getelementptr i8, ptr %reply, i64 24
  %copied.tail = call ptr @gpulease_memcpy(ptr %reply.rest, ptr %reply.tail, i64 16)
  %is.asleep = call i1 @put_reply(ptr %ends, ptr %reply, i64 40)
  %answer = select i1 %is.asleep, i32 2, i32 1
  ret i32 %answer
give.up:
  call void @show(ptr %counters, i64 48, i64 0)
  br label %leave
leave:
  ret i32 0
}

declare void @llvm.x86.sse2.pause()

; Copy what the ring holds to %into, at most %room bytes, and advance the head. Returns how many bytes were copied.
define internal i64 @take_bytes(ptr %ends, ptr %into, i64 %there, i64 %room) {
  %words = call ptr @place(ptr %ends, i64 0)
  %data = call ptr @place(ptr %ends, i64 8)
  %capacity = call i64 @word(ptr %ends, i64 16)
  %head = call i64 @word(ptr %ends, i64 24)
  %size = call i64 @llvm.umin.i64(i64 %there, i64 %room)
  %mask = sub i64 %capacity, 1
  %at = and i64 %head, %mask
  %straight = sub i64 %capacity, %at
  %here = call i64 @llvm.umin.i64(i64 %straight, i64 %size)
  %rest = sub i64 %size, %here
  %source = getelementptr i8, ptr %data, i64 %at
  %copied = call ptr @gpulease_memcpy(ptr %into, ptr %source, i64 %here)
  %behind = getelementptr i8, ptr %into, i64 %here
  %wrapped = call ptr @gpulease_memcpy(ptr %behind, ptr %data, i64 %rest)
  %head.more = add i64 %head, %size
  call void @set(ptr %ends, i64 24, i64 %head.more)
  call void @show(ptr %words, i64 64, i64 %head.more)
  fence seq_cst
  ret i64 %size
}

; Answer a client that waits by the ring's words for all that it has sent (protocol.ring.SyncWords), if all of it has been
; taken and has ended. Returns whether that is so, or Python has to find out by a SYNC: both are answers.
define internal i1 @answer_awaited(ptr %state, ptr %ends, i64 %awaited) {
entry:
  ; The client announces its frames before it waits. So all of them are seen here, after the load of its word.
  %words = call ptr @place(ptr %ends, i64 0)
  %tail = call i64 @shown(ptr %words, i64 0)
  %head = call i64 @word(ptr %ends, i64 24)
  %is.empty = icmp eq i64 %tail, %head
  br i1 %is.empty, label %ask, label %leave
ask:
  %query = call ptr @place(ptr %state, i64 24)
  %driver = call ptr @place(ptr %state, i64 32)
  %progress = call i32 %query(ptr %driver)
  switch i32 %progress, label %answer [ i32 0, label %look
                                        i32 1, label %leave ]
look:
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %answer, label %clock
clock:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %answer, label %ended
ended:
  %pacing = call ptr @place(ptr %state, i64 280)
  %end = call i64 @word(ptr %state, i64 128)
  call void @gpulease_end_work(ptr %pacing, i64 %end)
  %counters = call ptr @place(ptr %state, i64 8)
  call void @count(ptr %counters, i64 32, i64 1)
  call void @count(ptr %counters, i64 8, i64 1)
  %synced = call i64 @word(ptr %counters, i64 0)
  call void @set(ptr %state, i64 176, i64 %synced)
  br label %reply
answer:
  ; A client that asks without end has its quantum, as one that sends frames.
  %time = call i64 @now()
  call void @set(ptr %state, i64 128, i64 %time)
  br label %reply
reply:
  %is.well = phi i64 [ 0, %answer ], [ 1, %ended ]
  %twice = shl i64 %awaited, 1
  %said = or i64 %twice, %is.well
  %reply.words = call ptr @place(ptr %ends, i64 32)
  call void @show(ptr %reply.words, i64 8, i64 %said)
  call void @set(ptr %ends, i64 120, i64 %awaited)
  %per.reply = call i64 @word(ptr %ends, i64 96)
  call void @set(ptr %ends, i64 80, i64 %per.reply)
  ret i1 true
leave:
  ret i1 false
}

; Put the refusal of the launch into the ring, as the reply to a SYNC at %frame, if the lease lives and there is room.
; Returns whether it is there.
define internal i1 @answer_refused(ptr %state, ptr %ends, ptr %refusal, ptr %frame) {
entry:
  %front = call ptr @place(ptr %state, i64 48)
  %is.front = call i1 @same(ptr %frame, ptr %front, i64 16)
  br i1 %is.front, label %compare.tail, label %leave
compare.tail:
  %tail = call ptr @place(ptr %state, i64 56)
  %tail.at = getelementptr i8, ptr %frame, i64 24
  %is.tail = call i1 @same(ptr %tail.at, ptr %tail, i64 16)
  br i1 %is.tail, label %number, label %leave
number:
  %number.at = getelementptr i8, ptr %frame, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  %is.goodbye = icmp eq i64 %number.wire, 0
  br i1 %is.goodbye, label %leave, label %sizes
sizes:
  %members = call ptr @place(ptr %refusal, i64 24)
  %member = call i64 @word(ptr %refusal, i64 80)
  %member.distance = shl i64 %member, 3
  %record = call ptr @place(ptr %members, i64 %member.distance)
  %plan = call ptr @place(ptr %refusal, i64 72)
  %front.bytes = call i64 @word(ptr %record, i64 32)
  %kernel.bytes = call i64 @word(ptr %plan, i64 128)
  %back.at = add i64 %front.bytes, %kernel.bytes
  %payload.bytes = add i64 %back.at, 48
  %bytes = add i64 %payload.bytes, 40
  %free = call i64 @room_for_reply(ptr %ends)
  %has.room = icmp uge i64 %free, %bytes
  br i1 %has.room, label %look, label %leave
look:
  %is.revoked = call i1 @is_revoked(ptr %state)
  br i1 %is.revoked, label %leave, label %clock
clock:
  %is.late = call i1 @is_late(ptr %state)
  br i1 %is.late, label %leave, label %build
build:
  ; The header: a SYNC's reply with the status, this payload's size, the SYNC's number and the session.
  %reply = call ptr @place(ptr %refusal, i64 56)
  %reply.front = call ptr @place(ptr %refusal, i64 48)
  %copied.front = call ptr @gpulease_memcpy(ptr %reply, ptr %reply.front, i64 12)
  %payload.small = trunc i64 %payload.bytes to i32
  %payload.wire = call i32 @llvm.bswap.i32(i32 %payload.small)
  %reply.payload = getelementptr i8, ptr %reply, i64 12
  store i32 %payload.wire, ptr %reply.payload, align 1
  %reply.number = getelementptr i8, ptr %reply, i64 16
  store i64 %number.wire, ptr %reply.number, align 1
  %reply.session = getelementptr i8, ptr %reply, i64 24
  %copied.session = call ptr @gpulease_memcpy(ptr %reply.session, ptr %tail, i64 16)
  ; The region's part, which ends with the number of the launch; the plan's; the region's again, with the launch's site,
  ; the time of the flip, and the position.
  %payload = getelementptr i8, ptr %reply, i64 40
  %region.front = call ptr @place(ptr %record, i64 24)
  %copied.region = call ptr @gpulease_memcpy(ptr %payload, ptr %region.front, i64 %front.bytes)
  %kernel.at = getelementptr i8, ptr %payload, i64 %front.bytes
  %launch.at = getelementptr i8, ptr %kernel.at, i64 -8
  %launch.wire = call i64 @word(ptr %refusal, i64 64)
  store i64 %launch.wire, ptr %launch.at, align 1
  %kernel = call ptr @place(ptr %plan, i64 120)
  %copied.kernel = call ptr @gpulease_memcpy(ptr %kernel.at, ptr %kernel, i64 %kernel.bytes)
  %back = getelementptr i8, ptr %payload, i64 %back.at
  %region.back = call ptr @place(ptr %record, i64 40)
  %copied.back = call ptr @gpulease_memcpy(ptr %back, ptr %region.back, i64 48)
  %counters = call ptr @place(ptr %state, i64 8)
  %launches = call i64 @word(ptr %counters, i64 0)
  %settled.python = call i64 @word(ptr %refusal, i64 40)
  %settled.here = call i64 @word(ptr %state, i64 176)
  %settled = call i64 @llvm.umax.i64(i64 %settled.python, i64 %settled.here)
  %begun = sub i64 %launches, %settled
  %site = trunc i64 %begun to i32
  %site.wire = call i32 @llvm.bswap.i32(i32 %site)
  %site.at = getelementptr i8, ptr %back, i64 22
  store i32 %site.wire, ptr %site.at, align 1
  %flipped = call i64 @word(ptr %refusal, i64 96)
  %flipped.wire = call i64 @llvm.bswap.i64(i64 %flipped)
  %flipped.at = getelementptr i8, ptr %back, i64 29
  store i64 %flipped.wire, ptr %flipped.at, align 1
  %position.wire = call i64 @word(ptr %refusal, i64 88)
  %position.at = getelementptr i8, ptr %back, i64 40
  store i64 %position.wire, ptr %position.at, align 1
  %told = call i64 @now()
  call void @set(ptr %refusal, i64 112, i64 %told)
  %is.asleep = call i1 @put_reply(ptr %ends, ptr %reply, i64 %bytes)
  %wakes = select i1 %is.asleep, i64 3, i64 0
  call void @set(ptr %refusal, i64 120, i64 %wakes)
  ret i1 true
leave:
  ret i1 false
}

; Refuse the launch at the front of the buffer, and answer the tenant's SYNC if that comes before the time is over. The
; tenant waits by the ring's word: it is sent to the SYNC at once. Python learns of all of it afterwards.
define internal void @refuse_launch(ptr %state, ptr %ends) {
entry:
  %refusal = call ptr @place(ptr %state, i64 272)
  %words = call ptr @place(ptr %ends, i64 0)
  %capacity = call i64 @word(ptr %ends, i64 16)
  %size = call i64 @word(ptr %ends, i64 72)
  %reply.words = call ptr @place(ptr %ends, i64 32)
  %buffer = call ptr @place(ptr %state, i64 88)
  %plan = call ptr @place(ptr %state, i64 112)
  call void @set(ptr %refusal, i64 112, i64 0)
  call void @set(ptr %refusal, i64 120, i64 0)
  %plan.at = getelementptr i8, ptr %refusal, i64 72
  store ptr %plan, ptr %plan.at
  %refused.at = call i64 @word(ptr %state, i64 96)
  %refused = getelementptr i8, ptr %buffer, i64 %refused.at
  %number.at = getelementptr i8, ptr %refused, i64 16
  %number.wire = load i64, ptr %number.at, align 1
  call void @set(ptr %refusal, i64 64, i64 %number.wire)
  %refused.bytes = call i64 @word(ptr %plan, i64 48)
  %position.distance = sub i64 %refused.bytes, 8
  %position.at = getelementptr i8, ptr %refused, i64 %position.distance
  %position.wire = load i64, ptr %position.at, align 1
  call void @set(ptr %refusal, i64 88, i64 %position.wire)
  %behind = add i64 %refused.at, %refused.bytes
  call void @set(ptr %state, i64 96, i64 %behind)
  %per.reply = call i64 @word(ptr %ends, i64 96)
  call void @set(ptr %ends, i64 80, i64 %per.reply)
  %seen = call i64 @word(ptr %refusal, i64 104)
  ; As long as the worker polls for more requests after a reply.
  %spin.ns = call i64 @word(ptr %ends, i64 104)
  %spins.ns = mul i64 %per.reply, %spin.ns
  %until = add i64 %seen, %spins.ns
  br label %next

next:
  %looks = phi i64 [ 0, %entry ], [ %looks, %take ], [ %looks.more, %rest ], [ %looks.more, %patience ]
  %start = call i64 @word(ptr %state, i64 96)
  %end = call i64 @word(ptr %state, i64 104)
  %have = sub i64 %end, %start
  %is.whole = icmp uge i64 %have, 40
  br i1 %is.whole, label %frame, label %look
frame:
  %frame.at = getelementptr i8, ptr %buffer, i64 %start
  %is.answered = call i1 @answer_refused(ptr %state, ptr %ends, ptr %refusal, ptr %frame.at)
  br i1 %is.answered, label %answered, label %done
answered:
  %after = add i64 %start, 40
  call void @set(ptr %state, i64 96, i64 %after)
  br label %done

look:
  %tail = call i64 @shown(ptr %words, i64 0)
  %head = call i64 @word(ptr %ends, i64 24)
  %there = sub i64 %tail, %head
  %is.nothing = icmp eq i64 %there, 0
  br i1 %is.nothing, label %word, label %check
check:
  %is.sane = icmp ule i64 %there, %capacity
  %room = sub i64 %size, %end
  %has.room = icmp ne i64 %room, 0
  %can.take = and i1 %is.sane, %has.room
  br i1 %can.take, label %take, label %done
take:
  %into = getelementptr i8, ptr %buffer, i64 %end
  %came = call i64 @take_bytes(ptr %ends, ptr %into, i64 %there, i64 %room)
  %filled = add i64 %end, %came
  call void @set(ptr %state, i64 104, i64 %filled)
  %waits = call i64 @shown(ptr %words, i64 192)
  %is.waiting = icmp ne i64 %waits, 0
  br i1 %is.waiting, label %wake.writer, label %next
wake.writer:
  call void @set(ptr %refusal, i64 120, i64 4)
  br label %done

word:
  %awaited = call i64 @shown(ptr %words, i64 8)
  %answered.last = call i64 @word(ptr %ends, i64 120)
  %is.new = icmp ne i64 %awaited, %answered.last
  br i1 %is.new, label %decline, label %rest
decline:
  %twice = shl i64 %awaited, 1
  call void @show(ptr %reply.words, i64 8, i64 %twice)
  call void @set(ptr %ends, i64 120, i64 %awaited)
  br label %rest
rest:
  call void @llvm.x86.sse2.pause()
  %looks.more = add i64 %looks, 1
  %phase = and i64 %looks.more, 15
  %is.due = icmp eq i64 %phase, 0
  br i1 %is.due, label %patience, label %next
patience:
  %time = call i64 @now()
  %is.over = icmp ugt i64 %time, %until
  br i1 %is.over, label %done, label %next
done:
  ret void
}

; Serve what comes through the ring until Python has something to do, nothing comes, or the time is over. The buffer is
; empty at the begin, and at the end too, but for FRAMES and REFUSED. Returns an Outcome (layout.py):
;   0 IDLE: nothing came.  1 FRAMES: the buffer, or the ring's end, is for Python.  2 QUANTUM_OVER: the time is over.
;   3 WAKE_READER: the client sleeps until a reply comes, and one came.  4 WAKE_WRITER: it waits for room, and there is.
;   5 REFUSED: a launch was refused because of a region; the refusal has the facts.
define i32 @gpulease_serve_ring(ptr %state, ptr %ends) {
entry:
  %words = call ptr @place(ptr %ends, i64 0)
  %capacity = call i64 @word(ptr %ends, i64 16)
  %size = call i64 @word(ptr %ends, i64 72)
  %buffer = call ptr @place(ptr %state, i64 88)
  %quantum.usual = call i64 @word(ptr %ends, i64 112)
  ; Under limits little is queued, and less than Python takes for its rounds: these come more rarely.
  %pacing.first = call ptr @place(ptr %state, i64 280)
  %limited = call i1 @is_limited(ptr %pacing.first)
  ; ALONE_QUANTUM_NS
  %quantum.long = call i64 @llvm.umax.i64(i64 %quantum.usual, i64 4000000)
  %quantum = select i1 %limited, i64 %quantum.long, i64 %quantum.usual
  %began = call i64 @now()
  %quantum.end = add i64 %began, %quantum
  call void @set(ptr %state, i64 128, i64 %began)
  br label %next

next:
  ; Another epoch ends the serving, but never before one portion was taken from the ring.
  %has.begun = phi i1 [ false, %entry ], [ true, %replied ], [ true, %graph ], [ true, %memory ], [ true, %moved ],
    [ true, %take ], [ true, %word ]
  ; Whether the portion's client was given a moment to wait for it.
  %has.lingered = phi i1 [ false, %entry ], [ %has.lingered, %replied ], [ %has.lingered, %graph ],
    [ %has.lingered, %memory ], [ %has.lingered, %moved ], [ %lingered.then, %take ], [ %lingered.now, %word ]
  %start = call i64 @word(ptr %state, i64 96)
  %end = call i64 @word(ptr %state, i64 104)
  %have = sub i64 %end, %start
  %time = call i64 @word(ptr %state, i64 128)
  %is.late = icmp uge i64 %time, %quantum.end
  %epoch.at = call ptr @place(ptr %state, i64 160)
  %epoch = call i64 @shown(ptr %epoch.at, i64 0)
  %epoch.seen = call i64 @word(ptr %state, i64 168)
  %is.moved = icmp ne i64 %epoch, %epoch.seen
  %is.enough = and i1 %is.moved, %has.begun
  %is.time.up = or i1 %is.late, %is.enough
  %is.empty = icmp eq i64 %have, 0
  br i1 %is.empty, label %empty, label %frames

frames:
  %taken = call i32 @gpulease_take_launches(ptr %state)
  switch i32 %taken, label %to.python [ i32 0, label %sync
                                        i32 2, label %refused ]
refused:
  call void @refuse_launch(ptr %state, ptr %ends)
  ret i32 5
sync:
  %answered = call i32 @answer_sync(ptr %state, ptr %ends)
  switch i32 %answered, label %graph [ i32 1, label %replied
                                       i32 2, label %wake.reader ]
graph:
  %is.replayed = call i1 @replay_graph(ptr %state)
  br i1 %is.replayed, label %next, label %arena
arena:
  %copied = call i32 @copy_arena(ptr %state, ptr %ends)
  switch i32 %copied, label %memory [ i32 1, label %replied
                                      i32 2, label %wake.reader ]
memory:
  %remembered = call i32 @do_memory(ptr %state, ptr %ends)
  switch i32 %remembered, label %moved [ i32 1, label %replied
                                         i32 2, label %wake.reader
                                         i32 3, label %next ]
replied:
  %per.reply = call i64 @word(ptr %ends, i64 96)
  call void @set(ptr %ends, i64 80, i64 %per.reply)
  br label %next
wake.reader:
  %per.reply.too = call i64 @word(ptr %ends, i64 96)
  call void @set(ptr %ends, i64 80, i64 %per.reply.too)
  ret i32 3
moved:
  %start.now = call i64 @word(ptr %state, i64 96)
  %left = sub i64 %end, %start.now
  %is.done = icmp eq i64 %left, 0
  br i1 %is.done, label %next, label %part
part:
  ; Another frame, or the beginning of a frame that continues in the ring.
  %plan = call ptr @place(ptr %state, i64 112)
  %is.known = icmp ne ptr %plan, null
  br i1 %is.known, label %expected, label %headed
expected:
  %frame.bytes = call i64 @word(ptr %plan, i64 48)
  br label %headed
headed:
  %frame.most = phi i64 [ 0, %part ], [ %frame.bytes, %expected ]
  %need.least = call i64 @llvm.umax.i64(i64 %frame.most, i64 40)
  %is.headed = icmp uge i64 %left, 16
  br i1 %is.headed, label %memory.part, label %needed
memory.part:
  %part.at = getelementptr i8, ptr %buffer, i64 %start.now
  %memory.bytes = call i64 @memory_frame_bytes(ptr %state, ptr %part.at)
  %is.copy = icmp ne i64 %memory.bytes, 0
  %copy.need = select i1 %is.copy, i64 %memory.bytes, i64 %need.least
  br label %needed
needed:
  %need = phi i64 [ %need.least, %headed ], [ %copy.need, %memory.part ]
  %is.whole = icmp uge i64 %left, %need
  %is.foreign = or i1 %is.whole, %is.time.up
  br i1 %is.foreign, label %to.python, label %pull
pull:
  %from = getelementptr i8, ptr %buffer, i64 %start.now
  %pulled = call ptr @gpulease_memmove(ptr %buffer, ptr %from, i64 %left)
  br label %receive

empty:
  br i1 %is.time.up, label %leave, label %receive
leave:
  ; A client that has just launched is about to wait for that, and what Python does next may take long: the end of a
  ; region. So it is answered first, once, if it comes and all ends within a moment.
  %may.linger = xor i1 %is.late, true
  %is.first = xor i1 %has.lingered, true
  %spins.here = call i64 @word(ptr %ends, i64 80)
  %is.spinning = icmp ne i64 %spins.here, 0
  %lingers.once = and i1 %may.linger, %is.first
  %lingers = and i1 %lingers.once, %is.spinning
  br i1 %lingers, label %linger, label %quantum.over
linger:
  %head.here = call i64 @word(ptr %ends, i64 24)
  %spin.most = call i64 @word(ptr %ends, i64 104)
  ; LINGER_NS
  %linger.ns = call i64 @llvm.umin.i64(i64 %spin.most, i64 20000)
  %linger.began = call i64 @now()
  %linger.end = add i64 %linger.began, %linger.ns
  br label %look
receive:
  %pending = phi i64 [ %left, %pull ], [ 0, %empty ]
  call void @set(ptr %state, i64 96, i64 0)
  call void @set(ptr %state, i64 104, i64 %pending)
  %tail = call i64 @shown(ptr %words, i64 0)
  br label %arrived
arrived:
  %tail.now = phi i64 [ %tail, %receive ], [ %tail.seen, %arrive ]
  %pending.now = phi i64 [ %pending, %receive ], [ 0, %arrive ]
  %lingered.then = phi i1 [ %has.lingered, %receive ], [ %lingered.now, %arrive ]
  %head = call i64 @word(ptr %ends, i64 24)
  %there = sub i64 %tail.now, %head
  %is.nothing = icmp eq i64 %there, 0
  br i1 %is.nothing, label %nothing, label %check
nothing:
  %is.part = icmp ne i64 %pending.now, 0
  br i1 %is.part, label %to.python, label %idle
check:
  %is.sane = icmp ule i64 %there, %capacity
  %room = sub i64 %size, %pending.now
  %has.room = icmp ne i64 %room, 0
  %can.take = and i1 %is.sane, %has.room
  br i1 %can.take, label %take, label %to.python
take:
  %into = getelementptr i8, ptr %buffer, i64 %pending.now
  %came = call i64 @take_bytes(ptr %ends, ptr %into, i64 %there, i64 %room)
  %filled = add i64 %pending.now, %came
  call void @set(ptr %state, i64 104, i64 %filled)
  %clock = call i64 @now()
  call void @set(ptr %state, i64 128, i64 %clock)
  %per.byte = call i64 @word(ptr %ends, i64 88)
  %spins.before = call i64 @word(ptr %ends, i64 80)
  %is.quiet = icmp ne i64 %per.byte, 0
  %spins.now = select i1 %is.quiet, i64 %per.byte, i64 %spins.before
  call void @set(ptr %ends, i64 80, i64 %spins.now)
  %waits = call i64 @shown(ptr %words, i64 192)
  %is.waiting = icmp ne i64 %waits, 0
  %stays = sub i64 %there, %came
  %stays.twice = shl i64 %stays, 1
  %is.half = icmp ule i64 %stays.twice, %capacity
  %wakes = and i1 %is.waiting, %is.half
  br i1 %wakes, label %wake.writer, label %next
wake.writer:
  ret i32 4

idle:
  %awaited.first = call i64 @shown(ptr %words, i64 8)
  %answered.first = call i64 @word(ptr %ends, i64 120)
  %is.awaited = icmp ne i64 %awaited.first, %answered.first
  %spins.had = call i64 @word(ptr %ends, i64 80)
  ; While regions begin or end, Python looks around between two portions: what spins are left are spent, and none more.
  ; A client that waits by the words is answered all the same.
  %is.calm = xor i1 %is.moved, true
  %is.patient = and i1 %is.awaited, %is.calm
  %spins.least = zext i1 %is.patient to i64
  %spins = call i64 @llvm.umax.i64(i64 %spins.had, i64 %spins.least)
  %is.spent = icmp eq i64 %spins, 0
  br i1 %is.spent, label %tired, label %spin
tired:
  br i1 %is.awaited, label %tired.word, label %is.idle
tired.word:
  %is.answered.once = call i1 @answer_awaited(ptr %state, ptr %ends, i64 %awaited.first)
  br label %is.idle
spin:
  %spins.less = sub i64 %spins, 1
  call void @set(ptr %ends, i64 80, i64 %spins.less)
  %spin.ns = call i64 @word(ptr %ends, i64 104)
  %spin.began = call i64 @now()
  %spin.end = add i64 %spin.began, %spin.ns
  br label %look
look:
  %looks = phi i64 [ 0, %spin ], [ 0, %linger ], [ %looks.more, %rest ], [ %looks.more, %patience ], [ %looks.more, %young ]
  %lingered.now = phi i1 [ %has.lingered, %spin ], [ true, %linger ], [ %lingered.now, %rest ],
    [ %lingered.now, %patience ], [ %lingered.now, %young ]
  %head.now = phi i64 [ %head, %spin ], [ %head.here, %linger ], [ %head.now, %rest ], [ %head.now, %patience ],
    [ %head.now, %young ]
  %until = phi i64 [ %spin.end, %spin ], [ %linger.end, %linger ], [ %until, %rest ], [ %until, %patience ],
    [ %until, %young ]
  %tail.seen = call i64 @shown(ptr %words, i64 0)
  %is.there = icmp ne i64 %tail.seen, %head.now
  br i1 %is.there, label %arrive, label %asked.word
arrive:
  ; The buffer is empty.
  call void @set(ptr %state, i64 96, i64 0)
  call void @set(ptr %state, i64 104, i64 0)
  br label %arrived
asked.word:
  %awaited = call i64 @shown(ptr %words, i64 8)
  %answered.last = call i64 @word(ptr %ends, i64 120)
  %is.new = icmp ne i64 %awaited, %answered.last
  br i1 %is.new, label %word, label %rest
word:
  %is.answered = call i1 @answer_awaited(ptr %state, ptr %ends, i64 %awaited)
  br i1 %is.answered, label %next, label %rest
rest:
  call void @llvm.x86.sse2.pause()
  %looks.more = add i64 %looks, 1
  %phase = and i64 %looks.more, 15
  %is.due = icmp eq i64 %phase, 0
  br i1 %is.due, label %patience, label %look
patience:
  %spin.now = call i64 @now()
  %pacing = call ptr @place(ptr %state, i64 280)
  call void @poll_when_due(ptr %pacing, i64 %spin.now)
  %is.over = icmp ugt i64 %spin.now, %until
  br i1 %is.over, label %young, label %look
young:
  ; Unless the regions have changed, for which Python looks around.
  %is.young = call i1 @is_young(ptr %pacing, i64 %spin.now)
  %epoch.now = call i64 @shown(ptr %epoch.at, i64 0)
  %is.quiet.still = icmp eq i64 %epoch.now, %epoch.seen
  %may.poll = and i1 %is.young, %is.quiet.still
  %has.turn = xor i1 %lingered.now, true
  %polls.on = and i1 %may.poll, %has.turn
  br i1 %polls.on, label %look, label %give.up
give.up:
  br i1 %lingered.now, label %quantum.over, label %is.idle

is.idle:
  ret i32 0
to.python:
  ret i32 1
quantum.over:
  ret i32 2
}
