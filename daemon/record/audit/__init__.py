r"""The audit log: which tenant had which lease and why it ended, in a chain of records that reveals any later change.

The format, for other programs; `vectors/audit/` has it as bytes.

**Lines.** A log is a folder of files `audit-<first sequence number, 16 digits>.jsonl`, read in the order of their names
as one text. Each record is one line that ends with one newline (0x0A) and is in canonical form.

**Canonical form.** The subset of RFC 8785 (JCS) that a log needs: UTF-8, no white space, the keys of every object
sorted, shortest escapes (`\b \t \n \f \r \" \\`, `\u00xx` in lower case for the other control characters, all
else as it is). Values are objects, arrays, strings, integers from -(2^53 - 1) to 2^53 - 1, true, false and null, but
no floats. Keys are ASCII letters, digits and underscores, so every order of sorting agrees.

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

**The head.** A file of 256 bytes, `head.json` next to the log or wherever the operator put it: one canonical object
(`seq`, `hash` of that record's line, `boot`, and `alive_us`, the last time at which the daemon was known to live),
spaces, and a newline. A log that ends before its head was cut, and one with another record there was edited.

**Torn lines.** A crash can leave a piece of a line. It is never removed: the next record describes it in `data.torn`
(`offset` in the file, `size_bytes`, `sha256`), a newline separates the two, and the piece does not belong to the chain.

**Notes.** The kind `note` has a tenant's own words: `lease`, `tenant`, and the object `note`. A reader skips kinds that
it does not know: the chain is the same for all.

**Removed files.** The operator may keep a bounded number of files. Before the daemon removes one, a record of the kind
`prune` holds the last sequence number and hash in it.
"""
