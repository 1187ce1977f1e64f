; What the caller does with the stream (stream.ll), for native code that launches: see `LaunchQueue.submit`.
;
; %state is a StreamState (structures.py); offsets: completed 0, faulted 8, ring 40, slot_bytes 48, slot_mask 56, queued 88,
; submitted 152, has_thread 160, has_helpers 168, prints 176, marks 184. A PrintHead has: used 0, dropped 8.
; %record is a launch's head of 96 bytes, with its tag at 24, then one word: whether its blocks are shared out.
; A KernelRunning, at 88 of the head, has first_code_ns 16.
; Parameters are at most MAX_PARAMETER_BYTES, which a slot has room for: `CpuContext` makes no record of others.

declare ptr @gpulease_memcpy(ptr, ptr, i64)
declare ptr @gpulease_memset(ptr, i32, i64)

; 0: queued. 1: no room, threads to be started first, or a kernel to be optimised: Python does that.
define i32 @submit(ptr %state, ptr %record, ptr %params, i64 %bytes, i64 %tag) {
entry:
  %thread.at = getelementptr i8, ptr %state, i64 160
  %thread = load i64, ptr %thread.at
  %is.running = icmp ne i64 %thread, 0
  %shared.at = getelementptr i8, ptr %record, i64 96
  %shared = load i64, ptr %shared.at
  %is.alone = icmp eq i64 %shared, 0
  %helpers.at = getelementptr i8, ptr %state, i64 168
  %helpers = load i64, ptr %helpers.at
  %has.helpers = icmp ne i64 %helpers, 0
  %is.manned = or i1 %is.alone, %has.helpers
  %submitted.at = getelementptr i8, ptr %state, i64 152
  %number = load i64, ptr %submitted.at
  %completed = load atomic i64, ptr %state acquire, align 8
  %waiting = sub i64 %number, %completed
  %mask.at = getelementptr i8, ptr %state, i64 56
  %mask = load i64, ptr %mask.at
  %has.room = icmp ule i64 %waiting, %mask
  %kernel.at = getelementptr i8, ptr %record, i64 88
  %kernel = load ptr, ptr %kernel.at
  %left.at = getelementptr i8, ptr %kernel, i64 16
  %left = load atomic i64, ptr %left.at monotonic, align 8
  %is.fast = icmp sge i64 %left, 0
  %can.some = and i1 %is.running, %is.manned
  %can.room = and i1 %can.some, %has.room
  %can = and i1 %can.room, %is.fast
  br i1 %can, label %fill, label %refuse
fill:
  %ring.at = getelementptr i8, ptr %state, i64 40
  %ring = load ptr, ptr %ring.at
  %slot.bytes.at = getelementptr i8, ptr %state, i64 48
  %slot.bytes = load i64, ptr %slot.bytes.at
  %index = and i64 %number, %mask
  %distance = mul i64 %index, %slot.bytes
  %slot = getelementptr i8, ptr %ring, i64 %distance
  %head = call ptr @gpulease_memcpy(ptr %slot, ptr %record, i64 96)
  %tag.at = getelementptr i8, ptr %slot, i64 24
  store i64 %tag, ptr %tag.at
  %params.at = getelementptr i8, ptr %slot, i64 96
  %copied = call ptr @gpulease_memcpy(ptr %params.at, ptr %params, i64 %bytes)
  %more = add i64 %number, 1
  store i64 %more, ptr %submitted.at
  %queued = getelementptr i8, ptr %state, i64 88
  %posted = call i32 @gpulease_sem_post(ptr %queued)
  ret i32 0
refuse:
  ret i32 1
}

; 0: all has run, and there is nothing to report. 1: something runs. 2: there is something to report.
define i32 @query(ptr %state) {
entry:
  %submitted.at = getelementptr i8, ptr %state, i64 152
  %number = load i64, ptr %submitted.at
  %completed = load atomic i64, ptr %state acquire, align 8
  %is.done = icmp eq i64 %number, %completed
  br i1 %is.done, label %look, label %busy
busy:
  ret i32 1
look:
  %faulted.at = getelementptr i8, ptr %state, i64 8
  %faulted = load atomic i64, ptr %faulted.at acquire, align 8
  %prints.at = getelementptr i8, ptr %state, i64 176
  %prints = load ptr, ptr %prints.at
  %used = load i64, ptr %prints
  %dropped.at = getelementptr i8, ptr %prints, i64 8
  %dropped = load i64, ptr %dropped.at
  %some = or i64 %faulted, %used
  %any = or i64 %some, %dropped
  %is.quiet = icmp eq i64 %any, 0
  %state.now = select i1 %is.quiet, i32 0, i32 2
  ret i32 %state.now
}

; Copies between host bytes and an allocation. The caller has asked `query`: nothing runs.
define i32 @copy_in(ptr %state, i64 %address, ptr %data, i64 %bytes) {
  %to = inttoptr i64 %address to ptr
  %copied = call ptr @gpulease_memcpy(ptr %to, ptr %data, i64 %bytes)
  ret i32 0
}

define i32 @copy_out(ptr %state, i64 %address, ptr %into, i64 %bytes) {
  %from = inttoptr i64 %address to ptr
  %copied = call ptr @gpulease_memcpy(ptr %into, ptr %from, i64 %bytes)
  ret i32 0
}

; Zero an allocation; 1 if something runs, which Python waits for.
define i32 @zero(ptr %state, i64 %address, i64 %bytes) {
entry:
  %progress = call i32 @query(ptr %state)
  %is.still = icmp eq i32 %progress, 0
  br i1 %is.still, label %clear, label %refuse
clear:
  %at = inttoptr i64 %address to ptr
  %cleared = call ptr @gpulease_memset(ptr %at, i32 0, i64 %bytes)
  ret i32 0
refuse:
  ret i32 1
}

; The three functions of a CardProgress (drivers/interface.py). A mark is how much had been submitted.

define i32 @idle(ptr %state) {
  %submitted.at = getelementptr i8, ptr %state, i64 152
  %number = load i64, ptr %submitted.at
  %completed = load atomic i64, ptr %state acquire, align 8
  %is.busy = icmp ne i64 %number, %completed
  %progress = zext i1 %is.busy to i32
  ret i32 %progress
}

define i32 @mark(ptr %state, i64 %number) {
  %marks.at = getelementptr i8, ptr %state, i64 184
  %marks = load ptr, ptr %marks.at
  ; MAX_MARKS
  %index = and i64 %number, 63
  %mark.at = getelementptr i64, ptr %marks, i64 %index
  %submitted.at = getelementptr i8, ptr %state, i64 152
  %submitted = load i64, ptr %submitted.at
  store i64 %submitted, ptr %mark.at
  ret i32 0
}

define i32 @reached(ptr %state, i64 %number) {
  %marks.at = getelementptr i8, ptr %state, i64 184
  %marks = load ptr, ptr %marks.at
  %index = and i64 %number, 63
  %mark.at = getelementptr i64, ptr %marks, i64 %index
  %mark = load i64, ptr %mark.at
  %completed = load atomic i64, ptr %state acquire, align 8
  %is.busy = icmp ult i64 %completed, %mark
  %progress = zext i1 %is.busy to i32
  ret i32 %progress
}
