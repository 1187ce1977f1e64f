"""The tiny model with which the decode engine is tested, as Hugging Face files, and the program that trained it."""
