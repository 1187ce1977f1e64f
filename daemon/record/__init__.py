"""What is kept of leases: the journal, the audit log, the lease log and the metrics."""
