"""Records of leases: the journal, the audit log, the log and the metrics.

`lease_facts` turns each event of the lease table into facts, from which the audit log, the log and the metrics are
made. `group_commit` has the thread that commits for the journal and the audit log, and the rule that a grant is
reported only when it is durable.
"""
