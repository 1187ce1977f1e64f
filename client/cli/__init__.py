"""The command `gpulease`: everything that a person types."""
