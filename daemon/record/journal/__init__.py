"""What survives the broker: leases, fences, revoked ids, spent tokens and a drain, in one SQLite file.

A journal is told every event before its effects are carried out (`saw`), and no outcome is told to anybody before all
that led to it is on the disk (`answer`). `Journal` is that of a daemon that keeps none.
"""

from gpulease.daemon.record.journal.journal import FileJournal, Journal, open_journal
from gpulease.daemon.record.journal.rows import KeptRelay
from gpulease.daemon.record.journal.store import JournalBroken

__all__ = ["FileJournal", "Journal", "JournalBroken", "KeptRelay", "open_journal"]
