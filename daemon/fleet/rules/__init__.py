"""The rules of a fleet, pure: events and the time go in, effects come out."""
