"""The worker processes as the broker sees them: started, watched, scrubbed, adopted, proved gone."""
