; A driver's functions (NativeLaunch, drivers/interface.py) that record when each launch began, for measurements.
;
; %state is a Stamps (bench/revocation.py), with these offsets: launch 0, query 8, driver 16, times 24, count 32, room 40.
; All launches are counted; only the first `room` of them are recorded.

declare i32 @gpulease_clock_gettime(i32, ptr)

define i32 @stamped_launch(ptr %state, ptr %record, ptr %params, i64 %bytes, i64 %tag) {
entry:
  %time = alloca { i64, i64 }
  %got = call i32 @gpulease_clock_gettime(i32 1, ptr %time)
  %seconds = load i64, ptr %time
  %rest.at = getelementptr i8, ptr %time, i64 8
  %rest = load i64, ptr %rest.at
  %scaled = mul i64 %seconds, 1000000000
  %now = add i64 %scaled, %rest
  %count.at = getelementptr i8, ptr %state, i64 32
  %count = load i64, ptr %count.at
  %count.more = add i64 %count, 1
  store i64 %count.more, ptr %count.at
  %room.at = getelementptr i8, ptr %state, i64 40
  %room = load i64, ptr %room.at
  %fits = icmp ult i64 %count, %room
  br i1 %fits, label %note, label %go
note:
  %times.at = getelementptr i8, ptr %state, i64 24
  %times = load ptr, ptr %times.at
  %place = getelementptr i64, ptr %times, i64 %count
  store i64 %now, ptr %place
  br label %go
go:
  %launch = load ptr, ptr %state
  %driver.at = getelementptr i8, ptr %state, i64 16
  %driver = load ptr, ptr %driver.at
  %result = call i32 %launch(ptr %driver, ptr %record, ptr %params, i64 %bytes, i64 %tag)
  ret i32 %result
}

define i32 @stamped_query(ptr %state) {
  %query.at = getelementptr i8, ptr %state, i64 8
  %query = load ptr, ptr %query.at
  %driver.at = getelementptr i8, ptr %state, i64 16
  %driver = load ptr, ptr %driver.at
  %result = call i32 %query(ptr %driver)
  ret i32 %result
}

; Copies go through Python, which knows the driver's own state.
define i32 @unstamped(ptr %state, i64 %address, ptr %data, i64 %bytes) {
  ret i32 1
}
