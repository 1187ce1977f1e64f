"""The rules of a fleet, as pure functions of events and time: events go in, effects come out."""
