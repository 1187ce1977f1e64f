"""PTX text to a typed tree. Nothing in here depends on the meaning of an instruction."""
