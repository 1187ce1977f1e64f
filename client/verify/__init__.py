"""Tests, on this host's card and with a private daemon, that leases keep their promises."""
