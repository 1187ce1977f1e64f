"""The command `gpulease`: everything a person types."""
