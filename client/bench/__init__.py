"""What `gpulease bench` measures: sessions, leases, regions, fleets and the decode engine."""
