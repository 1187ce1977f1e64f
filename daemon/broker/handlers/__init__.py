"""The handlers of control requests: `requests` maps each operation to a method of one of them."""
