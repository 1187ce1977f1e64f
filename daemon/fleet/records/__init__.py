"""The records in etcd: the keys, the values and their bounds, and the settings that they depend on."""
