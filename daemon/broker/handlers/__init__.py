"""The control operations, by what they ask for."""
