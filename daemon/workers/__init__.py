"""The broker's side of worker processes: they are forked, watched, scrubbed, taken over, and proved gone."""
