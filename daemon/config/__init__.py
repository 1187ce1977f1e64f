"""The settings: read from the command line and a file, checked once; a wrong one is refused with a sentence."""
