"""Records of leases: the journal, the audit log, the log and the metrics.

`lease_history` turns each event of the lease table into facts. The audit log, the log and the metrics are made from
facts; `lease_facts` lists their kinds. `group_commit` has the thread that commits for the journal and the audit log. It
also holds each grant until the grant's record is durable.
"""
