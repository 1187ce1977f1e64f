"""Serves prompts on a lease: requests, tenants' regions, and recovery from the loss of regions and engines."""
