; A launch's blocks over several host threads: the stream's, and helpers that wait to take part (stream.py).
;
; %team is a Team (structures.py); offsets: launch 0, environments 8, helpers 16, wake_ns 24, idle_yields 32, ending 40, next 64,
; stop 72, fault 80, used 88, state 128, idle 136, work 192, done 224.
; A Launch has: entry 0, blocks 8, chunk 64, environment_count 68, shared_stride 72, local_stride 76, frame_stride 80, running 88.
; A KernelRunning has block_ns 0.
; An Environment has: arena 0, shadow 8, last_granule 16, shared 24, local 32, frames 40, fault 48, prints 56, block 64,
; resumes 72, next 80, returned 88, and takes 128; a Fault takes 80.
;
; The state counts the helpers that take part, and has bit 62 while they may begin to, bit 61 while the stream's thread
; sleeps until they have ended. So a helper that comes late finds the launch closed, and no thread waits for it.

declare i32 @gpulease_sem_wait(ptr)
declare i32 @gpulease_sem_post(ptr)
declare i32 @gpulease_sched_yield()
declare i32 @gpulease_clock_gettime(i32, ptr)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.usub.sat.i64(i64, i64)

define internal i64 @now() {
  %time = alloca { i64, i64 }
  %got = call i32 @gpulease_clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at
  %scaled = mul i64 %seconds, 1000000000
  %total = add i64 %scaled, %rest
  ret i64 %total
}

; An address of the first place's, as many strides on.
define internal void @set_area(ptr %first, ptr %place, i64 %field, i64 %number, i64 %stride) {
  %from = getelementptr i8, ptr %first, i64 %field
  %base = load i64, ptr %from
  %distance = mul i64 %number, %stride
  %address = add i64 %base, %distance
  %to = getelementptr i8, ptr %place, i64 %field
  store i64 %address, ptr %to
  ret void
}

; A place that no block is in yet; null if the launch has no more.
define internal ptr @take_place(ptr %team, ptr %launch) {
entry:
  %used = getelementptr i8, ptr %team, i64 88
  %number = atomicrmw add ptr %used, i64 1 monotonic
  %environments.at = getelementptr i8, ptr %launch, i64 68
  %environments = load i32, ptr %environments.at
  %limit = zext i32 %environments to i64
  %first.at = getelementptr i8, ptr %team, i64 8
  %first = load ptr, ptr %first.at
  %distance = mul i64 %number, 128
  %place = getelementptr i8, ptr %first, i64 %distance
  %is.there = icmp ult i64 %number, %limit
  %is.first = icmp eq i64 %number, 0
  br i1 %is.there, label %there, label %none
none:
  ret ptr null
there:
  br i1 %is.first, label %done, label %fill
fill:
  %shared.at = getelementptr i8, ptr %launch, i64 72
  %shared.narrow = load i32, ptr %shared.at
  %shared = zext i32 %shared.narrow to i64
  %local.at = getelementptr i8, ptr %launch, i64 76
  %local.narrow = load i32, ptr %local.at
  %local = zext i32 %local.narrow to i64
  %frames.at = getelementptr i8, ptr %launch, i64 80
  %frames.narrow = load i32, ptr %frames.at
  %frames = zext i32 %frames.narrow to i64
  call void @set_area(ptr %first, ptr %place, i64 0, i64 0, i64 0)
  call void @set_area(ptr %first, ptr %place, i64 8, i64 0, i64 0)
  call void @set_area(ptr %first, ptr %place, i64 16, i64 0, i64 0)
  call void @set_area(ptr %first, ptr %place, i64 24, i64 %number, i64 %shared)
  call void @set_area(ptr %first, ptr %place, i64 32, i64 %number, i64 %local)
  call void @set_area(ptr %first, ptr %place, i64 40, i64 %number, i64 %frames)
  call void @set_area(ptr %first, ptr %place, i64 48, i64 %number, i64 80)
  call void @set_area(ptr %first, ptr %place, i64 56, i64 0, i64 0)
  call void @set_area(ptr %first, ptr %place, i64 88, i64 0, i64 0)
  br label %done
done:
  ret ptr %place
}

; Wake as many sleeping helpers as there is work for. Who is woken is no longer counted as idle.
define internal void @wake(ptr %team, i64 %wanted) {
entry:
  %idle.at = getelementptr i8, ptr %team, i64 136
  %work = getelementptr i8, ptr %team, i64 192
  br label %claim
claim:
  %idle = load atomic i64, ptr %idle.at seq_cst, align 8
  %some = call i64 @llvm.umin.i64(i64 %idle, i64 %wanted)
  %left = sub i64 %idle, %some
  %result = cmpxchg ptr %idle.at, i64 %idle, i64 %left seq_cst seq_cst
  %is.claimed = extractvalue { i64, i1 } %result, 1
  br i1 %is.claimed, label %each, label %claim
each:
  %number = phi i64 [ 0, %claim ], [ %next, %post ]
  %more = icmp ult i64 %number, %some
  br i1 %more, label %post, label %done
post:
  %posted = call i32 @gpulease_sem_post(ptr %work)
  %next = add i64 %number, 1
  br label %each
done:
  ret void
}

; Run blocks until none is left or one has faulted. A block that only waits for others is set aside in its place, and
; another begun; once all set aside have had a turn and none of them has ended, as many again may begin.
; `wakes` is whether to wake the helpers as soon as what is left seems worth it. Returns how many blocks have ended.
define internal i64 @run_blocks(ptr %team, ptr %launch, i1 %wakes) {
entry:
  %free.at = alloca ptr
  %head.at = alloca ptr
  %tail.at = alloca ptr
  %parked.at = alloca i64
  %allowed.at = alloca i64
  %left.at = alloca i64
  %ended.at = alloca i1
  %wakes.at = alloca i1
  %count.at = alloca i64
  store i64 0, ptr %count.at
  store ptr null, ptr %free.at
  store ptr null, ptr %head.at
  store ptr null, ptr %tail.at
  store i64 0, ptr %parked.at
  store i64 0, ptr %allowed.at
  store i64 0, ptr %left.at
  store i1 false, ptr %ended.at
  store i1 %wakes, ptr %wakes.at
  %entry.function = load ptr, ptr %launch
  %blocks.at = getelementptr i8, ptr %launch, i64 8
  %blocks = load i64, ptr %blocks.at
  %chunk.at = getelementptr i8, ptr %launch, i64 64
  %chunk.narrow = load i32, ptr %chunk.at
  %chunk = zext i32 %chunk.narrow to i64
  %next.at = getelementptr i8, ptr %team, i64 64
  %stop.at = getelementptr i8, ptr %team, i64 72
  br i1 %wakes, label %clock, label %step
clock:
  %clock.now = call i64 @now()
  br label %step

step:
  %begun = phi i64 [ 0, %entry ], [ %clock.now, %clock ], [ %begun, %look ], [ %begun, %consider ], [ %begun, %rouse ]
  %stop = load atomic i64, ptr %stop.at acquire, align 8
  %is.stopped = icmp ne i64 %stop, 0
  br i1 %is.stopped, label %leave, label %choose
choose:
  %parked = load i64, ptr %parked.at
  %none.parked = icmp eq i64 %parked, 0
  %allowed = load i64, ptr %allowed.at
  %may = icmp ne i64 %allowed, 0
  %is.new = or i1 %none.parked, %may
  br i1 %is.new, label %new, label %resume

new:
  %free = load ptr, ptr %free.at
  %none.free = icmp eq ptr %free, null
  br i1 %none.free, label %take, label %pop
pop:
  %free.next.at = getelementptr i8, ptr %free, i64 80
  %free.next = load ptr, ptr %free.next.at
  store ptr %free.next, ptr %free.at
  br label %placed
take:
  %taken = call ptr @take_place(ptr %team, ptr %launch)
  %none.taken = icmp eq ptr %taken, null
  br i1 %none.taken, label %no.new, label %placed
placed:
  %new.place = phi ptr [ %free, %pop ], [ %taken, %take ]
  %new.block = atomicrmw add ptr %next.at, i64 %chunk monotonic
  %is.block = icmp ult i64 %new.block, %blocks
  br i1 %is.block, label %begin, label %put.back
put.back:
  %rest = load ptr, ptr %free.at
  %back.next.at = getelementptr i8, ptr %new.place, i64 80
  store ptr %rest, ptr %back.next.at
  store ptr %new.place, ptr %free.at
  br label %no.new
no.new:
  store i64 0, ptr %allowed.at
  br i1 %none.parked, label %leave, label %resume
begin:
  %block.at = getelementptr i8, ptr %new.place, i64 64
  store i64 %new.block, ptr %block.at
  %new.resumes.at = getelementptr i8, ptr %new.place, i64 72
  store i64 0, ptr %new.resumes.at
  %allowed.less = call i64 @llvm.usub.sat.i64(i64 %allowed, i64 1)
  store i64 %allowed.less, ptr %allowed.at
  br label %run

resume:
  %old.place = load ptr, ptr %head.at
  %old.next.at = getelementptr i8, ptr %old.place, i64 80
  %old.next = load ptr, ptr %old.next.at
  store ptr %old.next, ptr %head.at
  %parked.less = sub i64 %parked, 1
  store i64 %parked.less, ptr %parked.at
  %old.resumes.at = getelementptr i8, ptr %old.place, i64 72
  store i64 1, ptr %old.resumes.at
  br label %run

run:
  %place = phi ptr [ %new.place, %begin ], [ %old.place, %resume ]
  %first.at = getelementptr i8, ptr %place, i64 64
  %first = load i64, ptr %first.at
  %end = add i64 %first, %chunk
  %last = call i64 @llvm.umin.i64(i64 %end, i64 %blocks)
  %status = call i32 %entry.function(ptr %launch, ptr %place, i64 %first, i64 %last)
  %link.at = getelementptr i8, ptr %place, i64 80
  switch i32 %status, label %fault [ i32 0, label %ended
                                     i32 1, label %waits ]
ended:
  %others = load ptr, ptr %free.at
  store ptr %others, ptr %link.at
  store ptr %place, ptr %free.at
  store i1 true, ptr %ended.at
  %count = load i64, ptr %count.at
  %size = sub i64 %last, %first
  %count.more = add i64 %count, %size
  store i64 %count.more, ptr %count.at
  br label %turn
waits:
  store ptr null, ptr %link.at
  %waiting = load i64, ptr %parked.at
  %is.first = icmp eq i64 %waiting, 0
  %tail = load ptr, ptr %tail.at
  %tail.link.at = getelementptr i8, ptr %tail, i64 80
  %link = select i1 %is.first, ptr %head.at, ptr %tail.link.at
  store ptr %place, ptr %link
  store ptr %place, ptr %tail.at
  %waiting.more = add i64 %waiting, 1
  store i64 %waiting.more, ptr %parked.at
  br label %turn
fault:
  %result = cmpxchg ptr %stop.at, i64 0, i64 1 seq_cst seq_cst
  %is.won = extractvalue { i64, i1 } %result, 1
  br i1 %is.won, label %record, label %leave
record:
  %record.at = getelementptr i8, ptr %place, i64 48
  %record.value = load i64, ptr %record.at
  %fault.at = getelementptr i8, ptr %team, i64 80
  store i64 %record.value, ptr %fault.at
  br label %leave

turn:
  %left = load i64, ptr %left.at
  %left.less = call i64 @llvm.usub.sat.i64(i64 %left, i64 1)
  store i64 %left.less, ptr %left.at
  %is.round = icmp eq i64 %left.less, 0
  br i1 %is.round, label %round, label %look
round:
  %now.parked = load i64, ptr %parked.at
  store i64 %now.parked, ptr %left.at
  %any.ended = load i1, ptr %ended.at
  store i1 false, ptr %ended.at
  %any.parked = icmp ne i64 %now.parked, 0
  %none.ended = xor i1 %any.ended, true
  %is.fruitless = and i1 %any.parked, %none.ended
  br i1 %is.fruitless, label %allow, label %look
allow:
  store i64 %now.parked, ptr %allowed.at
  %yielded = call i32 @gpulease_sched_yield()
  br label %look

look:
  %still = load i1, ptr %wakes.at
  br i1 %still, label %consider, label %step
consider:
  %now = call i64 @now()
  %elapsed = sub i64 %now, %begun
  %handed = load atomic i64, ptr %next.at monotonic, align 8
  %remaining = call i64 @llvm.usub.sat.i64(i64 %blocks, i64 %handed)
  %needed.at = getelementptr i8, ptr %team, i64 24
  %needed = load i64, ptr %needed.at
  %elapsed.real = uitofp i64 %elapsed to double
  %remaining.real = uitofp i64 %remaining to double
  %handed.real = uitofp i64 %handed to double
  %needed.real = uitofp i64 %needed to double
  %cost = fmul double %elapsed.real, %remaining.real
  %bound = fmul double %needed.real, %handed.real
  %is.worth = fcmp ogt double %cost, %bound
  br i1 %is.worth, label %rouse, label %step
rouse:
  store i1 false, ptr %wakes.at
  %chunk.less = sub i64 %chunk, 1
  %rounded = add i64 %remaining, %chunk.less
  %chunks = udiv i64 %rounded, %chunk
  call void @wake(ptr %team, i64 %chunks)
  br label %step

leave:
  %total = load i64, ptr %count.at
  ret i64 %total
}

; Wake helpers for a whole launch if its kernel's blocks were long the last time, or are not known. Says whether not.
define internal i1 @leave_asleep(ptr %team, ptr %launch, i64 %pace) {
entry:
  %blocks.at = getelementptr i8, ptr %launch, i64 8
  %blocks = load i64, ptr %blocks.at
  %needed.at = getelementptr i8, ptr %team, i64 24
  %needed = load i64, ptr %needed.at
  %pace.real = uitofp i64 %pace to double
  %blocks.real = uitofp i64 %blocks to double
  %needed.real = uitofp i64 %needed to double
  %cost = fmul double %pace.real, %blocks.real
  %is.short = fcmp olt double %cost, %needed.real
  %is.known = icmp ne i64 %pace, 0
  %sleeps = and i1 %is.short, %is.known
  br i1 %sleeps, label %done, label %rouse
rouse:
  ; The stream's thread takes one itself.
  %others = sub i64 %blocks, 1
  call void @wake(ptr %team, i64 %others)
  br label %done
done:
  ret i1 %sleeps
}

; Run a launch. Returns its status; the fault's record is then named in the team.
define i32 @run_team(ptr %team, ptr %launch) {
entry:
  %state.at = getelementptr i8, ptr %team, i64 128
  %done = getelementptr i8, ptr %team, i64 224
  %next.at = getelementptr i8, ptr %team, i64 64
  %stop.at = getelementptr i8, ptr %team, i64 72
  %used.at = getelementptr i8, ptr %team, i64 88
  %helpers.at = getelementptr i8, ptr %team, i64 16
  %yields.at = getelementptr i8, ptr %team, i64 32
  %yields = load i64, ptr %yields.at
  store ptr %launch, ptr %team
  store i64 0, ptr %next.at
  store i64 0, ptr %stop.at
  store i64 0, ptr %used.at
  %helpers = load i64, ptr %helpers.at
  %is.alone = icmp eq i64 %helpers, 0
  br i1 %is.alone, label %alone, label %open
alone:
  %count.alone = call i64 @run_blocks(ptr %team, ptr %launch, i1 false)
  br label %end
open:
  %pace.at.at = getelementptr i8, ptr %launch, i64 88
  %pace.at = load ptr, ptr %pace.at.at
  %pace = load i64, ptr %pace.at
  store atomic i64 4611686018427387904, ptr %state.at seq_cst, align 8
  %wakes = call i1 @leave_asleep(ptr %team, ptr %launch, i64 %pace)
  %begun = call i64 @now()
  %count = call i64 @run_blocks(ptr %team, ptr %launch, i1 %wakes)
  %ended = call i64 @now()
  %some = call i64 @llvm.umax.i64(i64 %count, i64 1)
  %elapsed = sub i64 %ended, %begun
  %each = udiv i64 %elapsed, %some
  %pace.new = call i64 @llvm.umax.i64(i64 %each, i64 1)
  store i64 %pace.new, ptr %pace.at
  %closed = atomicrmw and ptr %state.at, i64 -4611686018427387905 seq_cst
  br label %look
look:
  %looks = phi i64 [ 0, %open ], [ %looks.more, %again ]
  %state = load atomic i64, ptr %state.at seq_cst, align 8
  %is.over = icmp eq i64 %state, 0
  br i1 %is.over, label %end, label %again
again:
  %yielded = call i32 @gpulease_sched_yield()
  %looks.more = add i64 %looks, 1
  %keep.looking = icmp ult i64 %looks.more, %yields
  br i1 %keep.looking, label %look, label %mark
mark:
  %before = atomicrmw or ptr %state.at, i64 2305843009213693952 seq_cst
  %is.empty = icmp eq i64 %before, 0
  br i1 %is.empty, label %clear, label %sleep
sleep:
  %woken = call i32 @gpulease_sem_wait(ptr %done)
  ; A signal ends the wait with nothing.
  %is.woken = icmp eq i32 %woken, 0
  br i1 %is.woken, label %clear, label %sleep
clear:
  store atomic i64 0, ptr %state.at seq_cst, align 8
  br label %end
end:
  %stop = load atomic i64, ptr %stop.at acquire, align 8
  %is.fault = icmp ne i64 %stop, 0
  %status = select i1 %is.fault, i32 2, i32 0
  ret i32 %status
}

; A helper: take part in launches until the team ends.
define void @run_helper(ptr %team) {
entry:
  %ending.at = getelementptr i8, ptr %team, i64 40
  %state.at = getelementptr i8, ptr %team, i64 128
  %idle.at = getelementptr i8, ptr %team, i64 136
  %work = getelementptr i8, ptr %team, i64 192
  %done = getelementptr i8, ptr %team, i64 224
  %yields.at = getelementptr i8, ptr %team, i64 32
  %yields = load i64, ptr %yields.at
  br label %again
again:
  br label %look
look:
  %looks = phi i64 [ 0, %again ], [ %looks, %try ], [ %looks.more, %wait ], [ 0, %withdrawn ]
  %ending = load atomic i64, ptr %ending.at seq_cst, align 8
  %is.ending = icmp ne i64 %ending, 0
  br i1 %is.ending, label %end, label %see
see:
  %state = load atomic i64, ptr %state.at seq_cst, align 8
  %open = and i64 %state, 4611686018427387904
  %is.open = icmp ne i64 %open, 0
  br i1 %is.open, label %try, label %idle
try:
  %entered = add i64 %state, 1
  %result = cmpxchg ptr %state.at, i64 %state, i64 %entered seq_cst seq_cst
  %is.in = extractvalue { i64, i1 } %result, 1
  br i1 %is.in, label %run, label %look
run:
  %launch = load ptr, ptr %team
  %count = call i64 @run_blocks(ptr %team, ptr %launch, i1 false)
  %before = atomicrmw sub ptr %state.at, i64 1 seq_cst
  %is.last = icmp eq i64 %before, 2305843009213693953
  br i1 %is.last, label %tell, label %again
tell:
  %told = call i32 @gpulease_sem_post(ptr %done)
  br label %again

idle:
  %looks.more = add i64 %looks, 1
  %keep.looking = icmp ult i64 %looks.more, %yields
  br i1 %keep.looking, label %wait, label %rest
wait:
  %yielded = call i32 @gpulease_sched_yield()
  br label %look
rest:
  %counted = atomicrmw add ptr %idle.at, i64 1 seq_cst
  ; What began before this one was counted has not woken it.
  %state.now = load atomic i64, ptr %state.at seq_cst, align 8
  %open.now = and i64 %state.now, 4611686018427387904
  %ending.now = load atomic i64, ptr %ending.at seq_cst, align 8
  %reason = or i64 %open.now, %ending.now
  %is.needed = icmp ne i64 %reason, 0
  br i1 %is.needed, label %withdraw, label %sleep
withdraw:
  %idle.seen = load atomic i64, ptr %idle.at seq_cst, align 8
  %is.claimed = icmp eq i64 %idle.seen, 0
  br i1 %is.claimed, label %sleep, label %uncount
uncount:
  %idle.less = sub i64 %idle.seen, 1
  %swap = cmpxchg ptr %idle.at, i64 %idle.seen, i64 %idle.less seq_cst seq_cst
  %is.uncounted = extractvalue { i64, i1 } %swap, 1
  br i1 %is.uncounted, label %withdrawn, label %withdraw
withdrawn:
  br label %look
sleep:
  %woken = call i32 @gpulease_sem_wait(ptr %work)
  %is.woken = icmp eq i32 %woken, 0
  br i1 %is.woken, label %again, label %sleep
end:
  ret void
}
