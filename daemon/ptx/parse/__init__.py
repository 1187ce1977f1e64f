"""Parses PTX text into a typed tree. Nothing here depends on the meaning of an instruction, except for `alloca`."""
