"""Measurements for developers, which are not in the wheel; `gpulease bench` has those that operators run."""
