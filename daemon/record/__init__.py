"""Records of leases: the journal, the audit log, the log and the metrics.

`history` turns each event of the lease table into facts, which the last three render. `durable` is the thread that
commits for the journal and the audit log, and the rule that a grant is reported only when it is durable.
"""
