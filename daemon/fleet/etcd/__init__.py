"""etcd's key-value store, version 3: its transactions as values, and a client."""
