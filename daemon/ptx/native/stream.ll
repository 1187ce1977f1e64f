; The stream, after team.ll in one module: takes launches from the ring in order and runs them, without Python's lock,
; until the caller ends it.
;
; %state is a StreamState (structures.py); offsets: completed 0, faulted 8, waiting 16, tag 24, kernel 32, ring 40,
; slot_bytes 48, slot_mask 56, idle_spins 64, team 72, fault 80, queued 88, done 120.
; A slot begins with a Launch: entry 0, blocks 8, tag 24, kernel 60, chunk 64, running 88. A KernelRunning has entry 8,
; first_code_ns 16. A Team has its environments at 8; an
; Environment its fault at 48.

declare i32 @gpulease_sem_trywait(ptr)

define void @run_stream(ptr %state) {
start:
  %first = load i64, ptr %state
  %faulted = getelementptr i8, ptr %state, i64 8
  %waiting = getelementptr i8, ptr %state, i64 16
  %tag = getelementptr i8, ptr %state, i64 24
  %kernel = getelementptr i8, ptr %state, i64 32
  %ring.at = getelementptr i8, ptr %state, i64 40
  %ring = load ptr, ptr %ring.at
  %bytes.at = getelementptr i8, ptr %state, i64 48
  %bytes = load i64, ptr %bytes.at
  %mask.at = getelementptr i8, ptr %state, i64 56
  %mask = load i64, ptr %mask.at
  %spins.at = getelementptr i8, ptr %state, i64 64
  %spins = load i64, ptr %spins.at
  %team.at = getelementptr i8, ptr %state, i64 72
  %team = load ptr, ptr %team.at
  %place.at = getelementptr i8, ptr %team, i64 8
  %place = load ptr, ptr %place.at
  %fault.at = getelementptr i8, ptr %state, i64 80
  %queued = getelementptr i8, ptr %state, i64 88
  %done = getelementptr i8, ptr %state, i64 120
  br label %next

; Look for work for a while before sleeping: waking a thread costs more than a small kernel.
next:
  %number = phi i64 [ %first, %start ], [ %following, %finish ], [ %following, %wake ]
  br label %look
look:
  %looked = phi i64 [ 0, %next ], [ %looked.more, %idle ]
  %found = call i32 @gpulease_sem_trywait(ptr %queued)
  %is.found = icmp eq i32 %found, 0
  br i1 %is.found, label %take, label %idle
idle:
  %looked.more = add i64 %looked, 1
  %keep.looking = icmp ult i64 %looked.more, %spins
  br i1 %keep.looking, label %look, label %sleep
sleep:
  %woken = call i32 @gpulease_sem_wait(ptr %queued)
  %is.woken = icmp eq i32 %woken, 0
  ; A signal ends the wait with no work.
  br i1 %is.woken, label %take, label %sleep

take:
  %index = and i64 %number, %mask
  %distance = mul i64 %index, %bytes
  %slot = getelementptr i8, ptr %ring, i64 %distance
  %packed.entry = load ptr, ptr %slot
  %following = add i64 %number, 1
  %is.end = icmp eq ptr %packed.entry, null
  br i1 %is.end, label %end, label %consider
consider:
  ; Behind a fault, launches are passed over until the caller has taken it.
  %skip = load atomic i64, ptr %faulted acquire, align 8
  %is.skipped = icmp ne i64 %skip, 0
  br i1 %is.skipped, label %finish, label %run
run:
  ; The kernel may have been optimised since this launch was packed.
  %running.at = getelementptr i8, ptr %slot, i64 88
  %running = load ptr, ptr %running.at
  %entry.at = getelementptr i8, ptr %running, i64 8
  %entry = load atomic ptr, ptr %entry.at acquire, align 8
  store ptr %entry, ptr %slot
  %left.at = getelementptr i8, ptr %running, i64 16
  %left = load atomic i64, ptr %left.at monotonic, align 8
  %is.timed = icmp sgt i64 %left, 0
  br i1 %is.timed, label %clock, label %begin
clock:
  %clock.now = call i64 @now()
  br label %begin
begin:
  %begun = phi i64 [ 0, %run ], [ %clock.now, %clock ]
  %chunk.at = getelementptr i8, ptr %slot, i64 64
  %chunk = load i32, ptr %chunk.at
  %is.alone = icmp eq i32 %chunk, 0
  br i1 %is.alone, label %alone, label %together
alone:
  %blocks.at = getelementptr i8, ptr %slot, i64 8
  %blocks = load i64, ptr %blocks.at
  %status.alone = call i32 %entry(ptr %slot, ptr %place, i64 0, i64 %blocks)
  br label %ran
together:
  %status.together = call i32 @run_team(ptr %team, ptr %slot)
  br label %ran
ran:
  %status = phi i32 [ %status.alone, %alone ], [ %status.together, %together ]
  ; Where the fault's record is named.
  %named = phi ptr [ %place, %alone ], [ %team, %together ]
  %named.at = phi i64 [ 48, %alone ], [ 80, %together ]
  br i1 %is.timed, label %count, label %check
count:
  ; Never 0, which means that the code is not timed.
  %ended = call i64 @now()
  %elapsed = sub i64 %ended, %begun
  %left.less = sub i64 %left, %elapsed
  %is.over = icmp slt i64 %left.less, 1
  %left.now = select i1 %is.over, i64 -1, i64 %left.less
  store atomic i64 %left.now, ptr %left.at monotonic, align 8
  br label %check
check:
  %is.fault = icmp ne i32 %status, 0
  br i1 %is.fault, label %fault, label %finish
fault:
  %record.at = getelementptr i8, ptr %named, i64 %named.at
  %record = load i64, ptr %record.at
  store i64 %record, ptr %fault.at
  %slot.tag = getelementptr i8, ptr %slot, i64 24
  %tag.value = load i64, ptr %slot.tag
  store i64 %tag.value, ptr %tag
  %slot.kernel = getelementptr i8, ptr %slot, i64 60
  %kernel.value = load i32, ptr %slot.kernel
  %kernel.wide = zext i32 %kernel.value to i64
  store i64 %kernel.wide, ptr %kernel
  store atomic i64 1, ptr %faulted release, align 8
  br label %finish

finish:
  store atomic i64 %following, ptr %state seq_cst, align 8
  %asleep = load atomic i64, ptr %waiting seq_cst, align 8
  %is.asleep = icmp ne i64 %asleep, 0
  br i1 %is.asleep, label %wake, label %next
wake:
  %posted = call i32 @gpulease_sem_post(ptr %done)
  br label %next

end:
  store atomic i64 %following, ptr %state seq_cst, align 8
  ret void
}
