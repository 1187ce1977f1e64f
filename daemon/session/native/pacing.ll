; The account of the card's time, and the limits on it (contract/control_page.py); before serve.ll in one module.
;
; An interval begins when work becomes outstanding and ends when none is left. Nothing reports the end of work that
; no client waits for, so that end is polled: tightly while this process polls for requests anyway, later at steps that
; are a small part of the interval. An end between two polls is taken to be in their middle. No poll comes within 4 us
; of a begin: nothing has ended by then, and between two launches of a burst the driver's answer would delay the second.
;
; While limits are set, a mark of the driver follows each launch. The marks show what has ended, and the time between
; two of them how long a kernel takes. A kernel's mean moves by a quarter of the difference towards a shorter time, and
; by an eighth towards a longer one, at most to the double: a longer time may contain another process's turn on the card.
; An end that was polled for late makes this time too long and the next one too short, so it counts for neither.
;
; Offsets, as in layout.py.
;   PacingState: page 0, counters 8, driver 16, idle 24, mark 32, reached 40, own_word 48, words 56, first 64, next 72,
;     queued_ns 80, running_ns 88, polled_ns 96, marks 104, spin_ns 112, is_marked 120, seen_ns 128, ask_ns 136,
;     own_bit 144, is_ready 152, unknown 160, rest_mean 168, copy_mean 176,
;     admitted_ns 184, slack_ns 192, linger_ns 200
;   A mark: estimate 0, mean's address 8; 16 bytes; mark n is at n modulo 64, as in the driver.
;   The lease's page: revocation word 0, deadline 8, allowance 3816, queue bound 3824, latency mask 3832, patience 3840,
;     until 3848, turn's begin 3856, length 3864, period 3872. Claims: busy 144, busy since 152, held back 160, held back since 168, last busy from 184, until 192.

declare i32 @gpulease_clock_gettime(i32, ptr)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.usub.sat.i64(i64, i64)

define internal i64 @now() {
  %time = call i64 @clock(i32 1)
  ret i64 %time
}

define internal i64 @clock(i32 %which) {
  %time = alloca { i64, i64 }
  %got = call i32 @gpulease_clock_gettime(i32 %which, ptr %time)
  %seconds = load i64, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at
  %scaled = mul i64 %seconds, 1000000000
  %total = add i64 %scaled, %rest
  ret i64 %total
}

define internal i64 @word(ptr %base, i64 %offset) {
  %at = getelementptr i8, ptr %base, i64 %offset
  %value = load i64, ptr %at
  ret i64 %value
}

define internal ptr @place(ptr %base, i64 %offset) {
  %at = getelementptr i8, ptr %base, i64 %offset
  %value = load ptr, ptr %at
  ret ptr %value
}

define internal void @set(ptr %base, i64 %offset, i64 %value) {
  %at = getelementptr i8, ptr %base, i64 %offset
  store i64 %value, ptr %at
  ret void
}

; Read a word that another process writes.
define internal i64 @shown(ptr %base, i64 %offset) {
  %at = getelementptr i8, ptr %base, i64 %offset
  %value = load atomic i64, ptr %at acquire, align 8
  ret i64 %value
}

define internal void @show(ptr %base, i64 %offset, i64 %value) {
  %at = getelementptr i8, ptr %base, i64 %offset
  store atomic i64 %value, ptr %at release, align 8
  ret void
}

define internal void @count(ptr %counters, i64 %offset, i64 %more) {
  %before = call i64 @word(ptr %counters, i64 %offset)
  %after = add i64 %before, %more
  call void @show(ptr %counters, i64 %offset, i64 %after)
  ret void
}

; --- the account ---

; Work is about to become outstanding. Begins an interval if none is open.
define void @gpulease_begin_work(ptr %pacing, i64 %time) {
entry:
  call void @set(ptr %pacing, i64 128, i64 %time)
  %quiet.until = add i64 %time, 4000
  call void @set(ptr %pacing, i64 136, i64 %quiet.until)
  %counters = call ptr @place(ptr %pacing, i64 8)
  %since = call i64 @word(ptr %counters, i64 152)
  %is.idle = icmp eq i64 %since, 0
  br i1 %is.idle, label %begin, label %leave
begin:
  ; The latency word before the work: others hold back from now on.
  call void @show(ptr %counters, i64 152, i64 %time)
  %own = call ptr @place(ptr %pacing, i64 48)
  call void @show(ptr %own, i64 0, i64 %time)
  br label %leave
leave:
  ret void
}

; Nothing is outstanding since %time. Does nothing if nothing was.
define void @gpulease_end_work(ptr %pacing, i64 %time) {
entry:
  %counters = call ptr @place(ptr %pacing, i64 8)
  %since = call i64 @word(ptr %counters, i64 152)
  %was.busy = icmp ne i64 %since, 0
  br i1 %was.busy, label %end, label %leave
end:
  ; The begin is cleared before the interval is added: a reader between the two counts it no more than once.
  call void @show(ptr %counters, i64 152, i64 0)
  %took = call i64 @llvm.usub.sat.i64(i64 %time, i64 %since)
  %until = add i64 %since, %took
  call void @show(ptr %counters, i64 184, i64 %since)
  call void @show(ptr %counters, i64 192, i64 %until)
  call void @count(ptr %counters, i64 144, i64 %took)
  %own = call ptr @place(ptr %pacing, i64 48)
  call void @show(ptr %own, i64 0, i64 0)
  %first = call i64 @word(ptr %pacing, i64 64)
  %next = call i64 @word(ptr %pacing, i64 72)
  %has.marks = icmp ne i64 %first, %next
  br i1 %has.marks, label %collect, label %leave
collect:
  ; All marks are reached: the kernels' means are still to be learned from them.
  call void @collect(ptr %pacing, i64 %time)
  br label %leave
leave:
  ret void
}

; Poll whether work is outstanding. Returns 1 if so; 0 if not, and the interval has been added.
define i32 @gpulease_poll_work(ptr %pacing, i64 %time) {
entry:
  %counters = call ptr @place(ptr %pacing, i64 8)
  %since = call i64 @word(ptr %counters, i64 152)
  %was.busy = icmp ne i64 %since, 0
  br i1 %was.busy, label %ask, label %idle
ask:
  %idle.function = call ptr @place(ptr %pacing, i64 24)
  %driver = call ptr @place(ptr %pacing, i64 16)
  %progress = call i32 %idle.function(ptr %driver)
  %is.busy = icmp eq i32 %progress, 1
  br i1 %is.busy, label %busy, label %ended
busy:
  call void @set(ptr %pacing, i64 128, i64 %time)
  ; The next poll: after a 32nd of the interval, 1 to 20 us.
  %age = call i64 @llvm.usub.sat.i64(i64 %time, i64 %since)
  %part = lshr i64 %age, 5
  %at.least = call i64 @llvm.umax.i64(i64 %part, i64 1000)
  %step = call i64 @llvm.umin.i64(i64 %at.least, i64 20000)
  %due = add i64 %time, %step
  call void @set(ptr %pacing, i64 136, i64 %due)
  ret i32 1
ended:
  %seen = call i64 @word(ptr %pacing, i64 128)
  %unseen = call i64 @llvm.usub.sat.i64(i64 %time, i64 %seen)
  %half = lshr i64 %unseen, 1
  %end = sub i64 %time, %half
  call void @gpulease_end_work(ptr %pacing, i64 %end)
  br label %idle
idle:
  ret i32 0
}

; `poll_work` where this process polls for requests, which must not take longer for it: only once it is due.
define internal void @poll_when_due(ptr %pacing, i64 %time) {
entry:
  %counters = call ptr @place(ptr %pacing, i64 8)
  %since = call i64 @word(ptr %counters, i64 152)
  %was.busy = icmp ne i64 %since, 0
  %due = call i64 @word(ptr %pacing, i64 136)
  %is.due = icmp uge i64 %time, %due
  %asks = and i1 %was.busy, %is.due
  br i1 %asks, label %ask, label %leave
ask:
  %ignored = call i32 @gpulease_poll_work(ptr %pacing, i64 %time)
  br label %leave
leave:
  ret void
}

; Whether the poll for requests is to go on until the work ends, instead of a sleep: early in an interval, where a sleep
; would be a large part of it.
define internal i1 @is_young(ptr %pacing, i64 %time) {
  %counters = call ptr @place(ptr %pacing, i64 8)
  %since = call i64 @word(ptr %counters, i64 152)
  %is.busy = icmp ne i64 %since, 0
  %age = call i64 @llvm.usub.sat.i64(i64 %time, i64 %since)
  %linger = call i64 @word(ptr %pacing, i64 200)
  %is.young = icmp ult i64 %age, %linger
  %polls.on = and i1 %is.busy, %is.young
  ret i1 %polls.on
}

; --- the limits ---

; Whether the page has a limit, in force or lapsed.
define internal i1 @is_limited(ptr %pacing) {
  %page = call ptr @place(ptr %pacing, i64 0)
  %allowance = call i64 @shown(ptr %page, i64 3816)
  %bound = call i64 @shown(ptr %page, i64 3824)
  %mask = call i64 @shown(ptr %page, i64 3832)
  %some = or i64 %allowance, %bound
  %any = or i64 %some, %mask
  %is.any = icmp ne i64 %any, 0
  ret i1 %is.any
}

; Find the marks that are reached, and learn from the time that they took.
define internal void @collect(ptr %pacing, i64 %time) {
entry:
  %first = call i64 @word(ptr %pacing, i64 64)
  %next = call i64 @word(ptr %pacing, i64 72)
  %marks = call ptr @place(ptr %pacing, i64 104)
  %reached = call ptr @place(ptr %pacing, i64 40)
  %driver = call ptr @place(ptr %pacing, i64 16)
  br label %each
each:
  %number = phi i64 [ %first, %entry ], [ %number.more, %ended ]
  %sum = phi i64 [ 0, %entry ], [ %sum.more, %ended ]
  %is.more = icmp ne i64 %number, %next
  br i1 %is.more, label %ask, label %asked
ask:
  %progress = call i32 %reached(ptr %driver, i64 %number)
  %is.busy = icmp eq i32 %progress, 1
  br i1 %is.busy, label %asked, label %ended
ended:
  %index = and i64 %number, 63
  %distance = shl i64 %index, 4
  %mark = getelementptr i8, ptr %marks, i64 %distance
  %estimate = call i64 @word(ptr %mark, i64 0)
  %sum.more = add i64 %sum, %estimate
  %number.more = add i64 %number, 1
  br label %each
asked:
  %count = sub i64 %number, %first
  %is.none = icmp eq i64 %count, 0
  br i1 %is.none, label %polled, label %learn
polled:
  call void @set(ptr %pacing, i64 96, i64 %time)
  ; Some is outstanding: an end that is found later is after this.
  call void @set(ptr %pacing, i64 128, i64 %time)
  ret void

learn:
  %running = call i64 @word(ptr %pacing, i64 88)
  %elapsed = call i64 @llvm.usub.sat.i64(i64 %time, i64 %running)
  ; A time is known only as well as the end was polled for. A shorter one than the mean is of use anyway.
  %polled.before = call i64 @word(ptr %pacing, i64 96)
  %unpolled = call i64 @llvm.usub.sat.i64(i64 %time, i64 %polled.before)
  %unpolled.more = shl i64 %unpolled, 2
  %is.sharp = icmp ule i64 %unpolled.more, %elapsed
  %slack = call i64 @word(ptr %pacing, i64 192)
  %slack.more = shl i64 %slack, 2
  %began.sharply = icmp ule i64 %slack.more, %elapsed
  ; Several that ended at once share their time in proportion to their estimates.
  %elapsed.fine = shl i64 %elapsed, 10
  %sum.least = call i64 @llvm.umax.i64(i64 %sum, i64 1)
  %ratio = udiv i64 %elapsed.fine, %sum.least
  %equal = udiv i64 %elapsed, %count
  br label %teach
teach:
  %at = phi i64 [ %first, %learn ], [ %at.more, %taught ]
  %at.index = and i64 %at, 63
  %at.distance = shl i64 %at.index, 4
  %this = getelementptr i8, ptr %marks, i64 %at.distance
  %its.estimate = call i64 @word(ptr %this, i64 0)
  %mean.at = call ptr @place(ptr %this, i64 8)
  %is.unknown = icmp eq i64 %its.estimate, 0
  %unknown = call i64 @word(ptr %pacing, i64 160)
  %one.less = zext i1 %is.unknown to i64
  %unknown.less = sub i64 %unknown, %one.less
  call void @set(ptr %pacing, i64 160, i64 %unknown.less)
  %part.fine = mul i64 %its.estimate, %ratio
  %part = lshr i64 %part.fine, 10
  %taken = select i1 %is.unknown, i64 %equal, i64 %part
  %sample = call i64 @llvm.umax.i64(i64 %taken, i64 1)
  %mean = call i64 @word(ptr %mean.at, i64 0)
  %is.new = icmp eq i64 %mean, 0
  br i1 %is.new, label %store, label %compare
compare:
  %is.shorter = icmp ult i64 %sample, %mean
  br i1 %is.shorter, label %shorter, label %longer
shorter:
  br i1 %began.sharply, label %move.down, label %taught
move.down:
  %less = sub i64 %mean, %sample
  %less.part = lshr i64 %less, 2
  %mean.less = sub i64 %mean, %less.part
  br label %store
longer:
  br i1 %is.sharp, label %move, label %taught
move:
  %double = shl i64 %mean, 1
  %sample.most = call i64 @llvm.umin.i64(i64 %sample, i64 %double)
  %more = sub i64 %sample.most, %mean
  %more.part = lshr i64 %more, 3
  %mean.more = add i64 %mean, %more.part
  br label %store
store:
  %mean.now = phi i64 [ %sample, %teach ], [ %mean.less, %move.down ], [ %mean.more, %move ]
  call void @set(ptr %mean.at, i64 0, i64 %mean.now)
  br label %taught
taught:
  %at.more = add i64 %at, 1
  %is.last = icmp eq i64 %at.more, %number
  br i1 %is.last, label %done, label %teach
done:
  %queued = call i64 @word(ptr %pacing, i64 80)
  %queued.less = sub i64 %queued, %sum
  call void @set(ptr %pacing, i64 80, i64 %queued.less)
  call void @set(ptr %pacing, i64 64, i64 %number)
  call void @set(ptr %pacing, i64 192, i64 %unpolled)
  call void @set(ptr %pacing, i64 88, i64 %time)
  call void @set(ptr %pacing, i64 96, i64 %time)
  ; What has ended just now leaves others outstanding, or the end is found by the next poll: not long after.
  call void @set(ptr %pacing, i64 128, i64 %time)
  ret void
}

; The work that is outstanding by the marks' estimates, ns: of what runs, the rest.
define internal i64 @outstanding(ptr %pacing, i64 %time) {
entry:
  %first = call i64 @word(ptr %pacing, i64 64)
  %next = call i64 @word(ptr %pacing, i64 72)
  %is.none = icmp eq i64 %first, %next
  br i1 %is.none, label %none, label %some
none:
  ret i64 0
some:
  %marks = call ptr @place(ptr %pacing, i64 104)
  %index = and i64 %first, 63
  %distance = shl i64 %index, 4
  %mark = getelementptr i8, ptr %marks, i64 %distance
  %estimate = call i64 @word(ptr %mark, i64 0)
  %running = call i64 @word(ptr %pacing, i64 88)
  %ran = call i64 @llvm.usub.sat.i64(i64 %time, i64 %running)
  %done = call i64 @llvm.umin.i64(i64 %ran, i64 %estimate)
  %queued = call i64 @word(ptr %pacing, i64 80)
  %left = sub i64 %queued, %done
  ret i64 %left
}

; Whether a session of the latency class, to which this one yields, has work outstanding.
define internal i1 @is_yielding(ptr %pacing, i64 %time) {
entry:
  %page = call ptr @place(ptr %pacing, i64 0)
  %mask.all = call i64 @shown(ptr %page, i64 3832)
  %own = call i64 @word(ptr %pacing, i64 144)
  %others = xor i64 %own, -1
  %mask.some = and i64 %mask.all, %others
  %mask = and i64 %mask.some, 255
  %patience = call i64 @shown(ptr %page, i64 3840)
  %words = call ptr @place(ptr %pacing, i64 56)
  br label %each
each:
  %left = phi i64 [ %mask, %entry ], [ %left.less, %next ]
  %is.more = icmp ne i64 %left, 0
  br i1 %is.more, label %read, label %no
read:
  %number = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %distance = shl i64 %number, 3
  %word = call ptr @place(ptr %words, i64 %distance)
  %stamp = call i64 @shown(ptr %word, i64 0)
  %is.idle = icmp eq i64 %stamp, 0
  br i1 %is.idle, label %next, label %age
age:
  ; A stamp was written just now, or by a worker that lies, if it is later than the clock was read.
  %ahead = call i64 @llvm.usub.sat.i64(i64 %stamp, i64 %time)
  %is.false = icmp ugt i64 %ahead, 1000000
  %old = call i64 @llvm.usub.sat.i64(i64 %time, i64 %stamp)
  %is.long = icmp ugt i64 %old, %patience
  %is.void = or i1 %is.false, %is.long
  br i1 %is.void, label %next, label %yes
next:
  %less = sub i64 %left, 1
  %left.less = and i64 %left, %less
  br label %each
yes:
  ret i1 true
no:
  ret i1 false
}

declare i64 @llvm.cttz.i64(i64, i1)

; Whether work of some ns, by its mean, has to wait for the session's turn, while %left ns are outstanding. 0: no. 1: for
; a turn that begins within TURN_SPIN_NS. 2: for a later one.
define internal i32 @turn_reason(ptr %pacing, i64 %mean, i64 %left, i64 %time) {
entry:
  %page = call ptr @place(ptr %pacing, i64 0)
  %turn = call i64 @shown(ptr %page, i64 3864)
  %has.none = icmp eq i64 %turn, 0
  br i1 %has.none, label %go, label %take
take:
  %begin = call i64 @shown(ptr %page, i64 3856)
  %period.shown = call i64 @shown(ptr %page, i64 3872)
  %period = call i64 @llvm.umax.i64(i64 %period.shown, i64 1)
  %is.early = icmp ult i64 %time, %begin
  %before = sub i64 %begin, %time
  %since = sub i64 %time, %begin
  %phase = urem i64 %since, %period
  %rest = sub i64 %period, %phase
  %to.turn = select i1 %is.early, i64 %before, i64 %rest
  %is.within = icmp ult i64 %phase, %turn
  %is.late = xor i1 %is.early, true
  %is.turn = and i1 %is.within, %is.late
  br i1 %is.turn, label %fit, label %wait
fit:
  ; The middle of short work is to be within the turn: what overruns it, and what is left of it, are equal on average. For
  ; longer work that would leave too much idle, so it begins anywhere in the turn; the account has what overruns.
  %half = lshr i64 %mean, 1
  %is.long = icmp ugt i64 %half, 250000
  %part = select i1 %is.long, i64 0, i64 %half
  %need = add i64 %left, %part
  %remains = sub i64 %turn, %phase
  %fits = icmp ult i64 %need, %remains
  br i1 %fits, label %go, label %wait
wait:
  ; TURN_SPIN_NS
  %is.soon = icmp ult i64 %to.turn, 800000
  %reason = select i1 %is.soon, i32 1, i32 2
  ret i32 %reason
go:
  ret i32 0
}

; Whether the next work has to wait. 0: no. 1: for something that takes microseconds. 2: for the allowance, or a turn.
define internal i32 @wait_reason(ptr %pacing, ptr %mean.at, i64 %time) {
entry:
  %page = call ptr @place(ptr %pacing, i64 0)
  %until = call i64 @shown(ptr %page, i64 3848)
  %has.lapsed = icmp uge i64 %time, %until
  %first = call i64 @word(ptr %pacing, i64 64)
  %next = call i64 @word(ptr %pacing, i64 72)
  %count = sub i64 %next, %first
  ; The driver has so many marks.
  %is.full = icmp uge i64 %count, 64
  br i1 %is.full, label %short, label %in.force
in.force:
  br i1 %has.lapsed, label %go, label %allowance
allowance:
  %left = call i64 @outstanding(ptr %pacing, i64 %time)
  %allowed = call i64 @shown(ptr %page, i64 3816)
  %is.allowed = icmp eq i64 %allowed, 0
  br i1 %is.allowed, label %turn, label %used
used:
  %counters = call ptr @place(ptr %pacing, i64 8)
  %busy = call i64 @word(ptr %counters, i64 144)
  %since = call i64 @word(ptr %counters, i64 152)
  %is.idle = icmp eq i64 %since, 0
  %age = call i64 @llvm.usub.sat.i64(i64 %time, i64 %since)
  %present = select i1 %is.idle, i64 0, i64 %age
  %so.far = add i64 %busy, %present
  %total = add i64 %so.far, %left
  %is.spent = icmp uge i64 %total, %allowed
  br i1 %is.spent, label %long, label %turn
turn:
  %mean = call i64 @word(ptr %mean.at, i64 0)
  %turn.reason = call i32 @turn_reason(ptr %pacing, i64 %mean, i64 %left, i64 %time)
  switch i32 %turn.reason, label %long [ i32 0, label %bound
                                         i32 1, label %short ]
bound:
  %most = call i64 @shown(ptr %page, i64 3824)
  %is.unbounded = icmp eq i64 %most, 0
  %is.empty = icmp eq i64 %count, 0
  %is.free = or i1 %is.unbounded, %is.empty
  br i1 %is.free, label %latency, label %measure
measure:
  ; What was never measured runs alone.
  %is.new = icmp eq i64 %mean, 0
  %unknown = call i64 @word(ptr %pacing, i64 160)
  %has.unknown = icmp ne i64 %unknown, 0
  %is.over = icmp ugt i64 %left, %most
  %either = or i1 %is.new, %has.unknown
  %any = or i1 %either, %is.over
  br i1 %any, label %short, label %latency
latency:
  %yields = call i1 @is_yielding(ptr %pacing, i64 %time)
  br i1 %yields, label %short, label %go
go:
  ret i32 0
short:
  ret i32 1
long:
  ret i32 2
}

; The time for which work was held back ends, if any was.
define void @gpulease_release_work(ptr %pacing, i64 %time) {
entry:
  %counters = call ptr @place(ptr %pacing, i64 8)
  %since = call i64 @word(ptr %counters, i64 168)
  %was.held = icmp ne i64 %since, 0
  br i1 %was.held, label %end, label %leave
end:
  call void @show(ptr %counters, i64 168, i64 0)
  %took = call i64 @llvm.usub.sat.i64(i64 %time, i64 %since)
  call void @count(ptr %counters, i64 160, i64 %took)
  br label %leave
leave:
  ret void
}

; Hold the next work back for as long as the limits say, but not long in one call. %mean.at is the address of the
; running mean time of such work. Returns 0 if it may begin; 1 if it is to be held on, or the lease is over: Python
; finds out, and sleeps in between.
define i32 @gpulease_hold_work(ptr %pacing, ptr %mean.at) {
entry:
  %began = call i64 @now()
  %spin = call i64 @word(ptr %pacing, i64 112)
  %until = add i64 %began, %spin
  %page = call ptr @place(ptr %pacing, i64 0)
  %counters = call ptr @place(ptr %pacing, i64 8)
  ; The driver's marks are made when they are first needed.
  %ready = call i64 @word(ptr %pacing, i64 152)
  %is.ready = icmp ne i64 %ready, 0
  br i1 %is.ready, label %begin, label %leave
begin:
  ; What was begun without limits has no marks: one mark follows all of it.
  %marked = call i64 @word(ptr %pacing, i64 120)
  %is.marked = icmp ne i64 %marked, 0
  br i1 %is.marked, label %look, label %mark.rest
mark.rest:
  call void @set(ptr %pacing, i64 120, i64 1)
  %busy.since = call i64 @word(ptr %counters, i64 152)
  %is.busy = icmp ne i64 %busy.since, 0
  br i1 %is.busy, label %put.rest, label %look
put.rest:
  call void @set(ptr %pacing, i64 184, i64 %began)
  %rest.mean = getelementptr i8, ptr %pacing, i64 168
  store i64 0, ptr %rest.mean
  call void @gpulease_mark_work(ptr %pacing, ptr %rest.mean)
  br label %look

look:
  %time = phi i64 [ %began, %begin ], [ %began, %mark.rest ], [ %began, %put.rest ], [ %again.time, %again ]
  %word = call i64 @shown(ptr %page, i64 0)
  %is.over = icmp ne i64 %word, 0
  br i1 %is.over, label %leave, label %deadline
deadline:
  %ends = call i64 @shown(ptr %page, i64 8)
  %is.late = icmp uge i64 %time, %ends
  br i1 %is.late, label %leave, label %marks
marks:
  %first = call i64 @word(ptr %pacing, i64 64)
  %next = call i64 @word(ptr %pacing, i64 72)
  %has.marks = icmp ne i64 %first, %next
  br i1 %has.marks, label %some.marks, label %ask
some.marks:
  call void @collect(ptr %pacing, i64 %time)
  br label %ask
ask:
  %reason = call i32 @wait_reason(ptr %pacing, ptr %mean.at, i64 %time)
  %may.go = icmp eq i32 %reason, 0
  br i1 %may.go, label %go, label %held
go:
  call void @gpulease_release_work(ptr %pacing, i64 %time)
  call void @set(ptr %pacing, i64 184, i64 %time)
  ret i32 0
held:
  %held.since = call i64 @word(ptr %counters, i64 168)
  %is.first = icmp eq i64 %held.since, 0
  br i1 %is.first, label %note, label %account
note:
  call void @show(ptr %counters, i64 168, i64 %time)
  br label %account
account:
  ; Once nothing is outstanding any more, the busy time stands still.
  %first.now = call i64 @word(ptr %pacing, i64 64)
  %is.drained = icmp eq i64 %first.now, %next
  br i1 %is.drained, label %drained, label %patience
drained:
  %still = call i32 @gpulease_poll_work(ptr %pacing, i64 %time)
  br label %patience
patience:
  %is.spent = icmp eq i32 %reason, 2
  %is.long = icmp uge i64 %time, %until
  %gives.up = or i1 %is.spent, %is.long
  br i1 %gives.up, label %leave, label %again
again:
  %again.time = call i64 @now()
  br label %look
leave:
  ret i32 1
}

; Put a mark after the work that was just begun, of the kind with this mean.
define void @gpulease_mark_work(ptr %pacing, ptr %mean.at) {
entry:
  %first = call i64 @word(ptr %pacing, i64 64)
  %next = call i64 @word(ptr %pacing, i64 72)
  %mark.function = call ptr @place(ptr %pacing, i64 32)
  %driver = call ptr @place(ptr %pacing, i64 16)
  %count = sub i64 %next, %first
  %has.room = icmp ult i64 %count, 64
  br i1 %has.room, label %put, label %unmarked
put:
  %refused = call i32 %mark.function(ptr %driver, i64 %next)
  %is.put = icmp eq i32 %refused, 0
  br i1 %is.put, label %keep, label %unmarked
unmarked:
  call void @set(ptr %pacing, i64 120, i64 0)
  ret void
keep:
  %estimate = call i64 @word(ptr %mean.at, i64 0)
  %marks = call ptr @place(ptr %pacing, i64 104)
  %index = and i64 %next, 63
  %distance = shl i64 %index, 4
  %mark = getelementptr i8, ptr %marks, i64 %distance
  call void @set(ptr %mark, i64 0, i64 %estimate)
  %mark.mean = getelementptr i8, ptr %mark, i64 8
  store ptr %mean.at, ptr %mark.mean
  %queued = call i64 @word(ptr %pacing, i64 80)
  %queued.more = add i64 %queued, %estimate
  call void @set(ptr %pacing, i64 80, i64 %queued.more)
  %is.unknown = icmp eq i64 %estimate, 0
  %one = zext i1 %is.unknown to i64
  %unknown = call i64 @word(ptr %pacing, i64 160)
  %unknown.more = add i64 %unknown, %one
  call void @set(ptr %pacing, i64 160, i64 %unknown.more)
  %next.more = add i64 %next, 1
  call void @set(ptr %pacing, i64 72, i64 %next.more)
  %was.empty = icmp eq i64 %count, 0
  br i1 %was.empty, label %start, label %leave
start:
  ; It may run since before the driver returned.
  %time = call i64 @word(ptr %pacing, i64 184)
  call void @set(ptr %pacing, i64 88, i64 %time)
  call void @set(ptr %pacing, i64 96, i64 %time)
  call void @set(ptr %pacing, i64 192, i64 0)
  br label %leave
leave:
  ret void
}
