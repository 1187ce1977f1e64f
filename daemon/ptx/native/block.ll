; Which threads of a block continue when they wait for one another: called when every thread waits or has ended.
;
; A frame (structures.py) has: state 4, kind 8, members 12, flag 16, line 20, place 24, group 28, ballot 32, then from 40 the
; words shown, and after them the words as they were at the exchange.
; States: 0 ready, 1 yielded, 2 at a barrier, 3 in an exchange, 4 in a gathering, -1 ended.

declare i32 @llvm.umin.i32(i32, i32)
declare i32 @llvm.cttz.i32(i32, i1)

; The lanes in a state, as bits.
define internal i32 @lanes_in(ptr %frames, i32 %lanes, i64 %stride, i32 %wanted) {
entry:
  br label %each
each:
  %lane = phi i32 [ 0, %entry ], [ %next, %each ]
  %frame = phi ptr [ %frames, %entry ], [ %frame.next, %each ]
  %found = phi i32 [ 0, %entry ], [ %found.next, %each ]
  %state.at = getelementptr i8, ptr %frame, i64 4
  %state = load i32, ptr %state.at
  %is = icmp eq i32 %state, %wanted
  %bit = shl i32 1, %lane
  %added = select i1 %is, i32 %bit, i32 0
  %found.next = or i32 %found, %added
  %frame.next = getelementptr i8, ptr %frame, i64 %stride
  %next = add i32 %lane, 1
  %more = icmp ult i32 %next, %lanes
  br i1 %more, label %each, label %done
done:
  ret i32 %found.next
}

; Of the waiting lanes those with the kind and members of a given one; and which of them have their flag set.
define internal { i32, i32 } @group_of(ptr %frames, i64 %stride, i32 %waiting, i32 %kind, i32 %members) {
entry:
  br label %each
each:
  %left = phi i32 [ %waiting, %entry ], [ %left.next, %each ]
  %group = phi i32 [ 0, %entry ], [ %group.next, %each ]
  %ballot = phi i32 [ 0, %entry ], [ %ballot.next, %each ]
  %lane = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %lane.wide = zext i32 %lane to i64
  %distance = mul i64 %lane.wide, %stride
  %frame = getelementptr i8, ptr %frames, i64 %distance
  %kind.at = getelementptr i8, ptr %frame, i64 8
  %its.kind = load i32, ptr %kind.at
  %members.at = getelementptr i8, ptr %frame, i64 12
  %its.members = load i32, ptr %members.at
  %flag.at = getelementptr i8, ptr %frame, i64 16
  %flag = load i32, ptr %flag.at
  %same.kind = icmp eq i32 %its.kind, %kind
  %same.members = icmp eq i32 %its.members, %members
  %same = and i1 %same.kind, %same.members
  %bit = shl i32 1, %lane
  %added = select i1 %same, i32 %bit, i32 0
  %group.next = or i32 %group, %added
  %is.set = icmp ne i32 %flag, 0
  %voted = select i1 %is.set, i32 %added, i32 0
  %ballot.next = or i32 %ballot, %voted
  %less = sub i32 %left, 1
  %left.next = and i32 %left, %less
  %more = icmp ne i32 %left.next, 0
  br i1 %more, label %each, label %done
done:
  %pair = insertvalue { i32, i32 } poison, i32 %group.next, 0
  %both = insertvalue { i32, i32 } %pair, i32 %ballot.next, 1
  ret { i32, i32 } %both
}

; Let a group go on: each gets to know the group and the ballot, and what it showed is kept for the others to read
; while it may already show something else.
define internal void @let_go(ptr %frames, i64 %stride, i64 %words, i32 %group, i32 %ballot) {
entry:
  %bytes = shl i64 %words, 3
  br label %each
each:
  %left = phi i32 [ %group, %entry ], [ %left.next, %copied ]
  %lane = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %lane.wide = zext i32 %lane to i64
  %distance = mul i64 %lane.wide, %stride
  %frame = getelementptr i8, ptr %frames, i64 %distance
  %state.at = getelementptr i8, ptr %frame, i64 4
  store i32 0, ptr %state.at
  %group.at = getelementptr i8, ptr %frame, i64 28
  store i32 %group, ptr %group.at
  %ballot.at = getelementptr i8, ptr %frame, i64 32
  store i32 %ballot, ptr %ballot.at
  %shown = getelementptr i8, ptr %frame, i64 40
  %kept = getelementptr i8, ptr %shown, i64 %bytes
  br label %copy
copy:
  %offset = phi i64 [ 0, %each ], [ %offset.next, %word ]
  %is.copied = icmp uge i64 %offset, %bytes
  br i1 %is.copied, label %copied, label %word
word:
  %from = getelementptr i8, ptr %shown, i64 %offset
  %to = getelementptr i8, ptr %kept, i64 %offset
  %value = load i64, ptr %from
  store i64 %value, ptr %to
  %offset.next = add i64 %offset, 8
  br label %copy
copied:
  %less = sub i32 %left, 1
  %left.next = and i32 %left, %less
  %more = icmp ne i32 %left.next, 0
  br i1 %more, label %each, label %done
done:
  ret void
}

; What is usual needs one look at each lane: all that have not ended are in the same exchange, and its members. Gives
; the lanes that ended, those in an exchange, the ballot of those, and whether it is so.
define internal { i32, i32, i32, i1 } @survey(ptr %frames, i32 %lanes, i64 %stride) {
entry:
  br label %each
each:
  %lane = phi i32 [ 0, %entry ], [ %next, %looked ]
  %frame = phi ptr [ %frames, %entry ], [ %frame.next, %looked ]
  %ended = phi i32 [ 0, %entry ], [ %ended.next, %looked ]
  %waiting = phi i32 [ 0, %entry ], [ %waiting.next, %looked ]
  %ballot = phi i32 [ 0, %entry ], [ %ballot.next, %looked ]
  %differs = phi i32 [ 0, %entry ], [ %differs.next, %looked ]
  %kind = phi i32 [ 0, %entry ], [ %kind.next, %looked ]
  %members = phi i32 [ 0, %entry ], [ %members.next, %looked ]
  %bit = shl i32 1, %lane
  %state.at = getelementptr i8, ptr %frame, i64 4
  %state = load i32, ptr %state.at
  switch i32 %state, label %looked [ i32 3, label %waits
                                     i32 -1, label %gone ]
waits:
  %kind.at = getelementptr i8, ptr %frame, i64 8
  %its.kind = load i32, ptr %kind.at
  %members.at = getelementptr i8, ptr %frame, i64 12
  %its.members = load i32, ptr %members.at
  %flag.at = getelementptr i8, ptr %frame, i64 16
  %flag = load i32, ptr %flag.at
  %waiting.more = or i32 %waiting, %bit
  %is.set = icmp ne i32 %flag, 0
  %voted = select i1 %is.set, i32 %bit, i32 0
  %ballot.more = or i32 %ballot, %voted
  %is.first = icmp eq i32 %waiting, 0
  %kind.first = select i1 %is.first, i32 %its.kind, i32 %kind
  %members.first = select i1 %is.first, i32 %its.members, i32 %members
  %kind.differs = xor i32 %kind.first, %its.kind
  %members.differ = xor i32 %members.first, %its.members
  %new.differs = or i32 %kind.differs, %members.differ
  %differs.more = or i32 %differs, %new.differs
  br label %looked
gone:
  %ended.more = or i32 %ended, %bit
  br label %looked
looked:
  %ended.next = phi i32 [ %ended, %each ], [ %ended, %waits ], [ %ended.more, %gone ]
  %waiting.next = phi i32 [ %waiting, %each ], [ %waiting.more, %waits ], [ %waiting, %gone ]
  %ballot.next = phi i32 [ %ballot, %each ], [ %ballot.more, %waits ], [ %ballot, %gone ]
  %differs.next = phi i32 [ %differs, %each ], [ %differs.more, %waits ], [ %differs, %gone ]
  %kind.next = phi i32 [ %kind, %each ], [ %kind.first, %waits ], [ %kind, %gone ]
  %members.next = phi i32 [ %members, %each ], [ %members.first, %waits ], [ %members, %gone ]
  %frame.next = getelementptr i8, ptr %frame, i64 %stride
  %next = add i32 %lane, 1
  %more = icmp ult i32 %next, %lanes
  br i1 %more, label %each, label %done
done:
  %spare = sub i32 32, %lanes
  %there = lshr i32 -1, %spare
  %not.ended = xor i32 %ended.next, -1
  %live = and i32 %there, %not.ended
  %needed = and i32 %members.next, %live
  %is.same = icmp eq i32 %differs.next, 0
  %is.all = icmp eq i32 %waiting.next, %needed
  %is.any = icmp ne i32 %waiting.next, 0
  %is.full = and i1 %is.same, %is.all
  %is.usual = and i1 %is.full, %is.any
  %one = insertvalue { i32, i32, i32, i1 } poison, i32 %ended.next, 0
  %two = insertvalue { i32, i32, i32, i1 } %one, i32 %waiting.next, 1
  %three = insertvalue { i32, i32, i32, i1 } %two, i32 %ballot.next, 2
  %four = insertvalue { i32, i32, i32, i1 } %three, i1 %is.usual, 3
  ret { i32, i32, i32, i1 } %four
}

; Let those threads of a warp continue that are in a complete exchange: all members that have not ended are there. If
; there are none, those in a gathering continue with whoever came to the same place. Returns whether any continues.
define i1 @gpulease_release_warp(ptr %frames, i32 %lanes, i64 %stride, i64 %words) {
entry:
  %survey = call { i32, i32, i32, i1 } @survey(ptr %frames, i32 %lanes, i64 %stride)
  %ended = extractvalue { i32, i32, i32, i1 } %survey, 0
  %waiting = extractvalue { i32, i32, i32, i1 } %survey, 1
  %is.usual = extractvalue { i32, i32, i32, i1 } %survey, 3
  br i1 %is.usual, label %usual, label %unusual
usual:
  %usual.ballot = extractvalue { i32, i32, i32, i1 } %survey, 2
  call void @let_go(ptr %frames, i64 %stride, i64 %words, i32 %waiting, i32 %usual.ballot)
  ret i1 true
unusual:
  %spare = sub i32 32, %lanes
  %there = lshr i32 -1, %spare
  %not.ended = xor i32 %ended, -1
  %live = and i32 %there, %not.ended
  br label %look
look:
  %mode = phi i32 [ 3, %unusual ], [ 4, %gather ]
  %all = phi i32 [ %waiting, %unusual ], [ %gathering, %gather ]
  br label %each
each:
  %left = phi i32 [ %all, %look ], [ %left.next, %considered ]
  %released = phi i1 [ false, %look ], [ %released.next, %considered ]
  %more = icmp ne i32 %left, 0
  br i1 %more, label %consider, label %looked
consider:
  %lane = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %lane.wide = zext i32 %lane to i64
  %distance = mul i64 %lane.wide, %stride
  %frame = getelementptr i8, ptr %frames, i64 %distance
  %kind.at = getelementptr i8, ptr %frame, i64 8
  %kind = load i32, ptr %kind.at
  %members.at = getelementptr i8, ptr %frame, i64 12
  %members = load i32, ptr %members.at
  %found = call { i32, i32 } @group_of(ptr %frames, i64 %stride, i32 %left, i32 %kind, i32 %members)
  %group = extractvalue { i32, i32 } %found, 0
  %ballot = extractvalue { i32, i32 } %found, 1
  %needed = and i32 %members, %live
  %is.complete = icmp eq i32 %group, %needed
  %is.gathering = icmp eq i32 %mode, 4
  %goes.on = or i1 %is.complete, %is.gathering
  br i1 %goes.on, label %release, label %considered
release:
  call void @let_go(ptr %frames, i64 %stride, i64 %words, i32 %group, i32 %ballot)
  br label %considered
considered:
  %released.next = or i1 %released, %goes.on
  %rest = xor i32 %group, -1
  %left.next = and i32 %left, %rest
  br label %each
looked:
  %is.last = icmp eq i32 %mode, 4
  %is.done = or i1 %released, %is.last
  br i1 %is.done, label %done, label %gather
gather:
  %gathering = call i32 @lanes_in(ptr %frames, i32 %lanes, i64 %stride, i32 4)
  br label %look
done:
  ret i1 %released
}

; One barrier while the block is looked at: threads that wait, those of them with their flag set, the count and kind
; they gave, whether they differ in that, lanes of their warps that are not there, and whether it is complete.
%barrier = type { i32, i32, i32, i32, i32, i32, i32 }

; Enter a thread that waits at a barrier. Returns the barrier's bit.
define internal i32 @enter(ptr %barriers, ptr %frame) {
entry:
  %kind.at = getelementptr i8, ptr %frame, i64 8
  %kind = load i32, ptr %kind.at
  %members.at = getelementptr i8, ptr %frame, i64 12
  %members = load i32, ptr %members.at
  %flag.at = getelementptr i8, ptr %frame, i64 16
  %flag = load i32, ptr %flag.at
  %number = and i32 %kind, 15
  %barrier = getelementptr %barrier, ptr %barriers, i32 %number
  %trues.at = getelementptr %barrier, ptr %barrier, i32 0, i32 1
  %count.at = getelementptr %barrier, ptr %barrier, i32 0, i32 2
  %its.kind.at = getelementptr %barrier, ptr %barrier, i32 0, i32 3
  %differ.at = getelementptr %barrier, ptr %barrier, i32 0, i32 4
  %waiting = load i32, ptr %barrier
  %is.first = icmp eq i32 %waiting, 0
  br i1 %is.first, label %first, label %later
first:
  store i32 %members, ptr %count.at
  store i32 %kind, ptr %its.kind.at
  br label %add
later:
  %count = load i32, ptr %count.at
  %its.kind = load i32, ptr %its.kind.at
  %other.count = icmp ne i32 %count, %members
  %other.kind = icmp ne i32 %its.kind, %kind
  %other = or i1 %other.count, %other.kind
  %other.wide = zext i1 %other to i32
  %differ = load i32, ptr %differ.at
  %differ.next = or i32 %differ, %other.wide
  store i32 %differ.next, ptr %differ.at
  br label %add
add:
  %waiting.next = add i32 %waiting, 1
  store i32 %waiting.next, ptr %barrier
  %trues = load i32, ptr %trues.at
  %trues.next = add i32 %trues, %flag
  store i32 %trues.next, ptr %trues.at
  %bit = shl i32 1, %number
  ret i32 %bit
}

; A barrier counts whole warps: lanes that ended or never were count for each barrier the rest of their warp waits at.
define internal void @add_absent(ptr %barriers, i32 %seen, i32 %absent) {
entry:
  br label %each
each:
  %left = phi i32 [ %seen, %entry ], [ %left.next, %add ]
  %more = icmp ne i32 %left, 0
  br i1 %more, label %add, label %done
add:
  %number = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %place = getelementptr %barrier, ptr %barriers, i32 %number, i32 5
  %before = load i32, ptr %place
  %after = add i32 %before, %absent
  store i32 %after, ptr %place
  %less = sub i32 %left, 1
  %left.next = and i32 %left, %less
  br label %each
done:
  ret void
}

; Decide which barriers are complete; those that are start again empty.
define internal void @decide(ptr %barriers, ptr %board, i32 %live) {
entry:
  br label %each
each:
  %number = phi i32 [ 0, %entry ], [ %next, %decided ]
  %barrier = getelementptr %barrier, ptr %barriers, i32 %number
  %waiting = load i32, ptr %barrier
  %count.at = getelementptr %barrier, ptr %barrier, i32 0, i32 2
  %count = load i32, ptr %count.at
  %differ.at = getelementptr %barrier, ptr %barrier, i32 0, i32 4
  %differ = load i32, ptr %differ.at
  %absent.at = getelementptr %barrier, ptr %barrier, i32 0, i32 5
  %absent = load i32, ptr %absent.at
  %arrived.at = getelementptr i32, ptr %board, i32 %number
  %arrived = load i32, ptr %arrived.at
  %present = add i32 %waiting, %arrived
  %counted = add i32 %present, %absent
  %is.for.all = icmp eq i32 %count, 0
  %have = select i1 %is.for.all, i32 %present, i32 %counted
  %need = select i1 %is.for.all, i32 %live, i32 %count
  %is.full = icmp eq i32 %have, %need
  %is.used = icmp ne i32 %waiting, 0
  %is.agreed = icmp eq i32 %differ, 0
  %usable = and i1 %is.used, %is.agreed
  %is.open = and i1 %usable, %is.full
  br i1 %is.open, label %open, label %decided
open:
  %open.at = getelementptr %barrier, ptr %barrier, i32 0, i32 6
  store i32 1, ptr %open.at
  store i32 0, ptr %arrived.at
  br label %decided
decided:
  %next = add i32 %number, 1
  %more = icmp ult i32 %next, 16
  br i1 %more, label %each, label %done
done:
  ret void
}

; Let a thread go on if its barrier is complete. Says whether it is.
define internal i1 @pass(ptr %barriers, ptr %frame) {
entry:
  %kind.at = getelementptr i8, ptr %frame, i64 8
  %kind = load i32, ptr %kind.at
  %number = and i32 %kind, 15
  %barrier = getelementptr %barrier, ptr %barriers, i32 %number
  %open.at = getelementptr %barrier, ptr %barrier, i32 0, i32 6
  %open = load i32, ptr %open.at
  %is.open = icmp ne i32 %open, 0
  br i1 %is.open, label %go, label %done
go:
  %waiting = load i32, ptr %barrier
  %trues.at = getelementptr %barrier, ptr %barrier, i32 0, i32 1
  %trues = load i32, ptr %trues.at
  %state.at = getelementptr i8, ptr %frame, i64 4
  store i32 0, ptr %state.at
  %group.at = getelementptr i8, ptr %frame, i64 28
  store i32 %waiting, ptr %group.at
  %ballot.at = getelementptr i8, ptr %frame, i64 32
  store i32 %trues, ptr %ballot.at
  br label %done
done:
  ret i1 %is.open
}

; Settle a block in which no thread is ready: open complete barriers, let those that yielded continue. Returns 0
; if all have ended, 1 if some continue, -1 if only those do that yielded. Otherwise none ever will, and it returns 2 plus
; the number of a thread that waits.
define i32 @gpulease_settle_block(ptr %board, ptr %frames, i32 %threads, i64 %stride) {
entry:
  %barriers = alloca [16 x %barrier]
  store [16 x %barrier] zeroinitializer, ptr %barriers
  br label %warp
warp:
  %start = phi i32 [ 0, %entry ], [ %start.next, %warp.done ]
  %warp.frames = phi ptr [ %frames, %entry ], [ %frame.next, %warp.done ]
  %live = phi i32 [ 0, %entry ], [ %live.all, %warp.done ]
  %ready = phi i1 [ false, %entry ], [ %ready.next, %warp.done ]
  %left.threads = sub i32 %threads, %start
  %lanes = call i32 @llvm.umin.i32(i32 %left.threads, i32 32)
  br label %lane
lane:
  %number = phi i32 [ 0, %warp ], [ %number.next, %lane.done ]
  %frame = phi ptr [ %warp.frames, %warp ], [ %frame.next, %lane.done ]
  %seen = phi i32 [ 0, %warp ], [ %seen.next, %lane.done ]
  %ended = phi i32 [ 0, %warp ], [ %ended.next, %lane.done ]
  %ready.lane = phi i1 [ %ready, %warp ], [ %ready.next, %lane.done ]
  %state.at = getelementptr i8, ptr %frame, i64 4
  %state = load i32, ptr %state.at
  switch i32 %state, label %lane.done [ i32 1, label %yielded
                                        i32 2, label %waits
                                        i32 -1, label %gone ]
yielded:
  store i32 0, ptr %state.at
  br label %lane.done
waits:
  %bit = call i32 @enter(ptr %barriers, ptr %frame)
  br label %lane.done
gone:
  br label %lane.done
lane.done:
  %new.ready = phi i1 [ false, %lane ], [ true, %yielded ], [ false, %waits ], [ false, %gone ]
  %new.seen = phi i32 [ 0, %lane ], [ 0, %yielded ], [ %bit, %waits ], [ 0, %gone ]
  %new.ended = phi i32 [ 0, %lane ], [ 0, %yielded ], [ 0, %waits ], [ 1, %gone ]
  %ready.next = or i1 %ready.lane, %new.ready
  %seen.next = or i32 %seen, %new.seen
  %ended.next = add i32 %ended, %new.ended
  %frame.next = getelementptr i8, ptr %frame, i64 %stride
  %number.next = add i32 %number, 1
  %more.lanes = icmp ult i32 %number.next, %lanes
  br i1 %more.lanes, label %lane, label %warp.done
warp.done:
  %live.here = sub i32 %lanes, %ended.next
  %live.all = add i32 %live, %live.here
  %absent = sub i32 32, %live.here
  call void @add_absent(ptr %barriers, i32 %seen.next, i32 %absent)
  %start.next = add i32 %start, 32
  %more.warps = icmp ult i32 %start.next, %threads
  br i1 %more.warps, label %warp, label %counted
counted:
  call void @decide(ptr %barriers, ptr %board, i32 %live.all)
  br label %each
each:
  %index = phi i32 [ 0, %counted ], [ %index.next, %each.done ]
  %its.frame = phi ptr [ %frames, %counted ], [ %its.next, %each.done ]
  %goes = phi i1 [ false, %counted ], [ %goes.next, %each.done ]
  %stuck = phi i32 [ 0, %counted ], [ %stuck.next, %each.done ]
  %its.state.at = getelementptr i8, ptr %its.frame, i64 4
  %its.state = load i32, ptr %its.state.at
  %at.barrier = icmp eq i32 %its.state, 2
  %is.stuck = icmp sge i32 %its.state, 2
  br i1 %at.barrier, label %try, label %each.done
try:
  %passed = call i1 @pass(ptr %barriers, ptr %its.frame)
  br label %each.done
each.done:
  %new.goes = phi i1 [ false, %each ], [ %passed, %try ]
  %goes.next = or i1 %goes, %new.goes
  %answer = add i32 %index, 2
  %is.none = icmp eq i32 %stuck, 0
  %is.new = and i1 %is.none, %is.stuck
  %stuck.next = select i1 %is.new, i32 %answer, i32 %stuck
  %its.next = getelementptr i8, ptr %its.frame, i64 %stride
  %index.next = add i32 %index, 1
  %more = icmp ult i32 %index.next, %threads
  br i1 %more, label %each, label %end
end:
  %otherwise = select i1 %ready.next, i32 -1, i32 %stuck.next
  %result = select i1 %goes.next, i32 1, i32 %otherwise
  ret i32 %result
}

; Of a group's lanes those that showed a word. `offset` is where frames keep it.
define i32 @gpulease_same_words(ptr %frames, i64 %stride, i32 %group, i64 %offset, i64 %word) {
entry:
  %first = getelementptr i8, ptr %frames, i64 %offset
  br label %each
each:
  %left = phi i32 [ %group, %entry ], [ %left.next, %each ]
  %same = phi i32 [ 0, %entry ], [ %same.next, %each ]
  %lane = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %lane.wide = zext i32 %lane to i64
  %distance = mul i64 %lane.wide, %stride
  %place = getelementptr i8, ptr %first, i64 %distance
  %shown = load i64, ptr %place
  %is.same = icmp eq i64 %shown, %word
  %bit = shl i32 1, %lane
  %added = select i1 %is.same, i32 %bit, i32 0
  %same.next = or i32 %same, %added
  %less = sub i32 %left, 1
  %left.next = and i32 %left, %less
  %more = icmp ne i32 %left.next, 0
  br i1 %more, label %each, label %done
done:
  ret i32 %same.next
}

; The words a group's lanes showed, combined: 0 add, 1 and, 2 or, 3 xor, 4 umin, 5 umax, 6 smin, 7 smax.
define i32 @gpulease_reduce_words(ptr %frames, i64 %stride, i32 %group, i64 %offset, i32 %operation) {
entry:
  %first = getelementptr i8, ptr %frames, i64 %offset
  br label %each
each:
  %left = phi i32 [ %group, %entry ], [ %left.next, %combined ]
  %sofar = phi i32 [ 0, %entry ], [ %result, %combined ]
  %lane = call i32 @llvm.cttz.i32(i32 %left, i1 true)
  %lane.wide = zext i32 %lane to i64
  %distance = mul i64 %lane.wide, %stride
  %place = getelementptr i8, ptr %first, i64 %distance
  %word = load i32, ptr %place
  %is.first = icmp eq i32 %left, %group
  br i1 %is.first, label %combined, label %combine
combine:
  switch i32 %operation, label %add [ i32 1, label %and
                                      i32 2, label %or
                                      i32 3, label %xor
                                      i32 4, label %umin
                                      i32 5, label %umax
                                      i32 6, label %smin
                                      i32 7, label %smax ]
add:
  %added = add i32 %sofar, %word
  br label %combined
and:
  %anded = and i32 %sofar, %word
  br label %combined
or:
  %ored = or i32 %sofar, %word
  br label %combined
xor:
  %xored = xor i32 %sofar, %word
  br label %combined
umin:
  %is.below = icmp ult i32 %word, %sofar
  %lowest = select i1 %is.below, i32 %word, i32 %sofar
  br label %combined
umax:
  %is.above = icmp ugt i32 %word, %sofar
  %highest = select i1 %is.above, i32 %word, i32 %sofar
  br label %combined
smin:
  %is.less = icmp slt i32 %word, %sofar
  %least = select i1 %is.less, i32 %word, i32 %sofar
  br label %combined
smax:
  %is.greater = icmp sgt i32 %word, %sofar
  %greatest = select i1 %is.greater, i32 %word, i32 %sofar
  br label %combined
combined:
  %result = phi i32 [ %word, %each ], [ %added, %add ], [ %anded, %and ], [ %ored, %or ], [ %xored, %xor ],
                    [ %lowest, %umin ], [ %highest, %umax ], [ %least, %smin ], [ %greatest, %smax ]
  %less = sub i32 %left, 1
  %left.next = and i32 %left, %less
  %more = icmp ne i32 %left.next, 0
  br i1 %more, label %each, label %done
done:
  ret i32 %result
}
