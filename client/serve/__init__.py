"""Programs that serve others on leases: the gateway, the model server, and calls through shared memory."""
