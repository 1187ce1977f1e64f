"""The journal: leases, fences, revoked ids, spent tokens and a drain, in one SQLite file that survives the broker.

`on_event` records every event before its effects are executed. `answer` holds every outcome until all records of its
causes are on the disk. `Journal` serves a daemon that keeps none; `FileJournal` is the real journal.
"""

from gpulease.daemon.record.journal.database import JournalBroken
from gpulease.daemon.record.journal.journal import FileJournal, Journal, open_journal
from gpulease.daemon.record.journal.rows import MembershipRow, RelayRow

__all__ = ["FileJournal", "Journal", "JournalBroken", "MembershipRow", "RelayRow", "open_journal"]
