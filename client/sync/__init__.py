"""The blocking API. Every call returns when its operation is done."""
