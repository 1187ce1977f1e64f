"""Records of leases: the journal, the audit log, the log and the metrics.

`lease_facts` turns each event of the lease table into facts; the audit log, the log and the metrics are made from them.
`group_commit` is the thread that commits for the journal and the audit log, and the rule that a grant is reported only
once it is durable.
"""
