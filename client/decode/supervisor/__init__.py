"""Serves prompts on a lease: requests, tenants' regions, losses of engines and what replaces them."""
