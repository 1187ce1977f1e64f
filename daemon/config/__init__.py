"""The settings, which are read from the command line and a file and checked once. An error names the wrong setting."""
