"""The journal: leases, fences, revoked ids, spent tokens and drains, in an SQLite file for the next daemon.

`on_event` records every event before its effects are executed. `answer` holds every outcome until all events before it
are on the disk. `FileJournal` is the journal. Its base, `Journal`, is used by a daemon without one, and records
nothing.
"""

from gpulease.daemon.record.journal.database import JournalBroken
from gpulease.daemon.record.journal.journal import FileJournal, Journal, open_journal
from gpulease.daemon.record.journal.rows import MembershipRow, RelayRow

__all__ = ["FileJournal", "Journal", "JournalBroken", "MembershipRow", "RelayRow", "open_journal"]
