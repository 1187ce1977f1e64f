"""An LLM decode engine on a lease: many tenants, one pass a step, every token what it would be alone."""
