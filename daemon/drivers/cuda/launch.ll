; Launches, the question whether they have ended, and small copies, for the worker's native code (interface.py,
; NativeLaunch).
;
; %state is a LaunchState (launch_code.py); offsets: launch_kernel 0, stream_query 8, stream 16, other_streams 24, launches 32,
; tag 40, copy_in 48, copy_out 56, memset 64, zeroed 72,
; set_params 80, graph_launch 88, streams 96, events 104, event_record 112, event_query 120. %record is a LaunchRecord: function 0, grid 8, block 20, shared_bytes 32.
;
; CUDA driver API, cuLaunchKernel: with CU_LAUNCH_PARAM_BUFFER_POINTER (1) and CU_LAUNCH_PARAM_BUFFER_SIZE (2), ended by
; CU_LAUNCH_PARAM_END (0), `extra` names the parameters as one buffer, which is the caller's again on return. Any result
; but CUDA_SUCCESS (0) means that the kernel was not launched, if only because an earlier one has failed.
; cuStreamQuery, cuEventQuery: CUDA_SUCCESS if all has ended, CUDA_ERROR_NOT_READY (600) if not.
; cuMemcpyHtoDAsync of memory that is not pinned has taken the bytes when it returns ("API synchronization behavior"). It
; and cuMemcpyDtoHAsync may wait for the stream: it must be empty.

define i32 @launch(ptr %state, ptr %record, ptr %params, i64 %bytes, i64 %tag) {
entry:
  %size = alloca i64
  %extra = alloca [5 x ptr]
  store i64 %bytes, ptr %size
  store ptr inttoptr (i64 1 to ptr), ptr %extra
  %extra.params = getelementptr ptr, ptr %extra, i64 1
  store ptr %params, ptr %extra.params
  %extra.names.size = getelementptr ptr, ptr %extra, i64 2
  store ptr inttoptr (i64 2 to ptr), ptr %extra.names.size
  %extra.size = getelementptr ptr, ptr %extra, i64 3
  store ptr %size, ptr %extra.size
  %extra.end = getelementptr ptr, ptr %extra, i64 4
  store ptr null, ptr %extra.end
  %launch.kernel = load ptr, ptr %state
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  %function = load ptr, ptr %record
  %numbers = getelementptr i8, ptr %record, i64 8
  %grid.x = load i32, ptr %numbers
  %grid.y.at = getelementptr i32, ptr %numbers, i64 1
  %grid.y = load i32, ptr %grid.y.at
  %grid.z.at = getelementptr i32, ptr %numbers, i64 2
  %grid.z = load i32, ptr %grid.z.at
  %block.x.at = getelementptr i32, ptr %numbers, i64 3
  %block.x = load i32, ptr %block.x.at
  %block.y.at = getelementptr i32, ptr %numbers, i64 4
  %block.y = load i32, ptr %block.y.at
  %block.z.at = getelementptr i32, ptr %numbers, i64 5
  %block.z = load i32, ptr %block.z.at
  %shared.at = getelementptr i32, ptr %numbers, i64 6
  %shared = load i32, ptr %shared.at
  %result = call i32 %launch.kernel(ptr %function, i32 %grid.x, i32 %grid.y, i32 %grid.z, i32 %block.x, i32 %block.y,
    i32 %block.z, i32 %shared, ptr %stream, ptr null, ptr %extra)
  %is.launched = icmp eq i32 %result, 0
  br i1 %is.launched, label %note, label %leave
note:
  %launches.at = getelementptr i8, ptr %state, i64 32
  %launches = load i64, ptr %launches.at
  %launches.more = add i64 %launches, 1
  store i64 %launches.more, ptr %launches.at
  %tag.at = getelementptr i8, ptr %state, i64 40
  store i64 %tag, ptr %tag.at
  br label %leave
leave:
  ret i32 %result
}

define i32 @query(ptr %state) {
entry:
  %others.at = getelementptr i8, ptr %state, i64 24
  %others = load i64, ptr %others.at
  %is.alone = icmp eq i64 %others, 0
  br i1 %is.alone, label %ask, label %unsure
ask:
  %stream.query.at = getelementptr i8, ptr %state, i64 8
  %stream.query = load ptr, ptr %stream.query.at
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  %result = call i32 %stream.query(ptr %stream)
  switch i32 %result, label %unsure [ i32 0, label %ended
                                      i32 600, label %busy ]
ended:
  %launches.at = getelementptr i8, ptr %state, i64 32
  store i64 0, ptr %launches.at
  %zeroed.at = getelementptr i8, ptr %state, i64 72
  store i64 0, ptr %zeroed.at
  ret i32 0
busy:
  ret i32 1
unsure:
  ret i32 2
}

define internal i32 @copy(ptr %state, i64 %function.at, ptr %first, ptr %second, i64 %bytes) {
  %call.at = getelementptr i8, ptr %state, i64 %function.at
  %call = load ptr, ptr %call.at
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  %result = call i32 %call(ptr %first, ptr %second, i64 %bytes, ptr %stream)
  ret i32 %result
}

define i32 @copy_in(ptr %state, i64 %address, ptr %data, i64 %bytes) {
  %to = inttoptr i64 %address to ptr
  %result = call i32 @copy(ptr %state, i64 48, ptr %to, ptr %data, i64 %bytes)
  ret i32 %result
}

define i32 @copy_out(ptr %state, i64 %address, ptr %into, i64 %bytes) {
entry:
  %from = inttoptr i64 %address to ptr
  %result = call i32 @copy(ptr %state, i64 56, ptr %into, ptr %from, i64 %bytes)
  %is.begun = icmp eq i32 %result, 0
  br i1 %is.begun, label %wait, label %leave
wait:
  ; A copy to pinned memory goes on; one to other memory has ended. Nothing else is in the stream.
  %stream.query.at = getelementptr i8, ptr %state, i64 8
  %stream.query = load ptr, ptr %stream.query.at
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  br label %ask
ask:
  %progress = call i32 %stream.query(ptr %stream)
  %is.busy = icmp eq i32 %progress, 600
  br i1 %is.busy, label %ask, label %leave
leave:
  %outcome = phi i32 [ %result, %entry ], [ %progress, %ask ]
  ret i32 %outcome
}

; Zero an allocation in the only stream, after what it holds. Returns 1, and does nothing, if there are several streams,
; which Python orders, or if so much is queued that the driver may wait.
define i32 @zero(ptr %state, i64 %address, i64 %bytes) {
entry:
  %others.at = getelementptr i8, ptr %state, i64 24
  %others = load i64, ptr %others.at
  %is.alone = icmp eq i64 %others, 0
  %launches.at = getelementptr i8, ptr %state, i64 32
  %launches = load i64, ptr %launches.at
  %zeroed.at = getelementptr i8, ptr %state, i64 72
  %zeroed = load i64, ptr %zeroed.at
  %queued = add i64 %launches, %zeroed
  ; MAX_AHEAD_OF_COPY
  %is.early = icmp ule i64 %queued, 512
  %can = and i1 %is.alone, %is.early
  br i1 %can, label %clear, label %refuse
clear:
  %memset.at = getelementptr i8, ptr %state, i64 64
  %memset = load ptr, ptr %memset.at
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  %result = call i32 %memset(i64 %address, i8 0, i64 %bytes, ptr %stream)
  %more = add i64 %zeroed, 1
  store i64 %more, ptr %zeroed.at
  ret i32 %result
refuse:
  ret i32 1
}

; Queue a chain (graphs.py, ChainGraph), which may run in one stream alone. Of %record: executable 0, count 8, nodes 16, each
; a CUgraphNode 0 and its CUDA_KERNEL_NODE_PARAMS 8. cuGraphExecKernelNodeSetParams leaves launches queued before as they
; were.
define i32 @replay(ptr %state, ptr %record, i64 %changed, i64 %tag) {
entry:
  %others.at = getelementptr i8, ptr %state, i64 24
  %others = load i64, ptr %others.at
  %is.alone = icmp eq i64 %others, 0
  br i1 %is.alone, label %begin, label %refuse
begin:
  %executable = load ptr, ptr %record
  %count.at = getelementptr i8, ptr %record, i64 8
  %count = load i64, ptr %count.at
  %nodes.at = getelementptr i8, ptr %record, i64 16
  %nodes = load ptr, ptr %nodes.at
  %set.at = getelementptr i8, ptr %state, i64 80
  %set.params = load ptr, ptr %set.at
  br label %each
each:
  %left = phi i64 [ %changed, %begin ], [ %left.less, %told ]
  %is.more = icmp ne i64 %left, 0
  br i1 %is.more, label %tell, label %launch
tell:
  %number = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %distance = shl i64 %number, 4
  %this = getelementptr i8, ptr %nodes, i64 %distance
  %node = load ptr, ptr %this
  %params.at = getelementptr i8, ptr %this, i64 8
  %params = load ptr, ptr %params.at
  %refused = call i32 %set.params(ptr %executable, ptr %node, ptr %params)
  %is.told = icmp eq i32 %refused, 0
  br i1 %is.told, label %told, label %refuse
told:
  %less = sub i64 %left, 1
  %left.less = and i64 %left, %less
  br label %each
launch:
  %launch.at = getelementptr i8, ptr %state, i64 88
  %graph.launch = load ptr, ptr %launch.at
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  %result = call i32 %graph.launch(ptr %executable, ptr %stream)
  %is.queued = icmp eq i32 %result, 0
  br i1 %is.queued, label %note, label %refuse
note:
  %launches.at = getelementptr i8, ptr %state, i64 32
  %launches = load i64, ptr %launches.at
  %launches.more = add i64 %launches, %count
  store i64 %launches.more, ptr %launches.at
  %tag.at = getelementptr i8, ptr %state, i64 40
  store i64 %tag, ptr %tag.at
  ret i32 0
refuse:
  ret i32 1
}

; Queue a graph of one segment (graphs.py), whose CUgraphExec %executable is, in the selected stream.
define i32 @replay_graph(ptr %state, ptr %executable, i64 %tag) {
entry:
  %launch.at = getelementptr i8, ptr %state, i64 88
  %graph.launch = load ptr, ptr %launch.at
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  %result = call i32 %graph.launch(ptr %executable, ptr %stream)
  %is.queued = icmp eq i32 %result, 0
  br i1 %is.queued, label %note, label %leave
note:
  ; As `CudaContext.replayed` counts it.
  %launches.at = getelementptr i8, ptr %state, i64 32
  %launches = load i64, ptr %launches.at
  %launches.more = add i64 %launches, 1
  store i64 %launches.more, ptr %launches.at
  %tag.at = getelementptr i8, ptr %state, i64 40
  store i64 %tag, ptr %tag.at
  br label %leave
leave:
  ret i32 %result
}

declare i64 @llvm.cttz.i64(i64, i1)

; The three functions of a CardProgress (interface.py).

define i32 @idle(ptr %state) {
entry:
  %others.at = getelementptr i8, ptr %state, i64 24
  %others = load i64, ptr %others.at
  %streams.at = getelementptr i8, ptr %state, i64 96
  %streams = load ptr, ptr %streams.at
  %stream.query.at = getelementptr i8, ptr %state, i64 8
  %stream.query = load ptr, ptr %stream.query.at
  br label %each
each:
  %number = phi i64 [ 0, %entry ], [ %next, %ended ]
  %stream.at = getelementptr ptr, ptr %streams, i64 %number
  %stream = load ptr, ptr %stream.at
  %result = call i32 %stream.query(ptr %stream)
  switch i32 %result, label %unsure [ i32 0, label %ended
                                      i32 600, label %busy ]
ended:
  %next = add i64 %number, 1
  %is.more = icmp ule i64 %next, %others
  br i1 %is.more, label %each, label %all
all:
  ret i32 0
busy:
  ret i32 1
unsure:
  ret i32 2
}

define internal ptr @event(ptr %state, i64 %number) {
  %events.at = getelementptr i8, ptr %state, i64 104
  %events = load ptr, ptr %events.at
  ; MAX_MARKS
  %index = and i64 %number, 63
  %event.at = getelementptr ptr, ptr %events, i64 %index
  %event = load ptr, ptr %event.at
  ret ptr %event
}

define i32 @mark(ptr %state, i64 %number) {
  %event = call ptr @event(ptr %state, i64 %number)
  %record.at = getelementptr i8, ptr %state, i64 112
  %record = load ptr, ptr %record.at
  %stream.at = getelementptr i8, ptr %state, i64 16
  %stream = load ptr, ptr %stream.at
  %result = call i32 %record(ptr %event, ptr %stream)
  ret i32 %result
}

define i32 @reached(ptr %state, i64 %number) {
  %event = call ptr @event(ptr %state, i64 %number)
  %query.at = getelementptr i8, ptr %state, i64 120
  %query = load ptr, ptr %query.at
  %result = call i32 %query(ptr %event)
  %is.busy = icmp eq i32 %result, 600
  %progress = select i1 %is.busy, i32 1, i32 0
  ret i32 %progress
}
