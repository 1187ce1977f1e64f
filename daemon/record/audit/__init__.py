r"""The audit log: records of which tenant had which lease and why it ended, chained so that any later change shows.

Other programs may read the format described here; `vectors/audit/` has examples.

**Lines.** A log is a folder of files `audit-<first sequence number, 16 digits>.jsonl`. In the order of their names, the
files are one text. Each record is one line in canonical form that ends with one newline (0x0A).

**Canonical form.** The form is a subset of RFC 8785 (JCS): UTF-8, no white space, and the keys of every object sorted.
Strings use the escapes `\b \t \n \f \r \" \\`, and `\u00xx` in lower case for the other control characters. No other
character is escaped. Values are objects, arrays, strings, integers from -(2^53 - 1) to 2^53 - 1, true, false and null.
There are no floats. Keys consist of ASCII letters, digits and underscores, so they sort alike by bytes and by UTF-16.

**A record** is an object of exactly these members:

| member | is |
|---|---|
| `seq` | 1 for the log's first record, one more for each that follows |
| `prev` | the SHA-256 of the line before, without its newline, in 64 lower-case hex digits; zeros in record 1 |
| `at` | the wall clock when it happened, RFC 3339 in UTC with microseconds: for people, it may step |
| `boot` | the kernel's boot id, 32 hex digits: `mono_us` means something within one boot |
| `mono_us` | the monotonic clock when it happened, in microseconds: for durations |
| `kind` | what happened |
| `data` | an object: the particulars |

**The head.** The head is a file of 256 bytes: `head.json` next to the log, or another path that the operator chose. It
has one canonical object, then spaces and a newline. The object's members are `seq` of the last record, `hash` of that
record's line, `boot`, and `alive_us`, the last time at which the daemon was known to run. A log that ends before its
head was cut. A log with another record at the head's `seq` was edited.

**Torn lines.** A crash can leave a piece of a line, which is never removed. The daemon ends the piece with a newline,
and the next record describes it in `data.torn` (`offset` in the file, `size_bytes`, `sha256`). The piece does not
belong to the chain.

**Notes.** A record of the kind `note` has members `lease` and `tenant`, and an object `note` that the tenant sent. A
reader skips unknown kinds, and verifies the chain over all kinds.

**Removed files.** The operator may limit the number of files. Before the daemon removes a file, it writes a record of
the kind `prune` with the file's last sequence number and hash.
"""
