"""The settings: read from the command line and a file, checked once, told in sentences."""
