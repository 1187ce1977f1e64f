"""The blocking API: every call returns when its operation is done."""
