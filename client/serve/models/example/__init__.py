"""The example: a classifier of handwritten digits, and the settings of a server for it."""
