"""The fleet's records in etcd: keys, values and their limits; and the settings that they depend on."""
