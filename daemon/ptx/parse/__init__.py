"""PTX text to a typed tree. Nothing in here knows what an instruction does."""
