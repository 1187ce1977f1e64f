"""The tiny model that the decode engine is tested with, as Hugging Face files, and the program that trained it."""
