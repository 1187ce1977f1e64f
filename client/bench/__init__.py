"""The measurements of `gpulease bench`: sessions, leases, regions, fleets and the decode engine."""
