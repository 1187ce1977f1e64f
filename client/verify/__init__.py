"""Tests on this host's card, with a private daemon, that leases keep their promises."""
