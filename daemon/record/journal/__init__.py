"""The journal: leases, fences, revoked ids, spent tokens and a drain, in one SQLite file that survives the broker.

`on_event` writes every event down before its effects are carried out. `answer` holds every outcome until all that led
to it is on the disk. `Journal` is that of a daemon that keeps none, `FileJournal` the real one.
"""

from gpulease.daemon.record.journal.database import JournalBroken
from gpulease.daemon.record.journal.journal import FileJournal, Journal, open_journal
from gpulease.daemon.record.journal.rows import KeptMembership, KeptRelay

__all__ = ["FileJournal", "Journal", "JournalBroken", "KeptMembership", "KeptRelay", "open_journal"]
