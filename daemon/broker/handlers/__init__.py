"""The handlers of control requests: `requests` maps each operation to a method of a handler."""
