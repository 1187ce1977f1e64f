"""Which cards there are, and the proof that what was taken from them is back."""
