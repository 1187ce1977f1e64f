"""The worker processes as the broker sees them: forked, watched, scrubbed, taken over, and proved gone."""
