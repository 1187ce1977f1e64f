"""A small certificate authority in a folder, for tests, trials and single hosts. Operators bring their own."""
